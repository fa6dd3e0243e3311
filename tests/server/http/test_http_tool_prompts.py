"""What a chat template is shown of tools, and reasoning before an answer."""

import json
from collections.abc import Callable

from http_helpers import LiveServer, chat
from tiny_chat import TEMPLATE
from tool_cases import CLOCK, SHOWN, TOOL, URL, collected, dictated, written

HISTORY = [
    {"role": "user", "content": "Weather?"},
    {
        "role": "assistant",
        "content": None,
        "reasoning": "Hm.",
        "refusal": None,
        "tool_calls": [
            {"id": "a", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "é"}'}}
        ],
    },
    {"role": "tool", "tool_call_id": "a", "content": [{"type": "text", "text": "18 C"}]},
]


def prompt_of(server: LiveServer, body: dict) -> str:
    answer = server.post(URL, {**body, "return_token_ids": True}).json()
    text = server.post("/detokenize", {"tokens": answer["prompt_token_ids"]}).json()
    return text["prompt"]


def test_the_template_gets_tools_and_history(serve_template: Callable[..., LiveServer]) -> None:
    server = serve_template(SHOWN)
    strict = {"type": "function", "function": {**TOOL["function"], "strict": True}}
    prompt = prompt_of(server, chat("", messages=HISTORY, tools=[strict], max_tokens=1))
    assert json.dumps(TOOL) in prompt
    assert "Hm." in prompt
    assert "<tool_call>get_weather: é</tool_call>" in prompt
    assert "tool\n18 C" in prompt


def test_a_template_without_tools_gets_them_in_messages(roomy: LiveServer) -> None:
    prompt = prompt_of(roomy, chat("", messages=HISTORY, tools=[TOOL], max_tokens=1))
    assert json.dumps(TOOL) in prompt
    assert written("get_weather", {"city": "é"}) in prompt
    assert "user\n<tool_response>\n18 C\n</tool_response>" in prompt


def test_reasoning_is_a_field_of_its_own(serve_template: Callable[..., LiveServer]) -> None:
    server = serve_template(SHOWN)
    text = f"Hm 😀.\n</think>\n\nYes.{written('now', {})}"
    body = dictated(text, tools=[CLOCK])
    message = server.post(URL, body).json()["choices"][0]["message"]
    assert message["reasoning_content"] == "Hm 😀."
    assert message["content"] == "Yes."
    assert message["tool_calls"][0]["function"]["name"] == "now"
    content, reasoning, calls, reason = collected(server.events(URL, body))
    assert (content, reasoning, len(calls), reason) == ("Yes.", "Hm 😀.", 1, "tool_calls")
    cut = server.post(URL, {**body, "max_tokens": 3}).json()["choices"][0]
    assert cut["message"] == {"role": "assistant", "content": None, "reasoning_content": "Hm "[:2]}
    assert cut["finish_reason"] == "length"


def test_forms_and_required_calls_come_after_reasoning(serve_template: Callable[..., LiveServer]) -> None:
    server = serve_template(SHOWN, rename=("<|endoftext|>", "</think>"))
    # The end of the reasoning is one token, and among the likeliest.
    bias = {"0": 4}
    reasoned = ""
    for fields in (
        {"tools": [CLOCK], "tool_choice": "required", "parallel_tool_calls": False},
        {"structured_outputs": {"choice": ["yes"]}},
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {"const": "yes"}}}},
    ):
        body = chat("Hi", max_tokens=200, temperature=1, seed=3, logit_bias=bias, **fields)
        choice = server.post(URL, body).json()["choices"][0]
        message = choice["message"]
        assert choice["finish_reason"] in ("stop", "tool_calls"), choice
        reasoned += message.get("reasoning_content", "")
        assert message["content"] in ("yes", '"yes"', None)
        assert message["content"] or message["tool_calls"][0]["function"]["name"] == "now"
    assert reasoned


def test_markers_that_are_special_tokens_are_read(serve_template: Callable[..., LiveServer]) -> None:
    """As in Mistral's vocabularies, whose markers no decoder shows by itself."""
    server = serve_template(TEMPLATE + "{{ tools }}[TOOL_CALLS]", rename=("<|endoftext|>", "[TOOL_CALLS]"))
    body = chat("Hi", max_tokens=200, tools=[CLOCK], tool_choice="required", parallel_tool_calls=False)
    (call,) = server.post(URL, body).json()["choices"][0]["message"]["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == {}
    assert len(call["id"]) == 9
    assert collected(server.events(URL, body))[2][0]["function"] == call["function"]
