"""The messages of a chat, and how one more is answered."""

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from octavo.errors import FileFormatError, PromptError
from octavo.json_file import read_json_object
from octavo.outputs import RequestOutput
from octavo.sampling_params import SamplingParams

if TYPE_CHECKING:
    from octavo.llm import LLM

_MAX_FILE_BYTES = 64 << 20
Message = dict[str, str]


class Conversation:
    """A system prompt, turns of a user's message and an answer, and how answers are sampled.

    Attributes:
        llm: answers.
        params: those of the next answer.
        messages: what the model has seen: the system prompt, if there is one, then whole turns.
        unanswered: the last message, if it got no answer and is not among `messages`.
        last: the output of the last answer.
    """

    def __init__(self, llm: "LLM", params: SamplingParams, system: str = "") -> None:
        self.llm = llm
        self.params = params
        self.messages: list[Message] = []
        self.unanswered: str | None = None
        self.last: RequestOutput | None = None
        self._file: Path | None = None
        self.set_system(system)

    @property
    def system(self) -> str:
        """The system prompt, or ""."""
        first = self.messages[0] if self.messages else {}
        return first["content"] if first.get("role") == "system" else ""

    def set_system(self, text: str) -> None:
        """Replace the system prompt and keep the turns; "" removes it."""
        turns = self.messages[bool(self.system) :]
        self.messages = [*([{"role": "system", "content": text}] if text else []), *turns]

    def clear(self) -> None:
        """Forget the turns and keep the system prompt."""
        self.messages = self.messages[: bool(self.system)]
        self.unanswered = self.last = None

    def turn(self, text: str) -> None:
        """Answer a message; one that gets no token of an answer is not kept.

        Raises:
            OctavoError: the message was refused.
        """
        self.unanswered = text
        user: Message = {"role": "user", "content": text}
        answer, stopped = self._answer([*self.messages, user])
        if stopped:
            print("[stopped; /retry answers again]", file=sys.stderr)
        if stopped and not answer:
            return
        self.messages += [user, {"role": "assistant", "content": answer}]
        self.unanswered = None

    def undo(self) -> str:
        """Forget the last message and its answer; return the message.

        Raises:
            PromptError: there is none.
        """
        text, self.unanswered = self.unanswered, None
        if text is not None:
            return text
        index = max((i for i, message in enumerate(self.messages) if message["role"] == "user"), default=None)
        if index is None:
            raise PromptError("there is no message yet")
        text = self.messages[index]["content"]
        del self.messages[index:]
        return text

    def save(self, path: Path) -> None:
        """Write the messages as JSON, in the form of a chat request's body.

        Raises:
            PromptError: the file exists, and this conversation was neither saved nor loaded there.
            OSError: it cannot be written.
        """
        if path != self._file and os.path.lexists(path):
            raise PromptError(f"{path} exists already; choose another name, or delete it first")
        document = json.dumps({"messages": self.messages}, ensure_ascii=False, indent=1)
        path.write_text(document + "\n", encoding="utf-8", errors="backslashreplace")
        self._file = path

    def load(self, path: Path) -> None:
        """Replace the messages by those of a file.

        Raises:
            FileFormatError: it cannot be read, or holds something else than messages in turns.
        """
        found = read_json_object(path, _MAX_FILE_BYTES)
        try:
            messages = msgspec.convert(found.get("messages"), list[Message])
        except msgspec.ValidationError as error:
            raise FileFormatError(f"{path}: messages: {error}") from error
        _check_turns(path, messages)
        self.clear()
        self.messages, self._file = messages, path

    def _answer(self, messages: list[Message]) -> tuple[str, bool]:
        """Print an answer as it comes, then a summary; return it, and whether Ctrl-C ended it."""
        output: RequestOutput | None = None
        text, stopped = "", False
        try:
            with self.llm.chat_stream(messages, self.params) as stream:
                for delta in stream:
                    text, output = text + delta.text, delta.output
                    print(delta.text, end="", flush=True)
        except KeyboardInterrupt:
            stopped = True
        print()
        if output is not None:
            self.last = output
            print(f"[{self.summary(output)}]", file=sys.stderr)
        return text, stopped

    def summary(self, output: RequestOutput) -> str:
        """Describe an answer in one line: its tokens, their speed, and what the prefix cache gave."""
        metrics, kv = output.metrics, self.llm.stats.kv
        ttft, total = metrics.time_to_first_token_s or 0.0, metrics.e2e_latency_s or 0.0
        rate = (metrics.num_output_tokens - 1) / (total - ttft) if total > ttft else 0.0
        num_blocks = -(-(metrics.num_prompt_tokens + metrics.num_output_tokens) // kv.block_size)
        return (
            f"{metrics.num_output_tokens} tokens, {rate:.1f} tokens/s, "
            f"first token after {ttft * 1000:.0f} ms, {num_blocks} of {kv.num_blocks} KV blocks used, "
            f"prefix cache hit {output.num_cached_tokens} of {metrics.num_prompt_tokens} prompt tokens"
        )


def _check_turns(path: Path, messages: list[Message]) -> None:
    """Refuse messages that are not an optional system prompt, then a user's and an assistant's in turns."""
    for message in messages:
        if set(message) != {"role", "content"}:
            raise FileFormatError(f"{path}: each message must have role and content, got {list(message)}")
    roles = [message["role"] for message in messages]
    turns = roles[1:] if roles[:1] == ["system"] else roles
    if turns != ["user", "assistant"] * (len(turns) // 2):
        raise FileFormatError(
            f"{path}: expected a system prompt or none, then user and assistant in turns, got {roles[:8]}"
        )
