"""ollama: a tool loop by its own client, and what desktop programs ask first."""

import ollama
from own_tools import TOOLS, URL, call, run_jobs

CLIENT = ollama.Client(host=URL)


def chat(request: str, streamed: bool) -> str:
    messages: list = [{"role": "user", "content": request}]
    while True:
        answer = CLIENT.chat("octavo", messages, tools=list(TOOLS), stream=streamed, think=True)
        pieces = list(answer) if streamed else [answer]
        calls = [one for piece in pieces for one in piece.message.tool_calls or []]
        text = "".join(piece.message.content or "" for piece in pieces)
        thought = "".join(piece.message.thinking or "" for piece in pieces)
        assert pieces[-1].done
        messages.append({"role": "assistant", "content": text, "thinking": thought, "tool_calls": calls})
        if not calls:
            return text
        for one in calls:
            content = call(one.function.name, dict(one.function.arguments))
            messages.append({"role": "tool", "tool_name": one.function.name, "content": content})


(model,) = CLIENT.list().models
assert model.model is not None
assert "tools" in (CLIENT.show(model.model).capabilities or ())
assert CLIENT.generate("octavo", "Hi", options={"num_predict": 4}).response
run_jobs(chat)
