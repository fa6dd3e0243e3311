"""From Anthropic's messages to a chat, and from an answer's pieces to blocks."""

import json
from typing import Any

import jsonschema
import msgspec
import pytest

from octavo.errors import NotReadyError
from octavo.outputs import CompletionOutput
from octavo.server.api.anthropic.messages_input import chat_of, parse_messages
from octavo.server.api.anthropic.messages_route import block_events, blocks_of, ending
from octavo.server.api.anthropic.messages_structs import MessagesRequest, error_body
from octavo.server.api.anthropic.signature import signed
from octavo.server.api.body import decode
from octavo.server.api.responses.response_items import OutputWriter
from octavo.server.api.structs import ChatRequest
from octavo.server.api_errors import ApiError
from octavo.server.parsing.piece import Piece

CLOCK: dict[str, Any] = {
    "name": "now",
    "input_schema": {"type": "object", "properties": {"utc": {"type": "boolean"}}, "required": ["utc"]},
}


def test_every_part_of_a_request_reaches_the_chat() -> None:
    body = {
        "system": [{"type": "text", "text": "Be kind.", "cache_control": {"type": "ephemeral"}}],
        "messages": [
            {"role": "user", "content": "What time is it?"},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "Hm.", "signature": ""},
                    {"type": "text", "text": "I look.", "citations": None},
                    {"type": "tool_use", "id": "a", "name": "now", "input": {"utc": True}},
                    {"type": "tool_use", "id": "b", "name": "now", "input": {}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {
                        "type": "tool_result",
                        "tool_use_id": "a",
                        "content": [{"type": "text", "text": "noon"}],
                    },
                    {"type": "tool_result", "tool_use_id": "b", "content": "no zone", "is_error": True},
                    {"type": "text", "text": "And now?"},
                ],
            },
        ],
        "tools": [CLOCK],
        "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
        "max_tokens": 7,
        "stop_sequences": ["END"],
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 3,
        "thinking": {"type": "disabled"},
    }
    fields, left_out = decode(msgspec.json.encode(body), MessagesRequest)
    asked_for = chat_of(fields)
    assert left_out == ("system[].cache_control",)
    system, first, turn, noon, failed, last = asked_for.messages
    assert system == {"role": "system", "content": "Be kind."}
    assert first == {"role": "user", "content": "What time is it?"}
    assert (turn["content"], turn["reasoning_content"]) == ("I look.", "Hm.")
    assert [call["function"]["arguments"] for call in turn["tool_calls"]] == [{"utc": True}, {}]
    assert noon == {"role": "tool", "tool_call_id": "a", "content": "noon"}
    assert failed == {"role": "tool", "tool_call_id": "b", "content": "Error: no zone"}
    assert last == {"role": "user", "content": "And now?"}
    assert asked_for.tools is not None
    assert asked_for.tools[0].function.parameters == CLOCK["input_schema"]
    assert (asked_for.tool_choice, asked_for.parallel_tool_calls) == ("required", False)
    assert (asked_for.max_tokens, asked_for.stop) == (7, ["END"])
    assert (asked_for.temperature, asked_for.top_p, asked_for.top_k) == (0.5, 0.9, 3)
    assert asked_for.enable_thinking is False


