"""The calls of Open WebUI 0.12, in our own words: it is too large to install for a test.

Over OpenAI's API and over Ollama's it asks which models there are, lets them call tools, and has titles and
tags of a chat written in the background.
"""

import json
import urllib.request
from typing import Any

from own_tools import SCHEMAS, URL, call, run_jobs

TOOLS = [{"type": "function", "function": schema} for schema in SCHEMAS]
TASK = "### Task: write a title of 3 to 5 words, as JSON: {'title': '...'}"


def ask(path: str, body: dict[str, Any] | None = None) -> str:
    data = None if body is None else json.dumps(body).encode()
    headers = {
        "Content-Type": "application/json",
        "Authorization": "Bearer none",
        "X-OpenWebUI-User-Role": "user",
    }
    request = urllib.request.Request(URL + path, data, headers)
    with urllib.request.urlopen(request, timeout=120) as answer:
        return answer.read().decode()


def openai(request: str, streamed: bool) -> str:
    """Do a job by /v1/chat/completions; its history keeps the index of streamed calls."""
    (model,) = (card["id"] for card in json.loads(ask("/v1/models"))["data"])
    messages: list[dict[str, Any]] = [{"role": "user", "content": request}]
    while True:
        wishes = {"temperature": 0.8, "top_p": 0.9, "stop": None, "seed": None, "reasoning_effort": None}
        body = {"model": model, "messages": messages, "tools": TOOLS, "stream": streamed, **wishes}
        if streamed:
            text = ask("/v1/chat/completions", {**body, "stream_options": {"include_usage": True}})
            lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: {")]
            message = merged([choice["delta"] for line in lines for choice in json.loads(line)["choices"]])
        else:
            message = json.loads(ask("/v1/chat/completions", body))["choices"][0]["message"]
        if not message.get("tool_calls"):
            background = {"model": model, "messages": [{"role": "user", "content": TASK}], "stream": False}
            ask("/v1/chat/completions", {**background, "max_completion_tokens": 1000})
            return message["content"]
        messages.append(message)
        for one in message["tool_calls"]:
            content = call(one["function"]["name"], json.loads(one["function"]["arguments"]))
            messages.append({"role": "tool", "tool_call_id": one["id"], "content": content})


def merged(deltas: list[dict[str, Any]]) -> dict[str, Any]:
    calls: list[dict[str, Any]] = []
    for one in (one for delta in deltas for one in delta.get("tool_calls") or []):
        if one["index"] == len(calls):
            calls.append(one)
        else:
            calls[one["index"]]["function"]["arguments"] += one["function"]["arguments"]
    text = "".join(delta.get("content") or "" for delta in deltas)
    return {"role": "assistant", "content": text, "tool_calls": calls}


def ollama(request: str, streamed: bool) -> str:
    """Do a job by /api/chat; arguments of calls are objects there."""
    assert json.loads(ask("/api/version"))["version"]
    ask("/api/ps")
    (model,) = (card["model"] for card in json.loads(ask("/api/tags"))["models"])
    messages: list[dict[str, Any]] = [{"role": "user", "content": request}]
    while True:
        options = {
            "temperature": 0.8,
            "top_k": 40,
            "num_ctx": 8192,
            "repeat_penalty": 1.1,
            "num_predict": 400,
        }
        body = {"model": model, "messages": messages, "tools": TOOLS, "stream": streamed, "keep_alive": "5m"}
        text = ask("/api/chat", {**body, "options": options})
        parts = [json.loads(line)["message"] for line in text.splitlines()]
        calls = [one for part in parts for one in part.get("tool_calls") or []]
        content = "".join(part["content"] for part in parts)
        if not calls:
            ask(
                "/api/chat",
                {"model": model, "messages": [{"role": "user", "content": TASK}], "stream": False},
            )
            return content
        messages.append({"role": "assistant", "content": content, "tool_calls": calls})
        for one in calls:
            done = call(one["function"]["name"], one["function"]["arguments"])
            messages.append({"role": "tool", "tool_name": one["function"]["name"], "content": done})


run_jobs(openai, ollama)
