"""Options and commands of other servers are answered by name; near names are suggested only when near."""

from pathlib import Path

import pytest
from test_cli_help import COMMANDS

from octavo.cli import main
from octavo.cli.command_line import app
from octavo.cli.other_server_tables import TABLES
from octavo.cli.other_servers import OPTIONS, answers_to, table
from octavo.errors import suggest

pytestmark = pytest.mark.usefixtures("nothing_is_set")
PAGE = Path(__file__).parents[2] / "docs" / "coming-from-a-server.md"
ALL_OPTIONS = {
    name
    for command in COMMANDS.values()
    for argument in command.assemble_argument_collection()
    for name in argument.names
}


def told(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit) as caught:
        main(list(arguments))
    assert caught.value.code == 2
    errors = capsys.readouterr().err
    assert errors.startswith("octavo: error: ")
    assert errors.count("\n") == 1
    return errors


@pytest.mark.parametrize(
    ("arguments", "answer"),
    [
        ("--enable-lora", "LoRA adapters are not supported"),
        ("--lora-modules a=b", "LoRA adapters are not supported"),
        ("--lora a.gguf", "LoRA adapters are not supported"),
        ("--gpu-memory-utilization 0.8", "Use --memory-fraction for vLLM's --gpu-memory-utilization"),
        ("--gpu_memory_utilization=0.8", "Use --memory-fraction"),
        ("--num-gpu-blocks-override 9", "Use --num-blocks"),
        ("--enable-expert-parallel", "Use --expert-parallel"),
        ("-ep", "Use --expert-parallel"),
        ("--enforce-eager", "Use --no-prepare"),
        ("--no-enable-chunked-prefill", "it is always so"),
        ("--speculative-config {}", "speculative decoding is not supported"),
        ("--trust-remote-code", "is never run"),
        ("-O3", "before it is ready"),
        ("-cc.mode=3", "before it is ready"),
        ("--compilation-config.mode=3", "before it is ready"),
        ("-pp 2", "--tensor-parallel-size"),
        ("-dp 2", "Use --replicas"),
        ("-c 4096", "Use --max-model-len for llama.cpp's -c"),
        ("--ctx-size=4096", "Use --max-model-len"),
        ("-ngl 99", "Use --device"),
        ("-np 4", "Use --max-num-seqs"),
        ("-m model.gguf", "Use --model"),
        ("-hf a/b:Q4_0", "Use --model"),
        ("-t 8", "OMP_NUM_THREADS"),
        ("-fa on", "Use --attention-impl"),
        ("-ctk q8_0", "Use --kv-cache-dtype"),
        ("--mmproj a.gguf", "Octavo serves text only"),
        ("--temp 0.5", "Use --temperature (of octavo generate, chat, bench serve)"),
    ],
)
def test_options_of_other_servers(capsys: pytest.CaptureFixture[str], arguments: str, answer: str) -> None:
    message = told(capsys, "serve", *arguments.split())
    assert answer in message
    assert "Did you mean" not in message


def test_every_row_is_answered() -> None:
    """Whichever of its names is given; those that Octavo has, too, are not asked."""
    known = {
        name for argument in COMMANDS["serve",].assemble_argument_collection() for name in argument.names
    }
    for server, rows in OPTIONS.items():
        for row in rows:
            expected = row.note or row.ours.split()[0]
            for name in {*row.names.split()} - {*known, *row.ours.split()}:
                found = list(answers_to(name, known, app))
                assert any(server in answer and expected in answer for answer in found), name


def test_an_answer_names_options_that_exist() -> None:
    for heading, rows in TABLES.items():
        for row in rows:
            if heading == "command":
                words = row.ours.split()[1:2]
                assert not words or (words[0],) in COMMANDS
            else:
                assert set(row.ours.split()) <= ALL_OPTIONS, row.names
                named = {word.strip(",.;:()") for word in row.note.split() if word.startswith("--")}
                assert named <= {*ALL_OPTIONS, "--help"}, row.names
            assert row.ours or row.note


def test_no_option_has_two_answers() -> None:
    for rows in TABLES.values():
        names = [name for row in rows for name in row.names.split()]
        assert len(names) == len(set(names))


def test_an_option_of_another_command_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert "It is an option of octavo serve." in told(capsys, "chat", "--host", "127.0.0.1")
    assert "It is an option of octavo generate, octavo chat" in told(capsys, "serve", "--top-p", "1")


@pytest.mark.parametrize(
    ("verb", "answer"),
    [
        ("pull", "use octavo inspect HUB_ID"),
        ("run", "use octavo chat --model MODEL"),
        ("list", "there is no list of models"),
        ("ls", "there is no list of models"),
        ("ps", "/v1/models"),
        ("stop", "Ctrl-C"),
        ("create", "there is no Modelfile"),
        ("complete", "use octavo generate"),
    ],
)
def test_commands_of_others(capsys: pytest.CaptureFixture[str], verb: str, answer: str) -> None:
    for arguments in ((verb,), (verb, "llama3.2"), (verb, "llama3.2", "--verbose")):
        assert f'Unknown command "{verb}": ' in (message := told(capsys, *arguments))
        assert answer in message


@pytest.mark.parametrize(
    ("given", "near"),
    [
        ("serve --blok-size 4", "Did you mean --block-size?"),
        ("serve --max-modle-len 4", "Did you mean --max-model-len?"),
        ("serve --tensor-parallel 4", "Did you mean --tensor-parallel-size?"),
        ("serv", "Did you mean serve?"),
        ("serve --enable-teleport", ""),
        ("serve --max-unicorns 4", ""),
        ("serve --frobnicate", ""),
        ("serve -z", ""),
        ("serve --z", ""),
        ("frobnicate", ""),
        ("--enable-lora", "Options follow a command"),
    ],
)
def test_only_near_names_are_suggested(capsys: pytest.CaptureFixture[str], given: str, near: str) -> None:
    message = told(capsys, *given.split())
    assert near in message
    assert ("Did you mean" in message) == near.startswith("Did")


def test_common_words_make_no_name_near() -> None:
    assert suggest("enable_lora", ["enable_prefix_caching"]) == ""
    assert suggest("max_wombats", ["max_num_seqs", "max_tokens"]) == ""
    assert suggest("max_len", ["max_model_len"]) == "; did you mean 'max_model_len'?"
    assert suggest("temperatur", ["temperature"]) == "; did you mean 'temperature'?"


@pytest.mark.parametrize("heading", TABLES)
def test_the_page_has_the_tables(heading: str) -> None:
    assert "\n".join(table(heading)) in PAGE.read_text()


def test_the_pages_commands_are_read() -> None:
    for line in PAGE.read_text().splitlines():
        if line.startswith("octavo "):
            app.parse_args(line.split()[1:], exit_on_error=False, print_error=False)
