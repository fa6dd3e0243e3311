"""An agent: a model calls functions, reads what they return, and answers.

Needs the openai package. Give the URL of a server, or one of SmolLM2 is started for the example:

    octavo serve smollm2 &
    python examples/tool_calling.py http://127.0.0.1:8000
"""

import json
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from openai import OpenAI

TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": "calculate",
            "description": "Calculate with two whole numbers.",
            "parameters": {
                "type": "object",
                "properties": {
                    "left": {"type": "integer", "minimum": 0, "maximum": 999},
                    "operator": {"enum": ["+", "-", "*"]},
                    "right": {"type": "integer", "minimum": 0, "maximum": 999},
                },
                "required": ["left", "operator", "right"],
                "additionalProperties": False,
            },
        },
    }
]


def calculate(left: int, operator: str, right: int) -> int:
    """Do what the model asks for. Its arguments follow the schema."""
    return {"+": left + right, "-": left - right, "*": left * right}[operator]


def answer(client: OpenAI, question: str, max_turns: int = 3) -> str:
    """Let the model call until it answers. It has to call first, and is free then."""
    model = client.models.list().data[0].id
    messages: list[Any] = [{"role": "user", "content": question}]
    for turn in range(max_turns):
        completion = client.chat.completions.create(
            model=model,
            messages=messages,
            tools=TOOLS,
            tool_choice="auto" if turn else "required",
            parallel_tool_calls=False,
            temperature=0,
            max_tokens=64,
        )
        message = completion.choices[0].message
        messages.append(message.model_dump(exclude_none=True) | {"content": message.content})
        if not message.tool_calls:
            return message.content or ""
        for call in message.tool_calls:
            assert call.type == "function"
            result = calculate(**json.loads(call.function.arguments))
            print(f"{call.function.name}({call.function.arguments}) = {result}")
            messages.append({"role": "tool", "tool_call_id": call.id, "content": str(result)})
    raise RuntimeError(f"no answer after {max_turns} turns")


@contextmanager
def served() -> Iterator[str]:
    """Serve SmolLM2 on a free port; return the server's URL."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "octavo", "serve", "smollm2", "--port", str(port)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        # One line says that the server is ready.
        if not process.stdout.readline():
            raise RuntimeError("the server did not start")
        try:
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()


def main(url: str) -> None:
    """Ask one question."""
    with OpenAI(base_url=f"{url}/v1", api_key="none") as client:
        print(answer(client, "What is 12 times 7?"))


if len(sys.argv) > 1:
    main(sys.argv[1])
else:
    with served() as started:
        main(started)
