"""How share_prefixes=True changes greedy answers by rounding.

Conversations share a system text, and groups of them share a document; each asks its own question. They run
with sharing off, then, as a control, with sharing off in reverse order, then with sharing on. Answers are
compared up to their first different token, since after it the contexts differ. The margin there is how far
apart the logits of the two most likely tokens were. The other figure is the largest difference of a
log-probability among the 20 most likely tokens, up to the first different token.
--golden also compares with float32 answers of Hugging Face transformers on file. The last line is JSON.

    python benchmarks/prefix_accuracy.py [--device auto] [--dtype auto] [--prompts 16] [--golden]
                                         [--save MACHINE]
"""

import argparse
import gc
import json
from itertools import product
from pathlib import Path
from typing import Any

from support.common import figures_table, make_parser, publish
from support.texts import DOCUMENTS

from octavo import LLM, SamplingParams
from octavo.outputs import CompletionOutput

GOLDEN = Path(__file__).parent.parent / "tests" / "golden" / "smollm2_greedy_fp32.json"
OUTPUT_LEN = 64

SYSTEM = """\
You answer questions about the text below. Use only what the text says, and say so when it does not answer the
question. Prefer short sentences and plain words. Numbers keep their units. Do not repeat the question, do not
apologise, and do not mention these instructions."""
QUESTIONS = (
    "What is this text about?",
    "Which reason does it give?",
    "Which number in it matters most, and why?",
    "What would someone who disagrees say?",
)
STYLES = ("", *(f" Answer in {num} sentences." for num in range(2, 33)))

Figures = dict[str, Any]


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument(
        "--prompts", type=int, help="default: 16 on a CPU, 512 on a GPU, where few do not pay"
    )
    parser.add_argument("--golden", action="store_true")
    arguments = parser.parse_args()
    report: Figures = {"sharing": compare_sharing(arguments)}
    if arguments.golden:
        report["golden"] = compare_golden(arguments)
    publish(f"prefix_accuracy-{report['sharing']['dtype']}", report, arguments)


def load(arguments: argparse.Namespace, share_prefixes: bool) -> LLM:
    return LLM(
        "smollm2",
        device=arguments.device,
        dtype=arguments.dtype,
        share_prefixes=share_prefixes,
        max_model_len=2048,
        memory_fraction=0.2,
    )


def compare_sharing(arguments: argparse.Namespace) -> Figures:
    """Run the conversations with sharing off and on, one engine after the other, and print the comparison.

    The control runs them in reverse order with sharing off: rounding that has nothing to do with sharing.
    """
    llm = load(arguments, share_prefixes=False)
    plan = llm.engine.plan
    prompts = make_prompts(llm, arguments.prompts or (16 if plan.device.type == "cpu" else 512))
    flat = answer(llm, prompts)
    llm.reset_prefix_cache()
    control = answer(llm, prompts[::-1])[::-1]
    del llm
    gc.collect()
    shared = answer(load(arguments, share_prefixes=True), prompts)
    figures = {
        "device": str(plan.device),
        "dtype": str(plan.dtype).removeprefix("torch."),
        "prompt_tokens_least": min(map(len, prompts)),
        "prompt_tokens_most": max(map(len, prompts)),
    }
    comparisons = {"on_against_off": compare(flat, shared), "off_in_reverse_order": compare(flat, control)}
    for title, comparison in comparisons.items():
        print_figures(f"sharing {title.replace('_', ' ')}", {**figures, **comparison})
    return {**figures, **comparisons}


def compare(expected: list[CompletionOutput], got: list[CompletionOutput]) -> Figures:
    """Compare answers; margins are those of the expected ones."""
    divergences = find_divergences([a.token_ids for a in expected], [a.token_ids for a in got])
    for divergence in divergences:
        divergence["margin"] = margin(expected[divergence["row"]], divergence["position"])
    return {
        "largest_logprob_difference": max(map(largest_difference, expected, got)),
        **agreement(divergences, len(expected)),
        "divergences": divergences,
    }


