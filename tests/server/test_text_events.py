"""Events whose surroundings were encoded once are byte for byte those that are encoded anew each time."""

from array import array
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from octavo.engine.prompt_reader import TokenIds
from octavo.outputs import CompletionDelta, Logprob, RequestMetrics, RequestOutput
from octavo.server.api import chat, completions
from octavo.server.api.logprobs import LogprobWriter
from octavo.server.api.sse import EventWriter
from octavo.server.api.structs import ChatRequest, CompletionRequest
from octavo.server.api.tools.toolbox import Toolbox
from octavo.server.parsing.formats import ModelFormats

TEXTS = ["hello", ' "text" \\ \'', "", "\x00\n</script>", "😀 नमस्ते", "text", '"content":"text"', "é"]
ID = 'x-"content":"text","text":"text"'
FIELDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "usage at the end": {"stream_options": {"include_usage": True}},
    "usage everywhere": {"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
    "token ids": {"return_token_ids": True},
    "gathered": {"stream_interval": 2},
    "echo": {"echo": True},
    "only echo": {"echo": True, "max_tokens": 0},
}


class Scripted:
    """As much of a Generation as events are made of: two prompts, or one, with two completions each."""

    def __init__(self, num_prompts: int) -> None:
        self.prompts = [TokenIds([5, 6], array("i", [5, 6]))] * num_prompts
        self.outputs = {0: RequestOutput("r", None, [5, 6], [], metrics=RequestMetrics())}

    def deltas(self) -> Iterator[tuple[int, list[CompletionDelta]]]:
        logprobs = ({7: Logprob(-0.5, 1, "a")},)
        for position in range(len(self.prompts)):
            for index in (0, 1):
                for text in TEXTS:
                    yield position, [CompletionDelta("r", index, text, (7,))]
                yield position, [CompletionDelta("r", index, "with logprobs", (7,), logprobs)]
                yield position, [CompletionDelta("r", index, "end", (7,), None, "stop", "end")]


def joined(events: EventWriter, scripted: Scripted) -> bytes:
    parts = [events.write(position, deltas) for position, deltas in scripted.deltas()]
    return b"".join([events.begin(), *parts, events.finish()])


def chat_bytes(fields: dict[str, Any]) -> bytes:
    asked = msgspec.convert({"messages": [{}], **fields}, ChatRequest)
    answer = chat.Answer(ID, 1, '"text"', asked, LogprobWriter(None, 0))
    formats = ModelFormats(None, "", None, shows_tools=False)
    box = Toolbox((), (), frozenset(), must_call=False, parallel=False, formats=formats)
    scripted = Scripted(1)
    return joined(chat.ChatEvents(answer, scripted, box, 2), scripted)  # type: ignore[arg-type]


def completion_bytes(fields: dict[str, Any]) -> bytes:
    asked = msgspec.convert({"prompt": "a", **fields}, CompletionRequest)
    echoes = ["one", "two"] if asked.echo else None
    answer = completions.Answer(ID, 1, '"text"', asked, 2, LogprobWriter(None, 0), echoes)
    scripted = Scripted(2)
    return joined(completions.CompletionEvents(answer, scripted), scripted)  # type: ignore[arg-type]


@pytest.mark.parametrize("fields", FIELDS.values(), ids=FIELDS)
@pytest.mark.parametrize("module", [chat, completions], ids=["chat", "completions"])
def test_same_bytes(monkeypatch: pytest.MonkeyPatch, module: Any, fields: dict[str, Any]) -> None:
    if module is chat and "echo" in fields:
        pytest.skip("chats do not echo")
    write = chat_bytes if module is chat else completion_bytes
    fast = write(fields)
    assert fast.count(b"\n\n") >= 6
    monkeypatch.setattr(module, "is_only_text", lambda delta: False)
    assert fast == write(fields)
