"""The commands. An error that the user can fix is one line on standard error.

Exit codes: 0 done; 1 the output cannot be written, or (without a message) its reader left; 2 an option, a
model or a prompt is wrong; 3 the engine failed; 4 some lines of a batch have errors, the others are answered;
130 Ctrl-C.
"""

import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import App, CycloptsError, Parameter

from octavo.cli.groups import in_group
from octavo.cli.interrupts import EXIT_CODE as INTERRUPTED
from octavo.cli.options import (
    BenchOptions,
    ChatSampling,
    EngineOptions,
    GenerateSampling,
    PrefixBenchOptions,
    ServeBenchOptions,
    ServeOptions,
)
from octavo.cli.settings import add_sources, take_config
from octavo.cli.streams import drop_output, leave, prepare_streams
from octavo.errors import EngineError, IncompleteBatchError, OctavoError

Engine = Annotated[EngineOptions, Parameter(name="*")]
Quiet = Annotated[bool, in_group("Logging")]
# Arguments without a flag can only come from the command line.
Texts = Annotated[list[str] | None, Parameter(show_env_var=False)]

app = App(
    name="octavo",
    help="A small, complete and fast LLM inference engine built on paged attention.\n\n"
    "Options may also come from OCTAVO_... variables, and from octavo.toml in the working directory, or the "
    "file that --config FILE or OCTAVO_CONFIG names.",
    version_flags=["--version"],
)
add_sources(app)


@app.command
def generate(
    prompts: Texts = None,
    /,
    *,
    json: Annotated[bool, in_group("Output")] = False,
    quiet: Quiet = False,
    engine: Engine = EngineOptions(),
    # --seed is an engine option; it seeds every request.
    sampling: Annotated[GenerateSampling, Parameter(name="*")] = GenerateSampling(),
) -> None:
    """Complete prompts given as arguments, or one prompt per line of standard input.

    Args:
        prompts: texts to continue.
        json: print one JSON object per prompt: ids, texts, finish reasons, log-probabilities, metrics.
        quiet: show no progress bars.
    """
    from octavo.cli.generate import run_generate

    run_generate(prompts or [], engine, sampling, as_json=json, quiet=quiet)


@app.command
def chat(
    messages: Texts = None,
    /,
    *,
    system: Annotated[str | None, in_group("Conversation")] = None,
    history: Annotated[bool, in_group("Conversation")] = True,
    engine: Engine = EngineOptions(),
    sampling: Annotated[ChatSampling, Parameter(name="*")] = ChatSampling(),
) -> None:
    """Chat in the terminal, or answer the messages given as arguments one after the other.

    Args:
        messages: the user's side of a conversation.
        system: system prompt.
        history: at a terminal, find again what was typed in earlier chats, from a private file.
    """
    from octavo.cli.chat import run_chat

    run_chat(messages or [], system, engine, sampling, history=history)


@app.command
def serve(
    model: str | None = None,
    /,
    *,
    quiet: Quiet = False,
    server: Annotated[ServeOptions, Parameter(name="*")] = ServeOptions(),
    engine: Engine = EngineOptions(),
) -> None:
    """Serve a model over HTTP with OpenAI's API.

    Args:
        model: as --model.
        quiet: show no progress bar.
    """
    from octavo.cli.serve import run_serve

    run_serve(model, engine, server, quiet=quiet)


@app.command
def run_batch(
    model: str | None = None,
    /,
    *,
    input_file: Annotated[Path, Parameter(alias="-i"), in_group("Files")],
    output_file: Annotated[Path, Parameter(alias="-o"), in_group("Files")],
    quiet: Quiet = False,
    engine: Engine = EngineOptions(),
) -> None:
    """Answer a file of requests in OpenAI's batch format, without a server.

    A line that is no request gets an error in output_file, and the others are answered; if there is any
    error, the exit code is 4.

    Args:
        model: as --model.
        input_file: one JSON object a line: custom_id, method, url, body.
        output_file: gets one line for each answer, in any order.
        quiet: show no progress bar.
    """
    from octavo.cli.serve import run_batch

    run_batch(model, engine, input_file, output_file, quiet=quiet)