def compare_golden(arguments: argparse.Namespace) -> Figures:
    """Answer the golden prompts and compare with the answers on file, whose margins the file has."""
    rows = json.loads(GOLDEN.read_text())["rows"]
    llm = load(arguments, share_prefixes=True)
    answers = answer(llm, [row["prompt_ids"] for row in rows])
    divergences = find_divergences([row["output_ids"] for row in rows], [a.token_ids for a in answers])
    for divergence in divergences:
        divergence["margin"] = rows[divergence["row"]]["margins"][divergence["position"]]
    margins = [gap for row in rows for gap in row["margins"]]
    figures = {
        "dtype": str(llm.engine.plan.dtype).removeprefix("torch."),
        **agreement(divergences, len(rows)),
        "margin_median_of_all_tokens": sorted(margins)[len(margins) // 2],
    }
    print_figures("against float32 answers on file", figures)
    return {**figures, "divergences": divergences}


def make_prompts(llm: LLM, num: int) -> list[list[int]]:
    """Render conversations; they differ in style last, so that few prompts share as well as many."""
    asked = [
        (document, question + style) for style, document, question in product(STYLES, DOCUMENTS, QUESTIONS)
    ]
    if num > len(asked):
        raise SystemExit(f"--prompts must be at most {len(asked)}, got {num}")
    return [
        llm.chat_prompt(
            [
                {"role": "system", "content": f"{SYSTEM}\n\n{document}"},
                {"role": "user", "content": question},
            ]
        )
        for document, question in asked[:num]
    ]


def answer(llm: LLM, prompts: list[list[int]]) -> list[CompletionOutput]:
    """Answer greedily, with the log-probabilities of the 20 most likely tokens at each position."""
    params = SamplingParams(temperature=0, max_tokens=OUTPUT_LEN, ignore_eos=True, logprobs=20)
    return [output.outputs[0] for output in llm.generate(prompts, params)]


def find_divergences(expected: list[list[int]], got: list[list[int]]) -> list[Figures]:
    """Return {row, position} of the first token of each answer that differs, where one does."""
    divergences = []
    for row, (a, b) in enumerate(zip(expected, got, strict=True)):
        position = first_difference(a, b)
        if position < OUTPUT_LEN:
            divergences.append({"row": row, "position": position})
    return divergences


def first_difference(a: list[int], b: list[int]) -> int:
    """Position of the first token that differs, OUTPUT_LEN if none does."""
    pairs = enumerate(zip(a, b, strict=True))
    return next((position for position, (x, y) in pairs if x != y), OUTPUT_LEN)


def margin(completion: CompletionOutput, position: int) -> float:
    """Difference of the logits of the two most likely tokens."""
    assert completion.logprobs is not None
    first, second = sorted(entry.logprob for entry in completion.logprobs[position].values())[:-3:-1]
    return first - second


def largest_difference(a: CompletionOutput, b: CompletionOutput) -> float:
    """Largest difference of a log-probability that both answers list, up to their first difference.

    Position p's log-probabilities depend on the tokens before p, so those at the difference itself count.
    """
    assert a.logprobs is not None
    assert b.logprobs is not None
    end = first_difference(a.token_ids, b.token_ids) + 1
    return max(
        abs(x[token_id].logprob - y[token_id].logprob)
        for x, y in zip(a.logprobs[:end], b.logprobs[:end], strict=True)
        for token_id in x.keys() & y.keys()
    )


def agreement(divergences: list[Figures], num_answers: int) -> Figures:
    """Share of tokens before the first difference, of whole answers, and the margins where they differ."""
    num_equal = OUTPUT_LEN * (num_answers - len(divergences)) + sum(d["position"] for d in divergences)
    return {
        "answers": num_answers,
        "equal_answers": (num_answers - len(divergences)) / num_answers,
        "equal_tokens": num_equal / (OUTPUT_LEN * num_answers),
        "margin_largest_at_a_difference": max((d["margin"] for d in divergences), default=None),
    }


def print_figures(title: str, figures: Figures) -> None:
    shown = {name: value for name, value in figures.items() if name != "divergences"}
    print(f"\n{title}\n{figures_table(shown)}", flush=True)


if __name__ == "__main__":
    main()
