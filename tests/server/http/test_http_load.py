"""Many clients at once, a third of whom leave: every other answer is whole, nothing is left behind."""

import asyncio
import os
import random
from collections import Counter
from collections.abc import Callable

import httpx
from http_helpers import LiveServer, eventually

TEXT = "/v1/completions"
NUM_REQUESTS, NUM_AT_ONCE = 240, 48


def num_files() -> int:
    return len(os.listdir("/proc/self/fd"))


async def one(client: httpx.AsyncClient, number: int, rng: random.Random) -> str:
    """Do what some client does; return what came of it."""
    kind = rng.choice(["whole", "stream", "leaves early", "leaves late", "wrong"])
    n, num_tokens = rng.choice([1, 1, 3]), rng.randrange(1, 40)
    body = {"prompt": [60 + number] * rng.randrange(1, 60), "n": n, "max_tokens": num_tokens}
    body |= {"ignore_eos": True, "return_token_ids": True, "seed": number}
    if kind == "wrong":
        answer = await client.post(TEXT, json={**body, "top_p": 7})
        assert answer.status_code == 400
    elif kind == "whole":
        answer = await client.post(TEXT, json=body)
        assert answer.status_code == 200
        assert [len(choice["token_ids"]) for choice in answer.json()["choices"]] == [num_tokens] * n
    elif kind == "leaves early":
        try:
            await client.post(TEXT, json={**body, "max_tokens": 400}, timeout=rng.uniform(0.001, 0.2))
        except httpx.TimeoutException:
            return kind
    else:
        async with client.stream("POST", TEXT, json={**body, "stream": True}) as answer:
            assert answer.status_code == 200
            lines = []
            async for line in answer.aiter_lines():
                lines.append(line)
                if kind == "leaves late" and len(lines) >= 3:
                    return kind
        assert lines[-2:] == ["data: [DONE]", ""]
    return kind


def test_clients_that_come_and_go(serve_tiny: Callable[..., LiveServer]) -> None:
    server = serve_tiny({"max_num_seqs": 32, "num_blocks": 400})
    rng = random.Random(1)
    before = num_files()

    async def all_of_them() -> Counter[str]:
        limits = httpx.Limits(max_connections=NUM_AT_ONCE)
        async with httpx.AsyncClient(base_url=server.url, limits=limits, timeout=60) as client:
            turns = asyncio.Semaphore(NUM_AT_ONCE)

            async def turn(number: int) -> str:
                async with turns:
                    return await one(client, number, random.Random(rng.random()))

            return Counter(await asyncio.gather(*[turn(number) for number in range(NUM_REQUESTS)]))

    kinds = asyncio.run(all_of_them())
    assert len(kinds) == 5
    server.assert_drained()
    eventually(lambda: num_files() <= before + 2)
