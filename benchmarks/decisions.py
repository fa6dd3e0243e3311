"""Many questions over one input: POST /v1/decisions beside separate completions, over HTTP.

Two servers of the same model and options, one after the other: one keeps prefixes, one does not (what a plain
engine does). On the first, all questions go in one body, then as separate completions of one token with
log-probabilities. On the second, some of the separate completions are sent, all at once, and their time is
scaled to all of them; the table says how many. Every leg reads an input that no leg before it has read.

The bound takes the rate at which the second server computes prompts, and the tokens that a decision cannot do
without: the input once, then each question once and each choice. Decisions are compared with scores of
separate requests by their choices. The last line is JSON.

    python benchmarks/decisions.py [--questions 400] [--input-len 8000] [--subset 8] [--gpu] [--save MACHINE]

--gpu takes Qwen3-0.6B's shape with random weights instead of SmolLM2, and sends all separate completions.
"""

import argparse
import json
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from support.common import make_parser, publish, table
from support.http_load import Figures, ServerProcess, free_port
from support.model_folder import model_folder, write_tokenizer
from support.texts import DOCUMENTS

_LIMIT_S, _TIMEOUT_S = 300.0, 7200.0
# The server queues so many requests.
_MOST_AT_ONCE = 1024


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--questions", type=int, default=400)
    parser.add_argument("--input-len", type=int, default=8000)
    parser.add_argument(
        "--subset", type=int, help="separate completions that are timed; default 8, --gpu: all"
    )
    parser.add_argument("--gpu", action="store_true")
    arguments = parser.parse_args()
    report = measure(arguments)
    print_report(report)
    publish("decisions", report, arguments)


def measure(arguments: argparse.Namespace) -> Figures:
    """Run all legs on both servers."""
    num = arguments.questions
    subset = min(num, arguments.subset or (num if arguments.gpu else 8))
    model = random_model() if arguments.gpu else ["smollm2", "--max-model-len", "8192"]
    with server(model, "--enable-prefix-caching") as url:
        text = input_text(url, arguments)
        warm = ask(url, arguments, f"0 {text[:2000]}")
        one = ask(url, arguments, f"1 {text}")
        prompts = ids_of(one)
        cached = separate(url, prompts, num, salt="cached")
        # A score by itself computes the whole prompt.
        equal = agreement(url, one, prompts[: 16 if arguments.gpu else 2])
    with server(model, "--no-enable-prefix-caching") as url:
        separate(url, ids_of(warm), 2, salt="warm")
        plain = separate(url, prompts[:subset], subset, salt="plain")
    rate = sum(map(len, prompts[:subset])) / plain
    usage = one["answer"]["usage"]
    needed = usage["input_tokens"]
    seconds = {"decisions": one["seconds"], "with prefix cache": cached, "plain": plain * num / subset}
    return {
        "questions": num,
        "input_tokens": len(one["answer"]["prompt_token_ids"]),
        "model": "qwen3-0.6b, random weights" if arguments.gpu else "smollm2",
        "separate_timed": subset,
        "seconds": seconds,
        "speedup": {name: value / one["seconds"] for name, value in seconds.items()},
        "computed_tokens": usage["scored_tokens"] - usage["shared_tokens"],
        "needed_tokens": needed,
        "plain_tokens_per_s": rate,
        "bound_s": needed / rate,
        "of_bound": needed / rate / one["seconds"],
        "same_choice_as_scores": equal,
    }


class _Served(ServerProcess):
    """A server whose context is its address."""

    def __enter__(self) -> Any:
        super().__enter__()
        return self.url


def server(model: list[str], *options: str) -> _Served:
    port = free_port()
    command = ["-m", "octavo", "serve", *model, "--port", str(port), "--quiet", *options]
    # All completions may wait at once, for any time.
    command += ["--max-num-queued-tokens", str(1 << 30), "--queue-timeout-s", "0"]
    return _Served(command, port, _LIMIT_S)


