"""`octavo chat`: its commands, its keys, its history, and a real terminal."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import cast

import pytest
from prompt_toolkit.completion import CompleteEvent
from prompt_toolkit.document import Document
from prompt_toolkit.input import create_pipe_input
from prompt_toolkit.input.base import PipeInput
from prompt_toolkit.output import DummyOutput
from terminals import terminal

from octavo import LLM
from octavo.cli.chat.commands import Commands
from octavo.cli.chat.conversation import Conversation
from octavo.cli.chat.terminal import MAX_TEXTS, FileHistory, history_of, history_path, make_session
from octavo.sampling_params import SamplingParams


@pytest.fixture
def chat(loads_once: None) -> Conversation:
    return Conversation(
        LLM("smollm2", num_blocks=64), SamplingParams(temperature=0, max_tokens=4), "Be brief."
    )


@pytest.fixture
def say(chat: Conversation, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Give lines to the chat; return what it wrote."""
    commands = Commands(chat)

    def give(*lines: str) -> str:
        capsys.readouterr()
        for line in lines:
            assert commands.obey(line)
        written = capsys.readouterr()
        return written.out + written.err

    return give


def contents(chat: Conversation, role: str = "user") -> list[str]:
    return [message["content"] for message in chat.messages if message["role"] == role]


def test_turns_are_kept_undone_and_answered_again(chat: Conversation, say: Callable[..., str]) -> None:
    say("Hi", "Why?")
    first = list(chat.messages)
    assert [message["role"] for message in first] == ["system", *["user", "assistant"] * 2]
    say("/retry")
    assert chat.messages == first
    assert "forgotten: Why?" in say("/undo")
    assert contents(chat) == ["Hi"]
    say("/clear")
    assert chat.messages == [{"role": "system", "content": "Be brief."}]
    assert "no message yet" in say("/undo")
    assert "no message yet" in say("/retry")


@pytest.mark.parametrize("command", ["/clear", "/new", "/reset"])
def test_what_begins_anew_keeps_the_system_prompt(
    chat: Conversation, say: Callable[..., str], command: str
) -> None:
    say("Hi", command)
    assert contents(chat) == []
    assert chat.system == "Be brief."


def test_two_slashes_send_one(chat: Conversation, say: Callable[..., str]) -> None:
    say("//etc/passwd is what?")
    assert contents(chat) == ["/etc/passwd is what?"]


def test_a_system_prompt_is_shown_replaced_and_removed(chat: Conversation, say: Callable[..., str]) -> None:
    say("Hi")
    assert "Be brief." in say("/system")
    say("/system Be\nlong.")
    assert chat.system == "Be\nlong."
    say('/system ""')
    assert [message["role"] for message in chat.messages] == ["user", "assistant"]
    assert "no system prompt" in say("/system")


@pytest.mark.parametrize(
    ("line", "name", "value"),
    [
        ("/set temperature 0.7", "temperature", 0.7),
        ("/set temperature=0.7", "temperature", 0.7),
        ("/set top-k = 5", "top_k", 5),
        ("/set stop END", "stop", ("END",)),
        ('/set stop ["a b", "c"]', "stop", ("a b", "c")),
        ("/set seed 7", "seed", 7),
        ("/set max_tokens none", "max_tokens", None),
        ("/set ignore_eos TRUE", "ignore_eos", True),
    ],
)
def test_settings(chat: Conversation, say: Callable[..., str], line: str, name: str, value: object) -> None:
    assert say(line).startswith(name)
    assert getattr(chat.params, name) == value
    assert f"{name} {json.dumps(value)}" in say("/set")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("/set temperatur 1", "unknown setting 'temperatur'; did you mean 'temperature'?"),
        ("/set temperature", "expected /set temperature VALUE"),
        ("/set temperature hot", "temperature must be a number"),
        ("/set temperature 0.7 0.8", "temperature must be a number"),
        ("/set top_k 2.5", "top_k must be an integer"),
        ("/set n 2", "unknown setting 'n'"),
        ("/hepl", "unknown command '/hepl'; did you mean '/help'?"),
        ("/frobnicate now", "unknown command '/frobnicate' (/help"),
        ("/usr/bin/env is what?", "// at the beginning sends a slash"),
        ("/", "unknown command '/'"),
        ("/save", "expected /save FILE"),
        ("/clear everything", "/clear takes nothing behind it, got 'everything'"),
        ("/load /nowhere/at/all", "/nowhere/at/all: expected a file"),
        ("/save /nowhere/at/all", "/nowhere/at/all: No such file"),
    ],
)
def test_what_is_no_command_is_answered_and_changes_nothing(
    chat: Conversation, say: Callable[..., str], line: str, message: str
) -> None:
    before = chat.params, list(chat.messages)
    assert message in say(line)
    assert (chat.params, chat.messages) == before


