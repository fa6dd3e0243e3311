"""What is sent back of a long body that a child has read: whatever its answer may need."""

import ast
import inspect

import pytest
from msgspec import Struct

from octavo.server import context
from octavo.server.api import chat, completions
from octavo.server.api.anthropic import messages_route as messages
from octavo.server.api.anthropic.messages_structs import MessagesRequest
from octavo.server.api.responses import response_route as responses
from octavo.server.api.responses.response_structs import ResponsesRequest
from octavo.server.api.structs import ChatRequest, CompletionRequest
from octavo.server.reading.kinds import CHATS, READ, needed

ANSWERED_BY = {
    CompletionRequest: (completions,),
    ChatRequest: (chat, context),
    ResponsesRequest: (responses,),
    MessagesRequest: (messages,),
}
# What holds a body in these files.
BODIES = {"fields", "chat", "request"}


def test_every_kind_of_body_is_known() -> None:
    assert set(READ) == set(ANSWERED_BY) == {CompletionRequest, *(kind for kind, _ in CHATS.values())}


@pytest.mark.parametrize("kind", ANSWERED_BY)
def test_all_fields_come_back_but_those_that_were_read(kind: type[Struct]) -> None:
    given = {name: object() for name in kind.__struct_fields__}
    kept = needed(kind(**given))
    for name, value in given.items():
        assert getattr(kept, name) is READ[kind].get(name, value)


@pytest.mark.parametrize("kind", ANSWERED_BY)
def test_no_answer_reads_what_does_not_come_back(kind: type[Struct]) -> None:
    used = set()
    for module in ANSWERED_BY[kind]:
        for node in ast.walk(ast.parse(inspect.getsource(module))):
            if isinstance(node, ast.Attribute) and _last_name(node.value) in BODIES:
                used.add(node.attr)
    assert used & set(kind.__struct_fields__)
    assert not used & set(READ[kind])


def _last_name(node: ast.expr) -> str:
    return node.id if isinstance(node, ast.Name) else getattr(node, "attr", "")
