"""Beam search and a best-of-n tree by fork and truncate: what beams share is stored and read once."""

from dataclasses import dataclass

import torch
from paged_decoder import PagedDecoder
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Beam:
    """A sequence by name, the tokens after the prompt, and the sum of their log-probabilities."""

    name: int
    tokens: tuple[int, ...]
    score: float


def pick(beams: list[Beam], logprobs: Tensor, width: int) -> list[tuple[Beam, int, float]]:
    """Return the best `width` continuations (beam, token, score) of beams with logprobs [beams, vocab]."""
    scores = logprobs + torch.tensor([beam.score for beam in beams]).unsqueeze(1)
    best = scores.flatten().topk(width)
    rows, tokens = best.indices // scores.shape[1], best.indices % scores.shape[1]
    picked = zip(rows.tolist(), tokens.tolist(), best.values.tolist(), strict=True)
    return [(beams[row], token, score) for row, token, score in picked]


def beam_search(model: PagedDecoder, prompt: list[int], width: int, num_tokens: int) -> list[Beam]:
    """Return `width` continuations of `num_tokens` tokens, likeliest first; their sequences stay."""
    sequences = model.sequences
    logits = model.run({0: sequences.alloc(0, prompt)})
    beams, num_names = [Beam(0, (), 0.0)], 1
    for _ in range(num_tokens):
        picked = pick(beams, logits.log_softmax(-1), width)
        kept = {beam.name for beam, _, _ in picked}
        for beam in beams:
            if beam.name not in kept:
                sequences.free(beam.name)
        beams = []
        for beam, token, score in picked:
            name = beam.name
            if name in kept:
                kept.remove(name)  # The first continuation keeps the sequence; the others fork it.
            else:
                name, num_names = num_names, num_names + 1
                model.cache.copy_blocks(sequences.fork(beam.name, name))
            beams.append(Beam(name, (*beam.tokens, token), score))
        # Only now: a sequence must not grow before the last of its forks is made.
        extensions = {beam.name: sequences.update(beam.name, beam.tokens[-1:]) for beam in beams}
        logits = model.run(extensions)
    return beams


def best_of_n_tree(model: PagedDecoder, prompt: list[int], n: int, rounds: int, length: int) -> list[int]:
    """Sample n branches of `length` tokens, keep the first half of the likeliest, branch off there again.

    Returns:
        The tokens after the prompt; of the last round the whole branch.
    """
    sequences, generator = model.sequences, torch.Generator().manual_seed(0)
    trunk, text = "trunk", list[int]()
    logits = model.run({trunk: sequences.alloc(trunk, prompt)})
    for index in range(rounds):
        branches = [f"round {index}, branch {i}" for i in range(n)]
        for branch in branches:
            model.cache.copy_blocks(sequences.fork(trunk, branch))
        sequences.free(trunk)
        tokens, scores, after = sample(model, branches, logits.expand(n, -1), length, generator)
        print(f"{n} branches behind {len(prompt) + len(text)} tokens: {blocks_used(model)}")
        best = int(scores.argmax())
        kept = length if index == rounds - 1 else length // 2
        for branch in branches[:best] + branches[best + 1 :]:
            sequences.free(branch)
        trunk, logits = branches[best], after[kept - 1, best : best + 1]
        text += tokens[best, :kept].tolist()
        # The cut may fall into a full block, which later prompts can find: then the branch gets a copy.
        model.cache.copy_blocks(sequences.truncate(trunk, len(prompt) + len(text)))
    sequences.free(trunk)
    return text


def sample(
    model: PagedDecoder, branches: list[str], logits: Tensor, length: int, generator: torch.Generator
) -> tuple[Tensor, Tensor, Tensor]:
    """Grow branches whose logits are [n, vocab] by sampling.

    Returns:
        (tokens [n, length], sums of their log-probabilities [n], logits after each [length, n, vocab]).
    """
    columns, after, scores = list[Tensor](), list[Tensor](), torch.zeros(len(branches))
    for _ in range(length):
        logprobs = logits.log_softmax(-1)
        tokens = logprobs.exp().multinomial(1, generator=generator)
        scores += logprobs.gather(1, tokens)[:, 0]
        new = dict(zip(branches, tokens.tolist(), strict=True))
        logits = model.run({branch: model.sequences.update(branch, token) for branch, token in new.items()})
        columns.append(tokens)
        after.append(logits)
    return torch.cat(columns, dim=1), scores, torch.stack(after)


def blocks_used(model: PagedDecoder) -> str:
    """Say what sharing saves: every block table's length is what a copy per sequence would take."""
    stats = model.sequences.stats()
    return (
        f"{stats.num_referenced} blocks ({stats.referenced_bytes / 2**20:.1f} MiB); a copy for each would "
        f"take {stats.num_table_entries} ({stats.saved_bytes / 2**20:.1f} MiB more)"
    )


def main() -> None:
    model = PagedDecoder(num_blocks=512, block_size=4)
    prompt = model.tokenizer.encode("Long ago, in a small town by the sea, an old man told the children that")
    beams = beam_search(model, prompt, width=64, num_tokens=8)
    print(f"{len(beams)} beams: {blocks_used(model)}")
    for beam in beams[:3]:
        print(f"{beam.score:7.2f} {model.tokenizer.decode(list(beam.tokens))!r}")
    for beam in beams:
        model.sequences.free(beam.name)
    text = best_of_n_tree(model, prompt, n=8, rounds=2, length=4)
    print(f"best of n: {model.tokenizer.decode(text)!r}")
    stats = model.sequences.stats()
    print(f"in use at the end: {stats.referenced_bytes} bytes; cached: {stats.cached_bytes / 2**20:.1f} MiB")


if __name__ == "__main__":
    main()
