"""What kv_cache_dtype="fp8" costs in accuracy, against a cache in the model's dtype.

Teacher-forced on a fixed text: perplexity of both, the share of positions where both have the same most
likely token, mean and largest difference of the logits. Greedy on prompts cut from the text: tokens before
the first one that differs. The last line is JSON.

    python benchmarks/fp8_accuracy.py [--model smollm2] [--device auto] [--save MACHINE]
"""

import math
from itertools import takewhile

import torch
from support.common import figures_table, make_parser, publish
from support.texts import TIDE
from torch import Tensor

from octavo import LLM, SamplingParams
from octavo.attention import AttentionMetadata

NUM_PROMPTS = 8
PROMPT_LEN = 24
OUTPUT_LEN = 64


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--device", default="auto")
    arguments = parser.parse_args()
    exact, rough = (
        LLM(arguments.model, device=arguments.device, kv_cache_dtype=dtype, num_blocks=256)
        for dtype in ("auto", "fp8")
    )
    tokenizer = exact.engine.tokenizer
    assert tokenizer is not None, "the model has no tokenizer"
    token_ids = tokenizer.encode(TIDE)
    figures = {**teacher_forced(exact, rough, token_ids), **greedy(exact, rough, token_ids)}
    print(figures_table(figures))
    report: dict[str, object] = {
        "model": arguments.model,
        "device": str(exact.engine.plan.device),
        "kv_dtypes": [str(llm.engine.plan.kv_dtype) for llm in (exact, rough)],
        **figures,
    }
    publish("fp8_accuracy", report, arguments)


def teacher_forced(exact: LLM, rough: LLM, token_ids: list[int]) -> dict[str, float]:
    """Compare the logits of every position of a text."""
    a, b = (all_logits(llm, token_ids) for llm in (exact, rough))
    differences = (a - b).abs()
    return {
        "num_tokens": len(token_ids),
        "perplexity_auto": perplexity(a, token_ids),
        "perplexity_fp8": perplexity(b, token_ids),
        "top1_agreement": (a.argmax(-1) == b.argmax(-1)).double().mean().item(),
        "mean_logit_difference": differences.mean().item(),
        "largest_logit_difference": differences.max().item(),
        "logit_deviation": a.std().item(),
    }


def all_logits(llm: LLM, token_ids: list[int]) -> Tensor:
    """[T, V] float32 logits of a text computed in one step over an otherwise empty cache, on the CPU."""
    runner, device = llm.engine.runner, llm.engine.plan.device
    num_tokens, block_size = len(token_ids), runner.kv_cache.block_size
    positions = torch.arange(num_tokens, dtype=torch.int32, device=device)
    num_blocks = -(-num_tokens // block_size)
    metadata = AttentionMetadata(
        cu_seqlens_q=torch.tensor([0, num_tokens], dtype=torch.int32, device=device),
        seq_lens=torch.tensor([num_tokens], dtype=torch.int32, device=device),
        positions=positions,
        slot_mapping=positions.long(),
        block_table=torch.arange(num_blocks, dtype=torch.int32, device=device).unsqueeze(0),
        max_query_len=num_tokens,
        max_seq_len=num_tokens,
    )
    with torch.inference_mode():
        hidden = runner.decoder.forward(torch.tensor(token_ids, device=device), runner.kv_cache, metadata)
        logits = runner.decoder.compute_logits(hidden).float().cpu()
    llm.reset_prefix_cache()
    return logits


def perplexity(logits: Tensor, token_ids: list[int]) -> float:
    """Return the perplexity of all tokens but the first."""
    return math.exp(torch.nn.functional.cross_entropy(logits[:-1], torch.tensor(token_ids[1:])).item())


def greedy(exact: LLM, rough: LLM, token_ids: list[int]) -> dict[str, float]:
    """Continue pieces of the text with both; count equal tokens up to the first that differs."""
    starts = [i * (len(token_ids) - PROMPT_LEN) // NUM_PROMPTS for i in range(NUM_PROMPTS)]
    prompts = [token_ids[start : start + PROMPT_LEN] for start in starts]
    params = SamplingParams(temperature=0, max_tokens=OUTPUT_LEN, ignore_eos=True)
    texts = [[o.outputs[0].token_ids for o in llm.generate(prompts, params)] for llm in (exact, rough)]
    equal = [
        sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=True)))
        for a, b in zip(*texts, strict=True)
    ]
    return {
        "greedy_output_len": OUTPUT_LEN,
        "greedy_equal_tokens_mean": sum(equal) / len(equal),
        "greedy_equal_tokens_least": min(equal),
        "greedy_equal_outputs": sum(n == OUTPUT_LEN for n in equal) / len(equal),
    }


if __name__ == "__main__":
    main()
