"""The commands of `octavo chat`: lines that begin with a slash."""

import dataclasses
import json
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

from octavo.cli.chat.conversation import Conversation
from octavo.errors import OctavoError, RequestTooLongError, SamplingParamsError, refuse_unknown, suggest
from octavo.sampling_params import SamplingParams

# A chat shows one text, and no log-probabilities.
_FIXED = {"n", "logprobs", "prompt_logprobs", "logit_bias", "detokenize", "structured"}
SETTINGS = tuple(field.name for field in dataclasses.fields(SamplingParams) if field.name not in _FIXED)


class Command(NamedTuple):
    """A command: its argument as /help shows it, what it does, and the function that does it."""

    argument: str
    does: str
    run: Callable[[str], None]


class Commands:
    """The commands of one conversation."""

    def __init__(self, conversation: Conversation) -> None:
        self._conversation = conversation
        self.table: Mapping[str, Command] = {
            "/help": Command("", "this list", self._help),
            "/clear": Command("", "begin anew, keep the system prompt", self._clear),
            "/undo": Command("", "forget the last message and its answer", self._undo),
            "/retry": Command("", "answer the last message again", self._retry),
            "/system": Command('[TEXT or ""]', "show, replace or remove the system prompt", self._system),
            "/set": Command("[NAME VALUE]", "show or set how answers are sampled", self._set),
            "/stats": Command("", "what the last answer and the cache took", self._stats),
            "/save": Command("FILE", "write the messages as JSON", self._save),
            "/load": Command("FILE", "continue from such a file", self._load),
            "/exit": Command("", "leave, as Ctrl-D does", _nothing),
        }
        self._aliases = {"/?": "/help", "/new": "/clear", "/reset": "/clear"}
        self._aliases |= {"/quit": "/exit", "/bye": "/exit"}

    @property
    def names(self) -> list[str]:
        """All names that a line may begin with."""
        return [*self.table, *self._aliases]

    def obey(self, text: str) -> bool:
        """Run a command, or answer a message; errors are printed. Returns False if the user leaves."""
        name, *rest = text.split(maxsplit=1)
        try:
            if not text.startswith("/"):
                self._conversation.turn(text)
            elif text.startswith("//"):
                self._conversation.turn(text[1:])
            else:
                return self._run(name, *rest)
        except KeyboardInterrupt:
            # It came a moment too late for the answer.
            print()
        except OSError as error:
            if error.filename is None:
                # Standard output is gone.
                raise
            print(f"octavo: error: {error.filename}: {error.strerror}", file=sys.stderr)
        except OctavoError as error:
            more = " (/clear starts over)" if isinstance(error, RequestTooLongError) else ""
            print(f"octavo: error: {error}{more}", file=sys.stderr)
        return True

    def _run(self, name: str, argument: str = "") -> bool:
        command = self.table.get(self._aliases.get(name, name))
        if command is None:
            near = suggest(name, self.names)
            print(f"unknown command {name!r}{near} (/help lists them; // at the beginning sends a slash)")
        elif argument and not command.argument:
            print(f"{name} takes nothing behind it, got {argument!r}")
        elif not argument and command.argument[:1] not in ("", "["):
            print(f"expected {name} {command.argument}")
        else:
            command.run(argument)
            return command.run is not _nothing
        return True

    def _help(self, _: str) -> None:
        for name, command in self.table.items():
            others = [alias for alias, meant in self._aliases.items() if meant == name]
            also = f" (also {', '.join(others)})" if others else ""
            print(f"{f'{name} {command.argument}':22}{command.does}{also}")
        print(f"{'//TEXT':22}send /TEXT to the model")
        print("Enter sends; Alt-Enter, or a backslash before Enter, begins a new line.")
        print("Ctrl-C stops an answer and keeps the chat. Tab completes commands and paths.")
        print("Up, Down and Ctrl-R find earlier messages.")

    def _clear(self, _: str) -> None:
        self._conversation.clear()

    def _undo(self, _: str) -> None:
        print(f"forgotten: {_shortened(self._conversation.undo())}")

    def _retry(self, _: str) -> None:
        self._conversation.turn(self._conversation.undo())

    def _system(self, text: str) -> None:
        if text:
            self._conversation.set_system("" if text == '""' else text)
        else:
            print(self._conversation.system or "no system prompt")

    def _set(self, argument: str) -> None:
        conversation = self._conversation
        if not argument:
            return self._set_shown(*SETTINGS)
        name, *values = re.split(r"[\s=]+", argument, maxsplit=1)
        refuse_unknown(SamplingParamsError, "unknown setting", [name.replace("-", "_")], SETTINGS)
        if not values:
            raise SamplingParamsError(f"expected /set {name} VALUE, such as /set temperature 0.7")
        changed = {name.replace("-", "_"): _value(values[0])}
        conversation.params = dataclasses.replace(conversation.params, **changed)
        self._set_shown(*changed)

    def _set_shown(self, *names: str) -> None:
        for name in names:
            print(f"{name} {json.dumps(getattr(self._conversation.params, name))}")

    def _stats(self, _: str) -> None:
        conversation = self._conversation
        stats, kv = conversation.llm.stats, conversation.llm.stats.kv
        if conversation.last is not None:
            print(f"last answer: {conversation.summary(conversation.last)}")
        print(f"conversation: {len(conversation.messages)} messages")
        print(f"engine: {stats.num_output_tokens} tokens generated, {stats.num_computed_tokens} computed")
        print(f"prefix cache: {kv.prefix_hit_tokens} of {kv.prefix_query_tokens} prompt tokens were there")

    def _save(self, name: str) -> None:
        path = Path(name).expanduser()
        self._conversation.save(path)
        print(f"{path}: {len(self._conversation.messages)} messages")

    def _load(self, name: str) -> None:
        path = Path(name).expanduser()
        self._conversation.load(path)
        print(f"{path}: {len(self._conversation.messages)} messages")


def _nothing(_: str) -> None:
    """/exit does nothing but end the chat."""


def _value(text: str) -> object:
    """Read JSON, or else a plain text, as for /set stop END."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return {"none": None, "true": True, "false": False}.get(text.lower(), text)


def _shortened(text: str) -> str:
    first = " ".join(text.split())
    return first if len(first) <= 60 else first[:57] + "..."
