"""Questions about documents on two replicas: our router beside random, round robin and Ray's rule.

Two replicas of a model, whose caches hold three quarters of the documents each, and a front for each policy:
the choice alone differs. Each of 16 documents is asked 16 questions, a round of all documents after
another, four requests at a time. Then requests go alternately straight to a replica and through the front.
One engine whose cache is as large as both stands beside them, without a front.

    python benchmarks/router_documents.py [--documents 16] [--questions 16] [--words 300] [--save MACHINE]

hit rate: prompt tokens that were cached where the request went. split: documents that both replicas answered
questions about. TTFT: of the questions. added: median time to the first event through the front, less the
median without. The last line is JSON.
"""

import asyncio
import itertools
import os
import random
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import msgspec
from replica_latency import PATH, first_event_s
from support.affinity_rule import AffinityRule
from support.common import make_parser, publish, table

from octavo.router import Choice, Fleet, Flight, Marks, Replica

NUM_REPLICAS, NUM_AT_A_TIME, NUM_ALTERNATE = 2, 4, 60
BLOCK_SIZE = 16
WORDS = ("the", "block", "of", "a", "tree", "holds", "keys", "values", "sequence", "prefix", "river", "stone")
# (marks, ready replicas) -> index of one of them.
Rule = Callable[[Marks, Sequence[Replica]], int]


class RuleFleet(Fleet):
    """A fleet whose choice is another one."""

    def __init__(self, names: Sequence[str], rule: Rule) -> None:
        super().__init__(names)
        self._rule = rule

    def send(self, marks: Marks, but: Container[str] = ()) -> Flight | None:
        """See Fleet."""
        ready = [replica for replica in self.replicas if replica.is_ready and replica.name not in but]
        if not ready:
            return None
        index = self._rule(marks, ready)
        return Flight(ready[index], Choice(index, 0, 0))


def rule_of(policy: str) -> Rule:
    """Return a policy's rule."""
    if policy == "random":
        return lambda marks, ready: random.randrange(len(ready))
    if policy == "round robin":
        count = itertools.count()
        return lambda marks, ready: next(count) % len(ready)
    affinity = AffinityRule(NUM_REPLICAS)
    return lambda marks, ready: affinity.choose(marks, [replica.num_open for replica in ready])


POLICIES = ("ours", "Ray's affinity rule", "round robin", "random")
ALONE = "one engine"


async def serve_front(policy: str, port: int, sockets: list[Path]) -> None:
    """Serve a front with a policy's choice, for ever."""
    from octavo.server.config import ServerConfig
    from octavo.server.replicas.front import Front
    from octavo.server.serving import make_server

    config = ServerConfig(port=port)
    front = Front(config, sockets)
    if policy != "ours":
        front.fleet = RuleFleet([replica.name for replica in front.fleet.replicas], rule_of(policy))
    await asyncio.gather(make_server(front, config).serve(), front.watch())


@dataclass(frozen=True)
class Row:
    """One policy's figures; times in milliseconds."""

    policy: str
    requests: int
    hit_rate: float
    num_split: int
    first_token_p50_ms: float
    first_token_p99_ms: float
    added_p50_ms: float | None


class Answer(NamedTuple):
    """What is known of an answer.

    Attributes:
        seconds: until its first event.
        num_cached: prompt tokens that were cached.
        num_tokens: of its prompt.
        document: which it is about.
        replica: which gave it; "" without a front.
    """

    seconds: float
    num_cached: int
    num_tokens: int
    document: str
    replica: str


def chat(document: str, question: str) -> dict[str, Any]:
    """Return the body of a question about a document."""
    messages = [{"role": "system", "content": document}, {"role": "user", "content": question}]
    return {"messages": messages, "max_tokens": 1, "stream": True, "stream_options": {"include_usage": True}}


async def ask(session: aiohttp.ClientSession, url: str, document: str, question: str) -> Answer:
    """Ask a question about a document."""
    begun = time.perf_counter()
    async with session.post(url + PATH, json=chat(document, question)) as answer:
        answer.raise_for_status()
        first = await answer.content.readany()
        seconds = time.perf_counter() - begun
        text = first + await answer.read()
        replica = answer.headers.get("x-octavo-replica", "")
    events = [line[6:] for line in text.splitlines() if line.startswith(b"data: {")]
    usage = next(found for event in events if (found := msgspec.json.decode(event).get("usage")))
    num_cached = usage["prompt_tokens_details"]["cached_tokens"]
    return Answer(seconds, num_cached, usage["prompt_tokens"], document, replica)


async def run_rounds(url: str, documents: list[str], num_questions: int) -> list[Answer]:
    """Ask all questions."""
    gate, dice = asyncio.Semaphore(NUM_AT_A_TIME), random.Random(0)

    async def one(session: aiohttp.ClientSession, document: str, question: str) -> Answer:
        async with gate:
            return await ask(session, url, document, question)

    found: list[Answer] = []
    async with aiohttp.ClientSession() as session:
        for number in range(num_questions):
            order = dice.sample(documents, len(documents))
            found += await asyncio.gather(*(one(session, text, f"Question {number}?") for text in order))
    return found