def random_model() -> list[str]:
    """A folder of a model of random weights, whose tokenizer writes each letter as a token."""
    folder = model_folder("0.6b")
    write_tokenizer(Path(folder))
    return [folder, "--load-format", "dummy", "--max-model-len", "16384"]


def input_text(url: str, arguments: argparse.Namespace) -> str:
    """Return real text of about as many tokens as asked for."""
    text = "\n\n".join(DOCUMENTS)
    ids: list[int] = post(url, "/tokenize", {"prompt": text})["tokens"]
    ids = (ids * (arguments.input_len // len(ids) + 1))[: arguments.input_len]
    return post(url, "/detokenize", {"tokens": ids})["prompt"]


def ask(url: str, arguments: argparse.Namespace, text: str) -> Figures:
    """Ask all questions in one body."""
    questions = [f"Does part {number} of this text give a reason?" for number in range(arguments.questions)]
    fields: dict[str, Any] = {"input": text, "questions": questions, "return_token_ids": True}
    if arguments.gpu:
        fields |= {"raw": True, "choices": ["y", "n"]}
    begun = time.perf_counter()
    answer = post(url, "/v1/decisions", fields)
    return {"seconds": time.perf_counter() - begun, "answer": answer}


def ids_of(asked: Figures) -> list[list[int]]:
    """Return the ids that a completion of each question continues."""
    shared = asked["answer"]["prompt_token_ids"]
    return [shared + found["token_ids"] for found in asked["answer"]["answers"]]


def separate(url: str, prompts: list[list[int]], num: int, salt: str) -> float:
    """Seconds of so many completions of one token, sent at once."""

    def complete(prompt: list[int]) -> None:
        body = {"prompt": prompt, "max_tokens": 1, "logprobs": 5, "temperature": 0, "cache_salt": salt}
        assert post(url, "/v1/completions", body)["choices"]

    begun = time.perf_counter()
    with ThreadPoolExecutor(min(num, _MOST_AT_ONCE)) as pool:
        list(pool.map(complete, prompts[:num]))
    return time.perf_counter() - begun


def agreement(url: str, asked: Figures, prompts: list[list[int]]) -> float:
    """Share of questions whose choice is that of scores by separate requests."""
    num_equal = 0
    for prompt, found in zip(prompts, asked["answer"]["answers"], strict=False):
        scores = {}
        for choice in (share["value"] for share in found["probabilities"]):
            ids = post(url, "/tokenize", {"prompt": choice, "add_special_tokens": False})["tokens"]
            body = {"prompt": prompt + ids, "max_tokens": 0, "echo": True, "logprobs": 0}
            logprobs = post(url, "/v1/completions", body)["choices"][0]["logprobs"]["token_logprobs"]
            scores[choice] = sum(logprobs[-len(ids) :])
        num_equal += max(scores, key=lambda choice: scores[choice]) == found["choice"]
    return num_equal / len(prompts)


def post(url: str, path: str, body: dict[str, Any]) -> Any:
    data = json.dumps(body).encode()
    request = urllib.request.Request(url + path, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as response:
        return json.load(response)


def print_report(report: Figures) -> None:
    """Print a row for each way to ask, and the bound."""
    num, timed = report["questions"], report["separate_timed"]
    names = {
        "decisions": f"{num} questions in one body",
        "with prefix cache": f"{num} completions, prefix cache on",
        "plain": f"{num} completions, prefix cache off" + ("" if timed == num else f" (from {timed})"),
    }
    rows = [
        [names[name], f"{report['seconds'][name]:.2f}", f"{report['speedup'][name]:.1f}"] for name in names
    ]
    rows.append(["bound", f"{report['bound_s']:.2f}", f"{report['of_bound']:.2f} of it reached"])
    print(table([f"{report['model']}, {report['input_tokens']} tokens", "seconds", "times as long"], rows))
    print(f"tokens computed {report['computed_tokens']}, needed {report['needed_tokens']}")
    print(f"choices equal to separate scores: {report['same_choice_as_scores']:.0%}")


if __name__ == "__main__":
    main()
