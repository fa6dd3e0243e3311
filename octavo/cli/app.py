"""Commands and their error handling: what is the user's to mend is one clear line and exit code 2."""

import sys
from collections.abc import Sequence
from typing import Annotated

import cyclopts
from cyclopts import App, Parameter

from octavo.cli.options import BenchOptions, PrefixBenchOptions
from octavo.config import EngineConfig
from octavo.errors import OctavoError
from octavo.sampling_params import SamplingParams

Engine = Annotated[EngineConfig, Parameter(name="*")]
# --seed is the engine's: it seeds every request.
Sampling = Annotated[SamplingParams, Parameter(name="*")]

app = App(
    name="octavo",
    help="A small, complete and fast LLM inference engine built on paged attention.",
    version_flags=["--version"],
    config=[
        cyclopts.config.Env("OCTAVO_", command=False),
        cyclopts.config.Toml("octavo.toml", search_parents=False),
    ],
)


@app.command
def generate(
    prompts: list[str] | None = None,
    /,
    *,
    json: bool = False,
    quiet: bool = False,
    engine: Engine = EngineConfig(),
    sampling: Sampling = SamplingParams(max_tokens=128),
) -> None:
    """Complete prompts given as arguments, or one prompt per line of standard input.

    Args:
        prompts: texts to continue.
        json: print one JSON object per prompt: ids, texts, finish reasons, log-probabilities, metrics.
        quiet: no progress bars.
        engine: engine options.
        sampling: sampling parameters.
    """
    from octavo.cli.generate import run_generate

    run_generate(prompts or [], engine, sampling, as_json=json, quiet=quiet)


@app.command
def chat(
    messages: list[str] | None = None,
    /,
    *,
    system: str | None = None,
    engine: Engine = EngineConfig(),
    sampling: Sampling = SamplingParams(temperature=0.6, top_p=0.95, max_tokens=512),
) -> None:
    """Chat in the terminal; with messages as arguments, answer them one after the other and leave.

    Args:
        messages: the user's side of a conversation.
        system: system prompt.
        engine: engine options.
        sampling: sampling parameters.
    """
    from octavo.cli.chat import run_chat

    run_chat(messages or [], system, engine, sampling)


bench = App(name="bench")
app.command(bench)


@bench.default
def throughput(
    *,
    workload: Annotated[BenchOptions, Parameter(name="*")] = BenchOptions(),
    engine: Engine = EngineConfig(),
) -> None:
    """Measure offline throughput and latency on random token ids; the last line is JSON.

    Args:
        workload: what is run.
        engine: engine options.
    """
    from octavo.cli.bench import run_bench

    run_bench(workload, engine)


@bench.command
def prefix(*, sweep: Annotated[PrefixBenchOptions, Parameter(name="*")] = PrefixBenchOptions()) -> None:
    """Measure what reading shared prefixes once gains, attention alone; the last line is JSON.

    Args:
        sweep: what is run.
    """
    from octavo.cli.bench_prefix import run_prefix_bench

    run_prefix_bench(sweep)


@app.command
def inspect(model: str | None = None, /, *, engine: Engine = EngineConfig()) -> None:
    """Show a model's architecture and memory plan before loading anything.

    Args:
        model: as --model.
        engine: engine options.
    """
    from octavo.cli.inspect import run_inspect

    run_inspect(model, engine)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line.

    Args:
        arguments: default: sys.argv[1:].
    """
    try:
        app(
            list(sys.argv[1:] if arguments is None else arguments),
            exit_on_error=False,
            print_error=False,
            result_action="return_none",
        )
    except (OctavoError, cyclopts.CycloptsError) as error:
        _fail(" ".join(str(error).split()))
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:
        # The reader (such as `head`) left; nothing is left to say to it.
        sys.stderr.close()
        sys.exit(0)


def _fail(message: str) -> None:
    print(f"octavo: error: {message}", file=sys.stderr)
    sys.exit(2)