def test_help_names_every_command(chat: Conversation, say: Callable[..., str]) -> None:
    shown = say("/help")
    assert all(name in shown for name in Commands(chat).names)
    assert shown == say("/?")
    assert max(map(len, shown.splitlines())) <= 80


def test_statistics(say: Callable[..., str]) -> None:
    say("Hi", "Why?")
    shown = say("/stats")
    assert "last answer: 4 tokens" in shown
    assert "engine: 8 tokens generated" in shown
    assert "prefix cache: 16 of" in shown


def test_a_refused_message_can_be_sent_again(chat: Conversation, say: Callable[..., str]) -> None:
    assert "/clear starts over" in say("word " * 4000)
    assert contents(chat) == []
    assert "/clear starts over" in say("/retry")
    say("/undo", "Hi")
    assert contents(chat) == ["Hi"]


def test_what_is_saved_is_loaded(chat: Conversation, say: Callable[..., str], tmp_path: Path) -> None:
    file = tmp_path / "chat.json"
    say("Grüße \udcff 中", f"/save {file}")
    assert contents(chat) == [], "a lone surrogate is no text"
    say("Grüße 中")
    saved = list(chat.messages)
    # It may be written again by the same chat, and by no other.
    assert f"{file}: 3 messages" in say(f"/save {file}")
    other = Commands(Conversation(chat.llm, chat.params))
    assert other.obey(f"/save {file}")
    assert json.loads(file.read_text())["messages"] == saved
    say("/clear", "/system Other", f"/load {file}")
    assert chat.messages == saved


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ("[]", "expected a JSON object"),
        ("{}", "messages"),
        ('{"messages": [{"role": "user"}]}', "must have role and content"),
        ('{"messages": [{"role": "user", "content": null}]}', "Expected `str`, got `null`"),
        ('{"messages": [{"role": "user", "content": "a"}]}', "in turns"),
        (
            '{"messages": [{"role": "assistant", "content": "a"}, {"role": "user", "content": "a"}]}',
            "in turns",
        ),
        ('{"messages": [{"role": "tool", "content": "a"}]}', "in turns"),
    ],
)
def test_a_file_that_is_no_chat_is_refused(
    chat: Conversation, say: Callable[..., str], tmp_path: Path, document: str, message: str
) -> None:
    (tmp_path / "chat.json").write_text(document)
    assert message in say(f"/load {tmp_path / 'chat.json'}")
    assert contents(chat, "system") == ["Be brief."]


def test_leaving(chat: Conversation) -> None:
    assert [Commands(chat).obey(word) for word in ("/exit", "/quit", "/bye")] == [False] * 3


@pytest.fixture
def commands() -> Commands:
    """Commands that are only typed."""
    return Commands(Conversation(cast(LLM, None), SamplingParams()))


