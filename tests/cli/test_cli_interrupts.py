"""Ctrl-C, with real signals: exit code 130 and nothing printed, whatever the command is just doing."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from octavo import LLM, SamplingParams
from octavo.cli.chat import conversation
from octavo.cli.chat.conversation import Conversation
from octavo.cli.interrupts import leave_on_interrupt, raise_on_interrupt
from octavo.engine.model_runner import ModelRunner

COMMAND = [sys.executable, "-m", "octavo", "generate", "The capital of France is", "--temperature", "0"]
COMMAND += ["--max-tokens", "400", "--ignore-eos"]
ANSWER = b"The capital of France is Paris"
# From the first imports to the middle of the text: seconds.
MOMENTS = [0, 0.01, 0.03, 0.1, 0.2, 0.3, 0.6, 1.0, 1.6, 2.5]


@pytest.mark.parametrize("moment", MOMENTS)
def test_ctrl_c_at_any_moment_ends_with_130(moment: float) -> None:
    # Python's own start is not ours: it tells when that is over, and the first import after it.
    command = [COMMAND[0], "-X", "importtime", *COMMAND[1:]]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if line.split()[-1:] == [b"octavo.cli"]:
                break
        assert process.stderr.readline()
        time.sleep(moment)
        process.send_signal(signal.SIGINT)
        errors = [line for line in process.stderr if not line.startswith(b"import time:")]
        assert process.wait() == 130
    assert errors == []


def test_an_answer_is_streamed_and_ctrl_c_in_it_ends_with_130() -> None:
    with subprocess.Popen(COMMAND, stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        begun = b""
        while len(begun) < len(ANSWER):
            piece = process.stdout.read(len(ANSWER) - len(begun))
            assert piece, begun
            begun += piece
        assert begun == ANSWER
        process.send_signal(signal.SIGINT)
        process.stdout.read()
        assert process.stderr.read() == b""
        assert process.wait() == 130


def test_where_ctrl_c_is_ignored_it_stays_ignored() -> None:
    """As in a shell's background job."""
    code = "import octavo.cli.interrupts as i, os, signal\ni.leave_on_interrupt()\nos.kill(os.getpid(), 2)"
    start = "import signal, subprocess, sys\nsignal.signal(2, signal.SIG_IGN)\n"
    start += f"sys.exit(subprocess.run([sys.executable, '-c', {code!r}]).returncode)"
    assert subprocess.run([sys.executable, "-c", start]).returncode == 0


def test_the_handler_is_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    before = signal.getsignal(signal.SIGINT)
    assert before is signal.default_int_handler
    exits: list[int] = []
    monkeypatch.setattr(os, "_exit", exits.append)
    leave_on_interrupt()
    try:
        signal.raise_signal(signal.SIGINT)
        assert exits == [130]
    finally:
        raise_on_interrupt()
    assert signal.getsignal(signal.SIGINT) is before
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


def ask(process: subprocess.Popen[bytes], line: str) -> None:
    assert process.stdin is not None
    process.stdin.write(line.encode() + b"\n")


def answer(process: subprocess.Popen[bytes]) -> bytes:
    """Everything that a chat prints until it asks for the next line."""
    assert process.stdout is not None
    text = b""
    while not text.endswith(b"\n> "):
        piece = process.stdout.read(1)
        assert piece, text
        text += piece
    return text


def processor_time(pid: int) -> float:
    """Seconds that a process has worked."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextmanager
def chat_process() -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-m", "octavo", "chat", "--temperature", "0", "--max-tokens", "12"]
    with subprocess.Popen(
        command, bufsize=0, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as process:
        try:
            answer(process)
            yield process
            ask(process, "/quit")
            assert process.wait() == 0
        finally:
            process.kill()


@pytest.mark.usefixtures("loads_once")
def test_ctrl_c_while_a_chat_reads_a_prompt_changes_no_later_answer() -> None:
    """A long message is a prefill of seconds: Ctrl-C comes before the first token."""
    question = "Name three colours."
    params = SamplingParams(temperature=0, max_tokens=12)
    expected = LLM("smollm2").chat([{"role": "user", "content": question}], params)[0].outputs[0].text
    with chat_process() as process:
        before = processor_time(process.pid)
        ask(process, "one two three four five " * 1200)
        while processor_time(process.pid) < before + 0.3:
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        assert answer(process) == b"\n> "
        ask(process, "/reset")
        ask(process, question)
        # /reset prints nothing but the next "> ".
        assert answer(process) == b"> " + expected.encode() + b"\n> "


@pytest.mark.usefixtures("loads_once")
@pytest.mark.parametrize("moment", ["prefill", "print"])
def test_ctrl_c_in_an_answer_leaves_no_request(monkeypatch: pytest.MonkeyPatch, moment: str) -> None:
    llm = LLM("smollm2", num_blocks=64)
    chat = Conversation(llm, SamplingParams(max_tokens=4))
    with monkeypatch.context() as patch:

        def interrupted(*_: object, **__: object) -> None:
            signal.raise_signal(signal.SIGINT)

        if moment == "prefill":
            patch.setattr(ModelRunner, "_forward", interrupted)
        else:
            prints = iter([interrupted])
            patch.setattr(conversation, "print", lambda *_, **__: next(prints, str)(), raising=False)
        chat.turn("Hi")
    # What was shown, or about to be, is kept.
    assert (len(chat.messages), chat.unanswered) == ((0, "Hi") if moment == "prefill" else (2, None))
    stats = llm.stats
    assert (stats.num_running, stats.num_waiting, stats.kv.num_referenced) == (0, 0, 0)
