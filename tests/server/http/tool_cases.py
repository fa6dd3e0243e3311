"""Tools, chats whose answer is dictated by a grammar, and what a client puts together."""

import json
from typing import Any

from http_helpers import chat

URL = "/v1/chat/completions"
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 4}, "unit": {"enum": ["C", "F"]}},
            "required": ["city", "unit"],
            "additionalProperties": False,
        },
    },
}
CLOCK = {"type": "function", "function": {"name": "now"}}
NAMED = {"type": "function", "function": {"name": "get_weather"}}
# A chat template that shows tools and calls.
SHOWN = (
    "{% if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool | tojson }}{% endfor %}<|im_end|>\n"
    "{% endif %}{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{{ message.reasoning_content }}{{ message.content }}"
    "{% for call in message.tool_calls or [] %}<tool_call>{{ call.function.name }}: "
    "{{ call.function.arguments.city }}</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)


def dictated(text: str, **fields: Any) -> dict:
    """A chat whose answer is this text."""
    grammar = f"start: {json.dumps(text, ensure_ascii=False)}"
    return chat("Hi", max_tokens=300, structured_outputs={"grammar": grammar}, **fields)


def written(name: str, arguments: object) -> str:
    call = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    return f"<tool_call>\n{call}\n</tool_call>"


def collected(events: list[dict]) -> tuple[str, str, list[dict], str]:
    """What a client puts together: content, reasoning, calls, finish_reason."""
    content, reasoning, calls, reason = "", "", [], ""
    for choice in (choice for event in events for choice in event["choices"]):
        delta = choice["delta"]
        content += delta.get("content") or ""
        reasoning += delta.get("reasoning_content") or ""
        for call in delta.get("tool_calls", []):
            if "id" in call:
                assert call["index"] == len(calls)
                calls.append({"id": call["id"], "type": call["type"], "function": dict(call["function"])})
            else:
                calls[call["index"]]["function"]["arguments"] += call["function"]["arguments"]
        reason = choice["finish_reason"] or reason
    return content, reasoning, calls, reason
