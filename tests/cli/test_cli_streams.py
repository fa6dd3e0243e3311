"""Standard streams that are closed, full, broken or of a narrow encoding: one line and an exit code."""

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_model import TINY_LLAMA

from octavo.cli.streams import prepare_streams, print_json

FULL = pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")


@pytest.fixture
def inspect(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text(json.dumps(TINY_LLAMA))
    return f"inspect '{tmp_path}' --load-format dummy"


def shell(command: str, stdin: bytes = b"", **environment: str) -> tuple[int, str, str]:
    """Run `octavo command` in a shell; returns exit code, output and errors."""
    done = subprocess.run(
        ["bash", "-c", f'set -o pipefail; "$0" -m octavo {command}', sys.executable],
        input=stdin,
        capture_output=True,
        env={**os.environ, **environment},
    )
    errors = done.stderr.decode()
    assert "Traceback" not in errors
    assert "Exception ignored" not in errors
    return done.returncode, done.stdout.decode(), errors


@FULL
@pytest.mark.parametrize("command", ["", "--help", "generate --help"])
def test_output_that_cannot_be_written_is_one_line_and_exit_code_1(command: str) -> None:
    code, _, errors = shell(f"{command} >/dev/full")
    assert (code, errors) == (1, "octavo: error: standard output: No space left on device\n")


@FULL
def test_a_table_that_cannot_be_written(inspect: str) -> None:
    code, _, errors = shell(f"{inspect} >/dev/full")
    assert (code, errors) == (1, "octavo: error: standard output: No space left on device\n")


@FULL
@pytest.mark.slow
@pytest.mark.parametrize("command", ["generate a", "chat a"])
def test_text_that_cannot_be_written(command: str) -> None:
    code, _, errors = shell(f"{command} --max-tokens 2 >/dev/full")
    assert (code, errors) == (1, "octavo: error: standard output: No space left on device\n")


def test_closed_standard_output_is_one_line_and_exit_code_1(inspect: str) -> None:
    assert shell(f"{inspect} >&-") == (1, "", "octavo: error: standard output: closed\n")
    assert shell("generate a >&- 2>&- <&-") == (1, "", "")


def test_closed_standard_input_is_an_empty_one() -> None:
    code, output, errors = shell("generate <&-")
    assert (code, output) == (2, "")
    assert errors == "octavo: error: standard input holds no prompt; give one per line\n"


@pytest.mark.slow
def test_closed_standard_input_ends_a_chat() -> None:
    code, output, errors = shell("chat <&-")
    assert (code, errors) == (0, "")
    assert output.startswith("smollm2 is ready.")


@FULL
@pytest.mark.parametrize("redirection", ["2>&-", "2>/dev/full"])
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_errors_that_nobody_can_read_keep_their_exit_code(redirection: str, unbuffered: str) -> None:
    command = f"generate a --block-size 0 {redirection}"
    assert shell(command, PYTHONUNBUFFERED=unbuffered) == (2, "", "")


def test_a_reader_that_left_is_told_nothing() -> None:
    """Exit code 1: as with other commands, a shell with pipefail takes it for a failure."""
    assert shell("--help | true") == (1, "", "")
    # All of it may be in the pipe before the reader leaves.
    _, output, errors = shell("--help | head -c 1")
    assert (len(output), errors) == (1, "")


@pytest.mark.slow
def test_a_reader_of_a_table_that_left_is_told_nothing(inspect: str) -> None:
    assert shell(f"{inspect} | true") == (1, "", "")


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8", "shift-jis"])
def test_text_comes_out_in_any_encoding(encoding: str, monkeypatch: pytest.MonkeyPatch) -> None:
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding=encoding, write_through=True))
    prepare_streams()
    text = "é中\udcff"
    print(text)
    assert written.getvalue() == text.encode(encoding, errors="backslashreplace") + b"\n"
    written.truncate(written.seek(0))
    print_json('{"a": "é中"}')
    assert json.loads(written.getvalue().decode(encoding)) == {"a": "é中"}


def test_an_error_handler_of_the_users_own_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii", errors="replace")
    monkeypatch.setattr(sys, "stdout", stream)
    prepare_streams()
    assert stream.errors == "replace"


@pytest.mark.slow
def test_text_of_a_model_comes_out_in_ascii() -> None:
    command = "generate 'é中' --max-tokens 1 --temperature 0"
    code, output, errors = shell(command, PYTHONIOENCODING="ascii", PYTHONUTF8="1")
    assert (code, errors) == (0, "")
    assert output.startswith(r"\xe9\u4e2d")


def test_bytes_that_are_no_text_are_refused() -> None:
    code, output, errors = shell("generate", stdin=b"fine\n\xff\n", PYTHONIOENCODING="utf-8")
    assert (code, output) == (2, "")
    assert errors == r"octavo: error: text 2 of standard input must be utf-8 text, got '\udcff'" + "\n"


@pytest.mark.parametrize(
    "command",
    ["generate $'\\xff'", "chat $'\\xff'", "generate a --stop $'\\xff'", "inspect $'\\xff'", "$'\\xff'"],
)
def test_arguments_that_are_no_text_are_refused(command: str) -> None:
    code, output, errors = shell(command, PYTHONUTF8="1")
    assert (code, output) == (2, "")
    assert errors.startswith("octavo: error: ")
    assert errors.count("\n") == 1
    if command in ("generate $'\\xff'", "chat $'\\xff'"):
        # Before a model is loaded.
        assert errors.endswith("text 1 of the command line must be utf-8 text, got '\\udcff'\n")
