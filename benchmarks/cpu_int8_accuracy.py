"""What quantization="int8" costs in accuracy against float32, teacher-forced on a fixed text.

Prints the perplexity of both, the share of positions where both have the same most likely token, and the mean
and largest difference of the log-probabilities of the text's own tokens. The last line is JSON.

    python benchmarks/cpu_int8_accuracy.py [--save MACHINE]
"""

import math

from support.common import figures_table, make_parser, publish
from support.texts import TIDE

from octavo import LLM, RequestOutput, SamplingParams


def main() -> None:
    parser = make_parser(__doc__)
    arguments = parser.parse_args()
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1)
    exact, rough = (LLM("smollm2", quantization=q).generate(TIDE, params)[0] for q in ("none", "int8"))
    own_exact, own_rough = own_logprobs(exact), own_logprobs(rough)
    gaps = [abs(a - b) for a, b in zip(own_exact, own_rough, strict=True)]
    pairs = zip(best_ids(exact), best_ids(rough), strict=True)
    agreement = sum(a == b for a, b in pairs) / len(gaps)
    figures: dict[str, object] = {
        "num_tokens": len(gaps),
        "perplexity_float32": math.exp(-sum(own_exact) / len(gaps)),
        "perplexity_int8": math.exp(-sum(own_rough) / len(gaps)),
        "top1_agreement": agreement,
        "mean_logprob_difference": sum(gaps) / len(gaps),
        "largest_logprob_difference": max(gaps),
    }
    print(figures_table(figures))
    publish("cpu_int8_accuracy", figures, arguments)


def own_logprobs(output: RequestOutput) -> list[float]:
    """Log-probability of each prompt token after the first."""
    entries = (output.prompt_logprobs or [])[1:]
    return [entry[t].logprob for t, entry in zip(output.prompt_token_ids[1:], entries, strict=True) if entry]


def best_ids(output: RequestOutput) -> list[int]:
    """Most likely token at each position."""
    return [min(entry, key=lambda t: entry[t].rank) for entry in (output.prompt_logprobs or [])[1:] if entry]


if __name__ == "__main__":
    main()