def test_every_kind_of_block_in_answers() -> None:
    pieces = [
        Piece("reasoning", "Hm."),
        Piece("content", "I look."),
        Piece("call", "now"),
        Piece("arguments", '{"utc":'),
        Piece("arguments", " true}"),
        Piece("complete", ""),
    ]
    writer = OutputWriter(lambda: "call_1", parallel=True)
    events = [event for piece in pieces for event in writer.write([piece])] + writer.finish("completed")
    assert [msgspec.to_builtins(block) for block in blocks_of(writer.items)] == [
        {"type": "thinking", "thinking": "Hm.", "signature": signed("Hm.", carries=False)},
        {"type": "text", "text": "I look."},
        {"type": "tool_use", "id": "call_1", "name": "now", "input": {"utc": True}},
    ]
    told = [json.loads(line[6:]) for line in block_events(events).splitlines() if line.startswith(b"data: ")]
    assert [told[index]["content_block"] for index in (0, 4, 7)] == [
        {"type": "thinking", "thinking": "", "signature": ""},
        {"type": "text", "text": ""},
        {"type": "tool_use", "id": "call_1", "name": "now", "input": {}},
    ]
    assert [event["delta"] for event in told if event["type"] == "content_block_delta"] == [
        {"type": "thinking_delta", "thinking": "Hm."},
        {"type": "signature_delta", "signature": signed("Hm.", carries=False)},
        {"type": "text_delta", "text": "I look."},
        {"type": "input_json_delta", "partial_json": '{"utc":'},
        {"type": "input_json_delta", "partial_json": " true}"},
    ]
    stops = [event["index"] for event in told if event["type"] == "content_block_stop"]
    assert stops == [0, 1, 2]


def test_why_an_answer_ended() -> None:
    cut = CompletionOutput(0, finish_reason="length", token_ids=[1, 2, 3])
    assert ending(cut, [], 3).stop_reason == "max_tokens"
    assert ending(cut, [], 4).stop_reason == "model_context_window_exceeded"
    assert ending(CompletionOutput(0, finish_reason="stop"), []).stop_reason == "end_turn"
    assert ending(CompletionOutput(0, finish_reason="stop", stop_reason=5), []).stop_sequence is None
    with pytest.raises(NotReadyError, match="broken off"):
        ending(CompletionOutput(0, finish_reason="abort"), [])


def asked(**fields: Any) -> tuple[ChatRequest, tuple[str, ...]]:
    """Read a body; return the chat that it becomes, and what is left out."""
    body = {"max_tokens": 7, "messages": [{"role": "user", "content": "Hi"}], **fields}
    found = parse_messages(msgspec.json.encode(body), {})
    return found.chat, found.left_out


def said(*content: Any, role: str = "assistant") -> dict[str, Any]:
    return {"role": role, "content": list(content)}


HI = said({"type": "text", "text": "Hi"}, role="user")


def test_efforts_and_forms_are_the_chats() -> None:
    schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}}
    form = {"type": "json_schema", "schema": schema}
    chat, left = asked(output_config={"effort": "low", "format": form, "task_budget": {"total": 1}})
    assert (chat.reasoning_effort, left) == ("low", ("output_config.task_budget",))
    for found in (chat, asked(output_format=form)[0]):
        assert found.response_format is not None
        assert found.response_format.json_schema is not None
        assert found.response_format.json_schema.schema == schema
    system = {"role": "system", "content": "Hurry", "output_config": {"effort": "high"}}
    assert asked(messages=[HI, system], output_config={"effort": "low"})[0].reasoning_effort == "high"
    for kind, thinks in (("enabled", True), ("adaptive", True), ("disabled", False)):
        chat, left = asked(thinking={"type": kind, "budget_tokens": 1024})
        assert (chat.enable_thinking, left) == (thinks, ("thinking.budget_tokens",))


def test_results_of_servers_end_a_turn_of_the_assistants() -> None:
    search = {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {"query": "sea"}}
    page = {
        "type": "web_search_result",
        "url": "http://192.0.2.1",
        "title": "Sea",
        "encrypted_content": "QQ==",
    }
    found = {"type": "web_search_tool_result", "tool_use_id": "s", "content": [page]}
    use = {"type": "mcp_tool_use", "id": "m", "name": "depth", "server_name": "sea", "input": {}}
    result = {
        "type": "mcp_tool_result",
        "tool_use_id": "m",
        "content": [{"type": "text", "text": "9 m"}],
        "is_error": True,
    }
    text = {"type": "text", "text": "Deep.", "citations": [{"type": "web_search_result_location"}]}
    chat, left = asked(messages=[HI, said(search, found, use, result, text)])
    _, first, page_turn, second, failed, last = chat.messages
    assert [turn["tool_calls"][0]["function"]["name"] for turn in (first, second)] == ["web_search", "depth"]
    assert (page_turn["tool_call_id"], json.loads(page_turn["content"])["title"]) == ("s", "Sea")
    assert "QQ==" not in page_turn["content"]
    assert (failed["content"], last["content"]) == ("Error: 9 m", "Deep.")
    assert left == ("messages[].content[].citations",)