@app.command
def launch(
    agent: Literal["codex", "claude"],
    /,
    *arguments: Annotated[str, Parameter(show_env_var=False)],
    base_url: Annotated[str, in_group("Server")] = "http://127.0.0.1:8000",
    served_model_name: Annotated[str | None, in_group("Server")] = None,
    write: Annotated[bool, in_group("Files")] = False,
) -> None:
    """Start Codex or Claude Code against a running server, and show the configuration that it gets.

    The server's key comes from OCTAVO_API_KEY.

    Args:
        agent: codex or claude.
        arguments: the agent's own, after `--`.
        base_url: where the server is.
        served_model_name: which of the server's models; default: its first.
        write: after a question, keep the configuration in a file that the agent can also be started with.
    """
    from octavo.cli.launch import run_launch

    run_launch(agent, arguments, base_url, served_model_name, write=write)


@app.command
def collect_env() -> None:
    """Print what a bug report should say about this machine."""
    from octavo.cli.environment import run_collect_env

    run_collect_env()


bench = App(name="bench")
app.command(bench)


@bench.default
def throughput(
    *,
    workload: Annotated[BenchOptions, Parameter(name="*")] = BenchOptions(),
    engine: Engine = EngineOptions(),
) -> None:
    """Measure offline throughput and latency on random token ids; the last line is JSON."""
    from octavo.cli.bench.throughput import run_bench

    run_bench(workload, engine)


@bench.command
def prefix(*, sweep: Annotated[PrefixBenchOptions, Parameter(name="*")] = PrefixBenchOptions()) -> None:
    """Measure how much faster attention is when shared prefixes are read once; the last line is JSON."""
    from octavo.cli.bench.prefix import run_prefix_bench

    run_prefix_bench(sweep)


@bench.command(name="serve")
def bench_serve(*, load: Annotated[ServeBenchOptions, Parameter(name="*")] = ServeBenchOptions()) -> None:
    """Measure any server with OpenAI's API under load; the last line is JSON."""
    from octavo.cli.bench.http_load import run_serve_bench

    run_serve_bench(load)


@app.command(name="compile")
def compile_model(
    model: str | None = None, /, *, quiet: Quiet = False, engine: Engine = EngineOptions()
) -> None:
    """Compile everything that a model needs on this machine, for engines that start later.

    Give the engine options of the later engines. A GPU's kernels depend on these, the model's shapes and the
    GPU, not on the weights: with --load-format dummy a folder with config.json is enough. A CPU's kernels
    serve CPUs of the same model, and all models.

    Args:
        model: as --model.
        quiet: show no progress bar.
    """
    from octavo.cli.load_model import run_compile

    run_compile(model, engine, quiet=quiet)


@app.command
def inspect(
    model: str | None = None,
    /,
    *,
    products: Annotated[bool, in_group("Products")] = False,
    generation: Annotated[str | None, in_group("Products")] = None,
    engine: Engine = EngineOptions(),
) -> None:
    """Show a model's architecture and memory plan without loading it.

    Args:
        model: as --model.
        products: show what multiplies each matrix instead, by numbers of rows, and why.
        generation: with --products, on a GPU of this compute capability, which need not be here: 8 (A100),
            8.9, 9 (Hopper), 10.
    """
    from octavo.cli.inspect import run_inspect

    run_inspect(model, engine, products=products, generation=generation)


def run(arguments: Sequence[str] | None) -> None:
    """Run the command line; see octavo.cli.main.

    Raises:
        SystemExit: with the exit code, unless it is 0.
    """
    try:
        _run(list(sys.argv[1:] if arguments is None else arguments))
        sys.stdout.flush()
        leave(0)
    except EngineError as error:
        _fail(str(error), 3)
    except IncompleteBatchError as error:
        _fail(str(error), 4)
    except CycloptsError as error:
        # The tables of other servers' options are read only then.
        from octavo.cli.other_servers import explained

        _fail(explained(error, app), 2)
    except OctavoError as error:
        _fail(str(error), 2)
    except KeyboardInterrupt:
        leave(INTERRUPTED)
    except BrokenPipeError:
        # The reader, such as `head`, left.
        drop_output()
        leave(1)
    except OSError as error:
        drop_output()
        _fail(f"{error.filename or 'standard output'}: {error.strerror or error}", 1)


def _run(arguments: Sequence[str]) -> None:
    named, rest = take_config(arguments)
    # A server needs no standard output: it answers on sockets.
    prepare_streams(needs_output=rest[:1] != ["serve"])
    add_sources(app, named)
    try:
        app(rest, exit_on_error=False, print_error=False, result_action="return_none")
    finally:
        # Another call in this process may name another file, or none.
        add_sources(app)


def _fail(message: str, exit_code: int) -> None:
    with suppress(OSError):
        print(f"octavo: error: {' '.join(message.split())}", file=sys.stderr)
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError:
        drop_output()
    leave(exit_code)
