"""A streamed text is the whole one byte for byte: emoji, CJK and half characters, greedy and sampled.

The tiny model answers with random bytes; --model smollm2 with words.

    python tests/server/stress/equality.py [--prompts 50] [--tokens 48] [--model NAME] [--save MACHINE]
"""

import asyncio
import json
import sys
from typing import Any

from server_process import ServerProcess
from stream_client import CHAT, RESPONSES, TEXT, chat, post, whole
from stress_report import make_parser, report

PARTS = (
    *("😀 smile", "日本の首都は", "한국어 문장", "你好,世界", "👩‍🚀 flies to 🌕", "Zürich ∑ é"),
    *("Привет, мир", "हिन्दी में", "العربية", "A plain sentence.", "🇫🇷🇯🇵 flags", "\n\n# Title"),
)
NUM_AT_ONCE = 8


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--prompts", type=int, default=50)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--model", help="default: the tiny model")
    arguments = parser.parse_args()
    with ServerProcess("--num-blocks", "1024", model=arguments.model) as server:
        figures = measure(server, arguments.prompts, arguments.tokens)
    return report("equality", {"model": arguments.model or "tiny", **figures}, arguments)


def measure(server: ServerProcess, num_prompts: int, num_tokens: int) -> dict[str, Any]:
    """Compare every request's two answers; return counts and failures."""
    requests = _requests(num_prompts, num_tokens)
    pairs = asyncio.run(_all_pairs(server.port, requests))
    failures = [
        f"{path} {body}: whole {one!r}, streamed {other!r}"
        for (path, body), (one, other) in zip(requests, pairs, strict=True)
        if one != other
    ]
    failures += [f"left: {left}" for left in [server.leftovers()] if left]
    texts = [one for one, _ in pairs]
    return {
        "pairs": len(pairs),
        "equal": sum(one == other for one, other in pairs),
        "chars": sum(map(len, texts)),
        "chars_not_ascii": sum(not char.isascii() for text in texts for char in text),
        "failures": failures,
    }


def _requests(num_prompts: int, num_tokens: int) -> list[tuple[str, dict[str, Any]]]:
    """Each prompt over each route, greedy and sampled; responses have no seed, so they are greedy."""
    found: list[tuple[str, dict[str, Any]]] = []
    for number in range(num_prompts):
        text = f"{PARTS[number % len(PARTS)]} {number}: {PARTS[(number * 5 + 3) % len(PARTS)]}"
        for ways in ({"temperature": 0}, {"temperature": 1.2, "seed": number}):
            fields = {"max_tokens": num_tokens, **ways}
            found += [(CHAT, chat(text, **fields)), (TEXT, {"prompt": text, "ignore_eos": True, **fields})]
        found.append((RESPONSES, {"input": text, "temperature": 0, "max_output_tokens": num_tokens}))
    return found


async def _all_pairs(port: int, requests: list[tuple[str, dict[str, Any]]]) -> list[tuple[str, str]]:
    turns = asyncio.Semaphore(NUM_AT_ONCE)

    async def pair(path: str, body: dict[str, Any]) -> tuple[str, str]:
        async with turns:
            return await _whole_text(port, path, body), await _streamed_text(port, path, body)

    return list(await asyncio.gather(*(pair(path, body) for path, body in requests)))


async def _whole_text(port: int, path: str, body: dict[str, Any]) -> str:
    status, answer = await whole(port, path, body)
    assert status == 200, answer
    if path == RESPONSES:
        return "".join(part["text"] for item in answer["output"] for part in item["content"])
    choice = answer["choices"][0]
    return choice["text"] if path == TEXT else choice["message"]["content"]


async def _streamed_text(port: int, path: str, body: dict[str, Any]) -> str:
    answer = await post(port, path, {**body, "stream": True})
    text = ""
    try:
        async for data in answer.events():
            if data == b"[DONE]":
                break
            event = json.loads(data)
            if path == RESPONSES:
                text += event["delta"] if event["type"] == "response.output_text.delta" else ""
            elif event["choices"]:
                choice = event["choices"][0]
                text += choice["text"] if path == TEXT else choice["delta"].get("content") or ""
    finally:
        answer.cut()
    return text


if __name__ == "__main__":
    sys.exit(main())