def test_documents_and_results_of_searches_are_text() -> None:
    texts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    plain = {"type": "text", "media_type": "text/plain", "data": "body"}
    blocks = [
        {"type": "document", "source": plain, "title": "T", "context": "C", "citations": {"enabled": True}},
        {"type": "document", "source": {"type": "content", "content": texts}},
        {"type": "search_result", "source": "here", "title": "S", "content": texts},
    ]
    inside = {"type": "tool_result", "tool_use_id": "a", "content": blocks}
    chat, _ = asked(messages=[said(inside, *blocks, role="user")])
    result, turn = chat.messages
    assert result["content"] == turn["content"] == "T\nC\nbody\na\nb\nS\nhere\na\nb"
    for source in ({"type": "base64", "data": "JVBERi0="}, {"type": "url", "url": "http://192.0.2.1"}, {}):
        with pytest.raises(ApiError, match=r"messages\[0\].content\[0\].source: expected plain text"):
            asked(messages=[said({"type": "document", "source": source}, role="user")])


def test_a_deferred_tool_is_shown_where_a_block_refers_to_it() -> None:
    """Tools that enter the list later leave the prompt before that as it was."""
    later = {**CLOCK, "name": "later", "description": "For later", "defer_loading": True}
    reference = [{"type": "tool_reference", "tool_name": name} for name in ("later", "now")]
    use = {"type": "tool_use", "id": "a", "name": "search", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "a", "content": reference}
    chat, _ = asked(messages=[HI, said(use), said(result, role="user")], tools=[CLOCK, later])
    shown, other = chat.messages[-1]["content"].split("\n")
    definition = json.loads(shown.removeprefix("The tool later can be called: "))
    assert definition == {"name": "later", "description": "For later", "parameters": CLOCK["input_schema"]}
    assert other == "The tool now can be called"
    assert [tool.function.defer_loading for tool in chat.tools or ()] == [None, True]
    search = {"type": "tool_search_tool_regex_20251119", "name": "tool_search_tool_regex"}
    chat, left = asked(tools=[CLOCK, later, search])
    assert [tool.function.defer_loading for tool in chat.tools or ()] == [None, None]
    assert left == ("tools[] tool_search_tool_*",)


@pytest.mark.parametrize(
    ("kind", "name", "arguments"),
    [
        ("bash_20250124", "bash", {"command": "ls"}),
        ("text_editor_20241022", "str_replace_editor", {"command": "undo_edit", "path": "/a"}),
        ("text_editor_20250124", "str_replace_editor", {"command": "undo_edit", "path": "/a"}),
        (
            "text_editor_20250728",
            "edit",
            {"command": "insert", "path": "/a", "insert_text": "x", "insert_line": 1},
        ),
        ("memory_20250818", "memory", {"command": "rename", "old_path": "/a", "new_path": "/b"}),
    ],
)
def test_tools_of_anthropics_that_a_client_runs_have_schemas(kind: str, name: str, arguments: Any) -> None:
    chat, left = asked(
        tools=[{"type": kind, "name": name, "max_characters": 9, "allowed_callers": ["direct"]}]
    )
    assert chat.tools is not None
    function = chat.tools[0].function
    assert (function.name, left) == (name, ("tools[].allowed_callers", "tools[].max_characters"))
    assert function.description
    jsonschema.validate(arguments, function.parameters)
    if "text_editor_2025072" in kind:
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate({"command": "undo_edit", "path": "/a"}, function.parameters)


