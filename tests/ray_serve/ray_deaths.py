"""Two replicas, of which some die and all are replaced while they answer. Prints JSON."""

import json
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from queue import SimpleQueue
from typing import Any

import httpx
import ray
from ray import serve
from ray_program import COMPLETIONS, cluster, deploy, event, eventually, lines_of, num_running

import octavo.ray.deployments as deployments
from octavo.ray.deployments import Front

LONG = {"max_tokens": 3000, "ignore_eos": True, "stream": True, "return_token_ids": True}
NUM_QUICK = 400


class OpenFront(Front):
    """A front that tells what its router keeps."""

    def kept(self) -> dict[str, float]:
        """Return how many requests and marks the router has, and the largest load that it knows of."""
        router: Any = self._replicas._router._asyncio_router.request_router
        marks = sum(replica.num_marks for replica in router._known.values())
        return {
            "flights": len(router._flights),
            "known": len(router._known),
            "marks": marks,
            "open": sum(replica.num_open for replica in router._known.values()),
            "load": max(replica.load_tokens for replica in router._known.values()),
        }


def kill(name: str) -> None:
    """End a replica's process at once."""
    actor = ray.get_actor(f"SERVE_REPLICA::octavo#octavo#{name}", namespace="serve")
    ray.kill(actor, no_restart=True)


def kept() -> dict[str, float]:
    return serve.get_deployment_handle("front", "octavo").kept.remote().result()


def stream(client: httpx.Client, begun: "SimpleQueue[str]", **fields: object) -> dict[str, Any]:
    """Read a stream to its end; return who wrote it, how it ended, and how many tokens it had.

    Args:
        client: sends the request.
        begun: gets the replica's name when the first token is there.
        fields: of the request.
    """
    with client.stream("POST", COMPLETIONS, json={**LONG, **fields}) as answer:
        lines = lines_of(answer)
        events = [next(lines)]
        begun.put(answer.headers["x-octavo-replica"])
        events += lines
    before, last = event(events[-2]), events[-1]
    error = before.get("error", {}).get("code")
    choices = [choice for line in events[:-1] for choice in event(line).get("choices", ())]
    return {
        "replica": answer.headers["x-octavo-replica"],
        "error": error,
        "last": last,
        "reasons": [] if error else [choice["finish_reason"] for choice in before["choices"]],
        "num_tokens": sum(len(choice.get("token_ids") or ()) for choice in choices),
    }


def die_in_streams(client: httpx.Client) -> list[dict[str, Any]]:
    """Kill the replica of the last of four streams to begin; return how they ended, a killed one first."""
    begun: SimpleQueue[str] = SimpleQueue()
    with ThreadPoolExecutor(4) as pool:
        tasks, name = [], ""
        for n in range(4):
            # One after the other: a request counts as load from when Ray has handed it over.
            tasks.append(pool.submit(stream, client, begun, prompt=[9 + n] * 300))
            name = begun.get(timeout=60)
        kill(name)
        ended = [task.result() for task in tasks]
    # Its first streams may have ended before.
    return sorted(ended, key=lambda one: (one["replica"] != name, one["error"] is None))


def die_before_an_answer(client: httpx.Client) -> dict[str, Any]:
    """Kill the replica that computes a whole answer; return who it was, and what came."""
    prompt = [40] * 320
    name = client.post(COMPLETIONS, json={"prompt": prompt, "max_tokens": 1}).headers["x-octavo-replica"]
    with ThreadPoolExecutor(1) as pool:
        task = pool.submit(
            client.post, COMPLETIONS, json={**LONG, "prompt": prompt, "max_tokens": 1500, "stream": False}
        )
        time.sleep(1.0)
        kill(name)
        answer = task.result()
    return {
        "killed": name,
        "replica": answer.headers.get("x-octavo-replica"),
        "status": answer.status_code,
        "num_tokens": answer.json().get("usage", {}).get("completion_tokens"),
    }


def replace_all(client: httpx.Client) -> dict[str, Any]:
    """Deploy another version while a stream is under way; return how it ended, and who answers now."""
    engine, server = deployments.read_options()
    begun: SimpleQueue[str] = SimpleQueue()
    with ThreadPoolExecutor(1) as pool:
        task = pool.submit(stream, client, begun, prompt=[50] * 20, max_tokens=800)
        begun.get(timeout=60)
        deploy(deployments.make_app(engine, replace(server, served_model_name="new")))
        ended = task.result()
    return {**ended, "model": client.get("/v1/models").json()["data"][0]["id"]}


def kill_all(client: httpx.Client) -> dict[str, Any]:
    """Kill all replicas; return what /health says then, after how long, and in the end."""
    for actor in ray.util.list_named_actors(all_namespaces=True):
        if actor["name"].startswith("SERVE_REPLICA::octavo#octavo#"):
            kill(actor["name"].rpartition("#")[2])
    begun = time.monotonic()
    status = client.get("/health").status_code
    seconds = time.monotonic() - begun
    eventually(lambda: client.get("/health").status_code == 200, 90)
    return {"status": status, "seconds": seconds}


deployments.Front = OpenFront  # type: ignore[misc]
with cluster(deployments.make_app(*deployments.read_options())) as client:
    with ThreadPoolExecutor(16) as pool:
        prompts = [[number % 90 + 5] * 40 + [number // 90 + 5] for number in range(NUM_QUICK)]
        bodies = [{"prompt": prompt, "max_tokens": 1} for prompt in prompts]
        quick = [*pool.map(lambda body: client.post(COMPLETIONS, json=body).status_code, bodies)]
    found: dict[str, Any] = {"quick": sorted({*quick}), "kept": kept()}
    # What replicas told of these requests is old by then, and streams spread over both.
    eventually(lambda: client.get("/load").is_success and kept()["load"] == 0)
    found["streams"] = die_in_streams(client)
    eventually(lambda: num_running() == 2)
    found["whole"] = die_before_an_answer(client)
    eventually(lambda: num_running() == 2)
    found["kept_after"] = kept()
    found["update"] = replace_all(client)
    found["health"] = kill_all(client)
print(json.dumps(found))