@pytest.fixture
def keyboard(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[PipeInput]:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    with create_pipe_input() as pipe:
        yield pipe


@pytest.mark.parametrize(
    ("keys", "text"),
    [
        ("one\r", "one"),
        ("one\x1b\rtwo\r", "one\ntwo"),
        ("one\\\rtwo\r", "one\ntwo"),
        ("one\x1b[D\x1b[Dx\r", "oxne"),
        ("\x1b[200~def f():\n  return 1\x1b[201~\r", "def f():\n  return 1"),
        ("typed ahead\n", "typed ahead"),
        ("/he\t\r", "/help"),
        ("/set temp\t 1\r", "/set temperature 1"),
        ("a\\b\r", "a\\b"),
    ],
)
def test_keys(commands: Commands, keyboard: PipeInput, keys: str, text: str) -> None:
    keyboard.send_text(keys)
    session = make_session(commands, False, input=keyboard, output=DummyOutput())
    assert session.prompt().strip() == text


def test_paths_are_completed(commands: Commands, keyboard: PipeInput, tmp_path: Path) -> None:
    (tmp_path / "conversation.json").touch()
    session = make_session(commands, False, input=keyboard, output=DummyOutput())
    assert session.completer is not None
    found = session.completer.get_completions(Document(f"/load {tmp_path}/conv"), CompleteEvent())
    assert [completion.text for completion in found] == ["ersation.json"]


def test_earlier_messages_come_back(commands: Commands, keyboard: PipeInput) -> None:
    for text in ("first\rsecond\x1b\rline\r", "\x1b[A\x1b[A\x1b[A\r"):
        session = make_session(commands, True, input=keyboard, output=DummyOutput())
        keyboard.send_text(text)
        read = [session.prompt() for _ in range(text.count("\r") - text.count("\x1b\r"))]
    assert read == ["first"]
    assert history_path().stat().st_mode & 0o777 == 0o600
    assert history_path().parent.stat().st_mode & 0o777 == 0o700


def test_a_chat_that_keeps_no_history_writes_none(commands: Commands, keyboard: PipeInput) -> None:
    session = make_session(commands, False, input=keyboard, output=DummyOutput())
    keyboard.send_text("secret\r")
    assert session.prompt() == "secret"
    assert not history_path().parent.exists()


def test_the_history_is_bounded_and_private(tmp_path: Path) -> None:
    path = tmp_path / "state" / "history"
    written = FileHistory(path)
    for number in range(MAX_TEXTS + 50):
        written.store_string(f"{number}\n{'x' * 2000}")
    path.chmod(0o644)
    kept = list(FileHistory(path).load_history_strings())
    assert kept[0] == f"{MAX_TEXTS + 49}\n{'x' * 2000}"
    assert len(kept) <= MAX_TEXTS
    assert path.stat().st_size <= 1 << 20
    assert path.stat().st_mode & 0o777 == 0o600
    assert list(FileHistory(path).load_history_strings()) == kept
    assert os.listdir(path.parent) == ["history"]


def test_what_is_no_history_is_read_over(tmp_path: Path) -> None:
    path = tmp_path / "history"
    path.write_bytes(b'"a"\n\xff{\n5\n\n"\\ud800"\n"b"')
    assert list(FileHistory(path).load_history_strings()) == ["b", "\ud800", "a"]


@pytest.mark.parametrize("what", ["link", "folder", "pipe", "unwritable"])
def test_a_history_that_cannot_be_used_is_named(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    path = history_path()
    if what == "unwritable":
        path.parent.touch()
    else:
        path.parent.mkdir()
        make = {
            "link": lambda: path.symlink_to("other"),
            "folder": path.mkdir,
            "pipe": lambda: os.mkfifo(path),
        }
        make[what]()
    history_of(True).append_string("text")
    assert f"octavo: warning: {path} is not used:" in capsys.readouterr().err
    assert not (path.parent / "other").exists()


def test_pipes_need_no_editor() -> None:
    """Standard input that is no terminal is read line by line, without prompt_toolkit."""
    code = "import sys; sys.modules['prompt_toolkit'] = None; from octavo.cli import main; main()"
    command = [sys.executable, "-c", code, "chat", "--max-tokens", "2", "--temperature", "0"]
    done = subprocess.run(command, input=b"Hi\n/bye\n", capture_output=True, check=True)
    assert done.stdout.startswith(b"smollm2 is ready.")
    assert done.stdout.count(b"\n> ") == 2


def test_a_real_terminal(tmp_path: Path) -> None:
    """Several lines, Ctrl-C in an answer and at the prompt, commands, history, Ctrl-D."""
    file = tmp_path / "chat.json"
    options = ["--temperature", "0", "--max-tokens", "2000", "--ignore-eos"]
    with terminal("chat", *options, XDG_STATE_HOME=str(tmp_path)) as chat:
        chat.until("/exit leaves.")
        chat.press("What is gravity?\r")
        chat.until("Gravity is")
        chat.press("\x03")
        chat.until("[stopped;")
        chat.until(">")
        chat.press("\x03")
        chat.until("Ctrl-D or /exit leaves.")
        chat.press("/set max_tokens 3\r")
        chat.until("max_tokens 3")
        chat.press("Once\x1b\ragain.\r")
        chat.until("[3 tokens")
        chat.press(f"/save {file}\r")
        chat.until("4 messages")
        chat.until(">")
        chat.press("\x04")
        assert chat.process.wait() == 0
    turns = json.loads(file.read_text())["messages"]
    assert [turn["content"] for turn in turns[::2]] == ["What is gravity?", "Once\nagain."]
    assert turns[1]["content"].startswith("Gravity is")
    assert json.loads(history_text(tmp_path)[0]) == "What is gravity?"


def history_text(state: Path) -> list[str]:
    return (state / "octavo" / "chat_history").read_text().splitlines()