def test_fields_of_tools() -> None:
    examples = [{"utc": True}]
    tool = {
        **CLOCK,
        "strict": True,
        "eager_input_streaming": True,
        "cache_control": None,
        "input_examples": examples,
    }
    chat, left = asked(tools=[tool])
    assert chat.tools is not None
    function = chat.tools[0].function
    assert function.parameters == {**CLOCK["input_schema"], "examples": examples}
    assert (function.strict, left) == (True, ("tools[].eager_input_streaming",))
    for kind in ("computer_20251124", "browser_toolset_20260801", 7):
        with pytest.raises(ApiError, match=r"tools\[0\].type .* is not supported"):
            asked(tools=[{"type": kind, "name": "it", "display_width_px": 9}])


def test_a_system_turn_may_be_cleared_by_the_next_one_of_the_user() -> None:
    note = {"role": "system", "content": "Now only", "clear_at": "next_user_message"}
    assert [turn["role"] for turn in asked(messages=[HI, note])[0].messages] == ["user", "system"]
    assert [turn["role"] for turn in asked(messages=[HI, note, said(), HI])[0].messages] == [
        "user",
        "assistant",
        "user",
    ]
    with pytest.raises(ApiError, match=r"messages\[0\].role must not be system"):
        asked(messages=[note, HI])


def test_what_may_be_cleared_stays_where_no_user_s_message_comes_after_it() -> None:
    """Not even a message of the user's clears itself, so that something is left of every conversation."""
    mine = {**HI, "clear_at": "next_user_message"}
    theirs = {"role": "assistant", "content": "So.", "clear_at": "next_user_message"}
    for given, expected in [
        ([mine], ["user"]),
        ([mine, mine], ["user"]),
        ([mine, theirs, mine], ["user"]),
        ([mine, theirs], ["user", "assistant"]),
        ([theirs], ["assistant"]),
        ([theirs, mine, {**theirs, "role": "system"}], ["user", "system"]),
    ]:
        assert [turn["role"] for turn in asked(messages=given)[0].messages] == expected


def test_thinking_that_a_signature_carries_comes_back() -> None:
    def reasoning(**fields: Any) -> str | None:
        block = {"type": "thinking", "thinking": "", **fields}
        (_, turn) = asked(messages=[HI, said(block, {"type": "text", "text": "So."})])[0].messages
        return turn.get("reasoning_content")

    sealed = signed("Hm, é.", carries=True)
    assert reasoning(signature=sealed) == "Hm, é."
    assert reasoning(signature=sealed, thinking="Shown.") == "Shown."
    assert reasoning(signature=signed("Hm.", carries=False)) is None
    for damaged in (sealed[:-4], "A" + sealed[1:], "", "é", "c2lnbmVk", None):
        assert reasoning(signature=damaged) is None
        assert reasoning(signature=damaged, thinking="Hm.") == "Hm."
    silent = said({"type": "redacted_thinking", "data": "QQ=="}, {"type": "fallback", "from": {}, "to": {}})
    assert asked(messages=[HI, silent, HI])[0].messages[1] == {"role": "assistant", "content": ""}


def test_an_answer_without_thinking_has_it_in_signatures() -> None:
    writer = OutputWriter(lambda: "call_1", parallel=True)
    events = writer.write([Piece("reasoning", "Hm."), Piece("content", "So.")]) + writer.finish("completed")
    thinking, text = blocks_of(writer.items, hides=True)
    assert msgspec.to_builtins(thinking) == {
        "type": "thinking",
        "thinking": "",
        "signature": signed("Hm.", carries=True),
    }
    told = block_events(events, hides=True).decode()
    assert "Hm." not in told
    assert told.count("signature_delta") == 1
    assert msgspec.to_builtins(text) == {"type": "text", "text": "So."}


def test_a_thread_is_not_kept_and_a_client_is_told_so() -> None:
    assert asked(thread={"type": "create"})[1] == ("thread",)
    with pytest.raises(ApiError) as refusal:
        asked(thread={"type": "continue", "previous_message_id": "msg-1"})
    body = json.loads(error_body(refusal.value))
    assert (refusal.value.status, body["error"]["details"]) == (404, {"error_code": "thread_not_found"})
