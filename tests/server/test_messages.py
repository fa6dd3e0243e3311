"""From Anthropic's messages to a chat, and from an answer's pieces to blocks."""

import json
from typing import Any

import msgspec
import pytest

from octavo.errors import NotReadyError
from octavo.outputs import CompletionOutput
from octavo.server.api.anthropic.messages_input import chat_of
from octavo.server.api.anthropic.messages_route import block_events, blocks_of, ending
from octavo.server.api.anthropic.messages_structs import MessagesRequest
from octavo.server.api.anthropic.signature import signed
from octavo.server.api.body import decode
from octavo.server.api.responses.response_items import OutputWriter
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
    asked = chat_of(fields)
    assert left_out == ("system[].cache_control",)
    system, first, turn, noon, failed, last = asked.messages
    assert system == {"role": "system", "content": "Be kind."}
    assert first == {"role": "user", "content": "What time is it?"}
    assert (turn["content"], turn["reasoning_content"]) == ("I look.", "Hm.")
    assert [call["function"]["arguments"] for call in turn["tool_calls"]] == [{"utc": True}, {}]
    assert noon == {"role": "tool", "tool_call_id": "a", "content": "noon"}
    assert failed == {"role": "tool", "tool_call_id": "b", "content": "Error: no zone"}
    assert last == {"role": "user", "content": "And now?"}
    assert asked.tools is not None
    assert asked.tools[0].function.parameters == CLOCK["input_schema"]
    assert (asked.tool_choice, asked.parallel_tool_calls) == ("required", False)
    assert (asked.max_tokens, asked.stop) == (7, ["END"])
    assert (asked.temperature, asked.top_p, asked.top_k) == (0.5, 0.9, 3)
    assert asked.enable_thinking is False


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
    assert ending(CompletionOutput(0, finish_reason="stop"), []).stop_reason == "end_turn"
    assert ending(CompletionOutput(0, finish_reason="stop", stop_reason=5), []).stop_sequence is None
    with pytest.raises(NotReadyError, match="broken off"):
        ending(CompletionOutput(0, finish_reason="abort"), [])
