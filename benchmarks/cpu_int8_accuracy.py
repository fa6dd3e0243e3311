"""What quantization="int8" costs in accuracy: teacher-forced on a fixed text, against float32.

Prints perplexity of both, how often they agree on the most likely token, and the mean and largest difference
of the log-probability of the text's own tokens; the last line is JSON.

    python benchmarks/cpu_int8_accuracy.py [--save MACHINE]
"""

import argparse
import json
import math

from common import machine, save, table

from octavo import LLM, RequestOutput, SamplingParams

TEXT = """\
The tide comes in twice a day because the moon pulls on the sea. Where the shore is flat, the water
walks a long way; where it is steep, it only climbs. Sailors learned to read it long before anyone
could say why. They kept tables, first in their heads and later on paper, and a harbour whose table
was wrong soon had no visitors. In 1687 Newton explained the pull, and a century later Laplace
explained why the sea does not simply follow the moon: water is slow, and the basin it lies in has a
rhythm of its own. A bay whose rhythm is close to twelve hours answers the moon the way a swing
answers a patient child. That is why the water in one bay rises sixteen metres and in the next
hardly at all. To predict a tide today, a computer adds some forty cosines, each with the period of
a wobble of the moon or the sun, and the sum is right to a few centimetres for years ahead, storms
excepted."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--save", metavar="MACHINE")
    arguments = parser.parse_args()
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1)
    exact, rough = (LLM("smollm2", quantization=q).generate(TEXT, params)[0] for q in ("none", "int8"))
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
    print(
        table(
            ["figure", "value"], [[k, f"{v:.4g}" if isinstance(v, float) else v] for k, v in figures.items()]
        )
    )
    report = {"machine": machine(), **figures}
    if arguments.save:
        print("saved", save("cpu_int8_accuracy", report, arguments.save))
    print(json.dumps(report))


def own_logprobs(output: RequestOutput) -> list[float]:
    """Log-probability of each prompt token after the first."""
    entries = (output.prompt_logprobs or [])[1:]
    return [entry[t].logprob for t, entry in zip(output.prompt_token_ids[1:], entries, strict=True) if entry]


def best_ids(output: RequestOutput) -> list[int]:
    """Most likely token at each position."""
    return [min(entry, key=lambda t: entry[t].rank) for entry in (output.prompt_logprobs or [])[1:] if entry]


if __name__ == "__main__":
    main()
