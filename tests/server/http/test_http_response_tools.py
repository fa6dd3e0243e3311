"""Tools and reasoning in /v1/responses: items of input, items of output, events."""

import json
from types import ModuleType
from typing import Any

import msgspec
import pytest
from http_helpers import LiveServer

from octavo.server.api.responses.response_input import chat_of
from octavo.server.api.responses.response_items import OutputWriter
from octavo.server.api.responses.response_structs import ResponseEvent, ResponsesRequest
from octavo.server.parsing.piece import Piece
from octavo.tokenizer.messages import checked_messages

URL = "/v1/responses"
CLOCK = {"type": "function", "name": "now", "parameters": {"type": "object", "additionalProperties": False}}
CALL = {"type": "function_call", "id": "fc-1", "call_id": "a", "name": "f", "arguments": '{"x": 1}'}


def test_items_of_input_become_turns() -> None:
    asked = ResponsesRequest(
        instructions="Be kind.",
        input=[
            {"role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
            {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I look."}]},
            CALL,
            {**CALL, "call_id": "b", "status": None},
            {"type": "function_call_output", "call_id": "a", "output": "1"},
            {"type": "function_call_output", "call_id": "b", "output": "2"},
            {"role": "assistant", "content": "Done."},
            {"role": "assistant", "content": "Really."},
        ],
    )
    system, user, turn, first, second, done, really = chat_of(asked).messages
    assert system == {"role": "system", "content": "Be kind."}
    assert user["content"] == [{"type": "text", "text": "Hi"}]
    assert turn["reasoning_content"] == "Hm."
    assert turn["content"][0]["text"] == "I look."
    assert [call["id"] for call in turn["tool_calls"]] == ["a", "b"]
    assert turn["tool_calls"][0]["function"] == {"name": "f", "arguments": '{"x": 1}'}
    assert first == {"role": "tool", "tool_call_id": "a", "content": "1"}
    assert second["content"] == "2"
    assert (done["content"], really["content"]) == ("Done.", "Really.")


def test_text_after_a_call_goes_on_with_the_turn() -> None:
    """An answer is one turn, so that templates whose roles must alternate take it."""
    pieces = [
        *(
            Piece("reasoning", "Hm."),
            Piece("content", "I look."),
            Piece("call", "f"),
            Piece("arguments", '{"x'),
        ),
        *(Piece("broken", '\n<c>{"x'), Piece("call", "f"), Piece("arguments", "{}"), Piece("complete", "")),
        Piece("content", " Done."),
    ]
    items = [msgspec.to_builtins(item) for item in written(pieces)[0]]
    (turn,) = checked_messages(chat_of(ResponsesRequest(input=items)).messages)
    assert (turn["content"], turn["reasoning_content"]) == ('I look.\n<c>{"x Done.', "Hm.")
    assert [call["function"]["arguments"] for call in turn["tool_calls"]] == [{}]


def written(pieces: list[Piece], parallel: bool = True) -> tuple[list[Any], list[ResponseEvent]]:
    writer = OutputWriter(lambda: "call_1", parallel=parallel)
    events = [event for piece in pieces for event in writer.write([piece])] + writer.finish("completed")
    return writer.items, events


def test_items_and_events_of_output() -> None:
    pieces = [
        Piece("reasoning", "Hm"),
        Piece("reasoning", "."),
        Piece("content", "I look."),
        Piece("call", "f"),
        Piece("arguments", '{"x":'),
        Piece("arguments", " 1}"),
        Piece("complete", ""),
        Piece("call", "g"),
        Piece("arguments", "{}"),
        Piece("complete", ""),
    ]
    (reasoning, message, call, other), events = written(pieces)
    assert reasoning.content[0].text == "Hm."
    assert message.content[0].text == "I look."
    assert (call.name, call.arguments, call.call_id) == ("f", '{"x": 1}', "call_1")
    assert other.name == "g"
    kinds = [event.type.removeprefix("response.") for event in events if event.output_index == 2]
    assert kinds == [
        "output_item.added",
        "function_call_arguments.delta",
        "function_call_arguments.delta",
        "function_call_arguments.done",
        "output_item.done",
    ]
    assert len(written(pieces, parallel=False)[0]) == 3


def test_a_call_that_breaks_off_is_incomplete_and_its_text_a_message() -> None:
    (call, message), _ = written([Piece("call", "f"), Piece("arguments", '{"x'), Piece("broken", '<c>{"x')])
    assert call.status == "incomplete"
    assert message.content[0].text == '<c>{"x'


def test_an_answer_of_nothing_is_an_empty_message() -> None:
    (message,), _ = written([])
    assert message.content[0].text == ""


def test_a_call_whole_and_streamed_by_openais_client(roomy: LiveServer, openai: ModuleType) -> None:
    arguments: dict[str, Any] = {
        "model": "tiny",
        "input": "Hi",
        "tools": [CLOCK],
        "tool_choice": {"type": "function", "name": "now"},
        "temperature": 0,
        "max_output_tokens": 150,
    }
    with openai.OpenAI(base_url=f"{roomy.url}/v1", api_key="unused", max_retries=0) as client:
        (call,) = client.responses.create(**arguments).output
        assert call.type == "function_call"
        assert (call.name, json.loads(call.arguments)) == ("now", {})
        with client.responses.stream(**arguments) as stream:
            events = list(stream)
        (streamed,) = stream.get_final_response().output
        assert streamed.arguments == call.arguments
        numbers = [event.sequence_number for event in events if hasattr(event, "sequence_number")]
        assert numbers == sorted(set(numbers))
        result = {"type": "function_call_output", "call_id": call.call_id, "output": "noon"}
        turns = [{"role": "user", "content": "Hi"}, call.model_dump(), result]
        again = client.responses.create(
            model="tiny", input=turns, tools=[CLOCK], tool_choice="none", max_output_tokens=4
        )
        assert again.output[0].type == "message"


@pytest.mark.parametrize(
    "fields",
    [
        {"tool_choice": "required"},
        {"tools": [{"type": "telepathy"}]},
        {"tools": [CLOCK], "tool_choice": {"type": "function", "name": "other"}},
        {"input": [{"type": "item_reference", "id": "x"}]},
        {"input": [{"type": "reasoning", "content": "Hm."}]},
        {"input": [{"type": "reasoning", "content": [{"type": "reasoning_text"}]}]},
        {"input": [{"type": "function_call", "name": "f", "arguments": "{", "call_id": "a"}]},
        {"input": [{**CALL, "color": "red"}]},
        {"input": [{"type": "function_call_output", "call_id": "a"}]},
    ],
    ids=range(9),
)
def test_what_is_refused(roomy: LiveServer, fields: dict[str, Any]) -> None:
    response = roomy.post(URL, {"input": "Hi", **fields})
    assert response.status_code == 400, response.text