async def added_ms(url: str, sockets: list[Path]) -> float:
    """Return by how much the median time to the first event grows on the way through a front."""
    body = {**chat("A short text.", "Is it so?")}
    times: dict[str, list[float]] = {"direct": [], "front": []}
    straight = aiohttp.ClientSession(connector=aiohttp.UnixConnector(str(sockets[0])))
    async with straight, aiohttp.ClientSession() as through:
        for _ in range(NUM_ALTERNATE):
            times["direct"].append(await first_event_s(straight, "http://localhost", body))
            times["front"].append(await first_event_s(through, url, body))
    direct, front = (sorted(values[10:]) for values in times.values())
    return (front[len(front) // 2] - direct[len(direct) // 2]) * 1e3


def free_port() -> int:
    """Return a port that nobody has."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextmanager
def serve(model: str, num_blocks: int, *options: str) -> Iterator[Path]:
    """Run a server with an empty cache; yield its folder for temporary files once it is ready."""
    command = [sys.executable, "-m", "octavo", "serve", model, "--num-blocks", str(num_blocks), *options]
    command += ["--block-size", str(BLOCK_SIZE), "--max-model-len", "1024"]
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "TMPDIR": folder}
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as server:
            try:
                assert server.stdout is not None
                server.stdout.readline()
                yield Path(folder)
            finally:
                server.terminate()


@contextmanager
def replicas(model: str, num_blocks: int) -> Iterator[list[Path]]:
    """Serve replicas; yield their sockets."""
    options = ("--replicas", str(NUM_REPLICAS), "--port", str(free_port()))
    with serve(model, num_blocks, *options) as folder:
        yield sorted(folder.glob("octavo-*/*.sock"))


@contextmanager
def front_of(policy: str, sockets: list[Path]) -> Iterator[str]:
    """Serve a front; yield its URL."""
    port = free_port()
    command = [sys.executable, __file__, "--front", policy, "--port", str(port), "--sockets"]
    with subprocess.Popen([*command, *map(str, sockets)]) as front:
        try:
            asyncio.run(wait_until_ready(f"http://127.0.0.1:{port}"))
            yield f"http://127.0.0.1:{port}"
        finally:
            front.terminate()


async def wait_until_ready(url: str) -> None:
    """Wait until a front has heard of all replicas."""
    async with aiohttp.ClientSession() as session:
        while True:
            try:
                async with session.get(f"{url}/health") as answer:
                    states = [replica["state"] for replica in (await answer.json())["replicas"]]
            except aiohttp.ClientError:
                states = []
            if states == ["ready"] * NUM_REPLICAS:
                return
            await asyncio.sleep(0.1)


def run_policy(policy: str, arguments: Any) -> Row:
    """Measure one policy on replicas of its own, or one engine."""
    dice = random.Random(1)
    documents = [" ".join(dice.choices(WORDS, k=arguments.words)) for _ in range(arguments.documents)]
    # A word is about a token; each replica has room for three quarters of the documents.
    num_blocks = arguments.documents * (arguments.words + 64) * 3 // 4 // BLOCK_SIZE
    if policy == ALONE:
        port = free_port()
        with serve(arguments.model, NUM_REPLICAS * num_blocks, "--port", str(port)):
            answers = asyncio.run(run_rounds(f"http://127.0.0.1:{port}", documents, arguments.questions))
        return row_of(policy, answers, None)
    with replicas(arguments.model, num_blocks) as sockets, front_of(policy, sockets) as url:
        answers = asyncio.run(run_rounds(url, documents, arguments.questions))
        added = asyncio.run(added_ms(url, sockets))
    return row_of(policy, answers, added)


def row_of(policy: str, answers: list[Answer], added_p50_ms: float | None) -> Row:
    """Return a policy's figures."""
    times = sorted(answer.seconds for answer in answers)
    places = Counter(document for document, _ in {(answer.document, answer.replica) for answer in answers})
    return Row(
        policy=policy,
        requests=len(answers),
        hit_rate=sum(answer.num_cached for answer in answers) / sum(answer.num_tokens for answer in answers),
        num_split=sum(number > 1 for number in places.values()),
        first_token_p50_ms=times[len(times) // 2] * 1e3,
        first_token_p99_ms=times[len(times) * 99 // 100] * 1e3,
        added_p50_ms=added_p50_ms,
    )


def main() -> None:
    """Measure all policies, or be one's front."""
    parser = make_parser(__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--documents", type=int, default=16)
    parser.add_argument("--questions", type=int, default=16)
    parser.add_argument("--words", type=int, default=300)
    parser.add_argument("--policies", nargs="+", choices=(*POLICIES, ALONE), default=(*POLICIES, ALONE))
    parser.add_argument("--front", choices=POLICIES, help="be a front of this policy; for the script itself")
    parser.add_argument("--port", type=int, default=0, help="of the front")
    parser.add_argument("--sockets", type=Path, nargs="+", default=[], help="of its replicas")
    arguments = parser.parse_args()
    if arguments.front:
        return asyncio.run(serve_front(arguments.front, arguments.port, arguments.sockets))
    rows = [run_policy(policy, arguments) for policy in arguments.policies]
    header = ("policy", "hit rate", "split", "TTFT p50 ms", "p99 ms", "added p50 ms")
    cells = [
        (row.policy, f"{row.hit_rate:.1%}", row.num_split, f"{row.first_token_p50_ms:.0f}",
         f"{row.first_token_p99_ms:.0f}", "-" if row.added_p50_ms is None else f"{row.added_p50_ms:.2f}")
        for row in rows
    ]  # fmt: skip
    print(table(header, cells))
    publish("router_documents", {"rows": [asdict(row) for row in rows]}, arguments)


if __name__ == "__main__":
    main()
