"""`octavo generate`: complete prompts and print them."""

import sys
from typing import TYPE_CHECKING

import msgspec

from octavo.cli.load_model import load
from octavo.cli.options import GenerateSampling
from octavo.cli.streams import check_text, print_json
from octavo.config import EngineConfig
from octavo.errors import PromptError, SamplingParamsError
from octavo.json_file import without_mark
from octavo.outputs import RequestOutput
from octavo.sampling_params import SamplingParams

if TYPE_CHECKING:
    from octavo.llm import LLM


def run_generate(
    prompts: list[str], config: EngineConfig, sampling: GenerateSampling, *, as_json: bool, quiet: bool
) -> None:
    """Complete prompts, or the lines of standard input; stream the answer to a single prompt."""
    if not as_json and (sampling.logprobs is not None or sampling.prompt_logprobs is not None):
        raise SamplingParamsError("log-probabilities are printed with --json only")
    check_text(prompts, "the command line", sys.getfilesystemencoding())
    prompts = prompts or _prompts_from_stdin()
    llm = load(config, quiet=quiet)
    params = sampling.completed(llm.engine.sampling_defaults.values)
    if len(prompts) == 1 and params.n == 1 and not as_json:
        _stream(llm, prompts[0], params)
        return
    for output in llm.generate(prompts, params, progress=not quiet and sys.stderr.isatty()):
        if as_json:
            print_json(msgspec.json.encode(output).decode())
        else:
            _print(output)


def _stream(llm: "LLM", prompt: str, params: SamplingParams) -> None:
    stream = llm.stream(prompt, params)
    print(prompt, end="", flush=True)
    for delta in stream:
        print(delta.text, end="", flush=True)
    print()


def _print(output: RequestOutput) -> None:
    for completion in output.outputs:
        label = f"{output.request_id}.{completion.index}" if len(output.outputs) > 1 else output.request_id
        print(f"[{label}] {output.prompt}{completion.text}")


def _prompts_from_stdin() -> list[str]:
    if sys.stdin.isatty():
        raise PromptError("give prompts as arguments, or one per line on standard input")
    lines = without_mark(sys.stdin.read()).split("\n")
    prompts = [line for line in lines if line.strip()]
    check_text(prompts, "standard input", sys.stdin.encoding)
    if not prompts:
        raise PromptError("standard input holds no prompt; give one per line")
    return prompts
