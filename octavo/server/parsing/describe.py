"""Tells a model about tools in messages, where its chat template does not show them."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from octavo.server.parsing.call_formats import CallFormat

_INTRODUCTION = """\
You can call functions to answer. These are described here, one a line:
<tools>
{tools}
</tools>
To call a function, write its name and its arguments like this, and nothing after it:
{example}
The result comes in <tool_response></tool_response>."""
_NAME, _ARGUMENTS = "NAME", {"ARGUMENT": "VALUE"}


def described(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], form: CallFormat
) -> list[dict[str, Any]]:
    """Return messages that say in plain text what tools there are, what was called and what came back.

    Args:
        messages: checked ones (tokenizer/messages.py): contents are texts, arguments are objects.
        tools: what may be called.
        form: how the model is to call.
    """
    plain: list[dict[str, Any]] = []
    last_role = ""
    for message in messages:
        if message["role"] == "tool":
            _add_result(plain, message, joins=last_role == "tool")
        elif "tool_calls" in message:
            plain.append(_with_written_calls(message, form))
        else:
            plain.append(dict(message))
        last_role = message["role"]
    if not tools:
        return plain
    text = _INTRODUCTION.format(
        tools="\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools),
        example=form.written([(_NAME, _ARGUMENTS)]),
    )
    if plain[0]["role"] in ("system", "developer"):
        return [plain[0] | {"content": f"{plain[0]['content']}\n\n{text}"}, *plain[1:]]
    return [{"role": "system", "content": text}, *plain]


def _add_result(plain: list[dict[str, Any]], message: Mapping[str, Any], *, joins: bool) -> None:
    """Add a result as the user's. Those of one turn join: many templates want turns to alternate."""
    text = f"<tool_response>\n{message['content']}\n</tool_response>"
    if joins:
        plain[-1]["content"] += f"\n{text}"
    else:
        plain.append({"role": "user", "content": text})


def _with_written_calls(message: Mapping[str, Any], form: CallFormat) -> dict[str, Any]:
    functions = [call["function"] for call in message["tool_calls"]]
    calls = form.written([(function.get("name", ""), function["arguments"]) for function in functions])
    return {"role": message["role"], "content": "\n".join(filter(None, (message["content"], calls)))}
