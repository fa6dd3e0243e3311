"""Two replicas: documents stay together, salts are apart, requests end with their clients. Prints JSON."""

import json
import time

import httpx
from ray_program import COMPLETIONS, cluster, eventually, lines_of

from octavo.ray import app

LONG = {"prompt": [5, 6], "max_tokens": 450, "ignore_eos": True, "stream": True}


def ask(client: httpx.Client, document: int, question: int, salt: str = "") -> int:
    """Ask a question about a document; return how many tokens were cached."""
    prompt = [5 + document] * 320 + [30 + question] * 3
    body = {"prompt": prompt, "max_tokens": 2, "temperature": 0} | ({"cache_salt": salt} if salt else {})
    answer = client.post(COMPLETIONS, json=body)
    return answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]


def loads(client: httpx.Client) -> list[int]:
    return [client.get("/load").json()["server_load"] for _ in range(8)]


with cluster(app) as client:
    found: dict[str, object] = {"model": client.get("/v1/models").json()["data"][0]["id"]}
    found["without_key"] = httpx.post(str(client.base_url) + COMPLETIONS, json={}).status_code
    found["no_json"] = client.post(COMPLETIONS, content=b"x").status_code
    found["health"] = client.get("/health").json()["status"]
    found["cached"] = [[ask(client, document, question) for document in range(8)] for question in range(3)]
    found["salted"] = [ask(client, 0, 9, salt) for salt in ("a", "a", "b", "b", "")]
    with client.stream("POST", COMPLETIONS, json=LONG) as answer:
        found["last"], found["kind"] = [*lines_of(answer)][-1], answer.headers["content-type"]
    # One for each replica, as others go where there is less to do.
    # Without a tokenizer there is no text: with ids, each token is an event.
    long = {**LONG, "max_tokens": 4000, "return_token_ids": True}
    # What a replica told of the stream before is old by then.
    time.sleep(3)
    with client.stream("POST", COMPLETIONS, json=long) as one:
        # An iterator that is dropped closes its stream.
        lines = lines_of(one)
        next(lines)
        with client.stream("POST", COMPLETIONS, json={**long, "prompt": [7, 8]}) as other:
            others = lines_of(other)
            next(others)
            found["during"] = min(loads(client))
    eventually(lambda: not any(loads(client)), 10)
print(json.dumps(found))
