"""Which replica gets a request: our router against others, on a model of 64 replicas in virtual time.

10,000 users begin a conversation within a minute, behind 100 system prompts of which a few are very popular.
Each of up to 8 turns sends all that was said before. The router's code is the one that serves; replicas,
caches and users are models (support/fleet_model.py). What users say is the same under every policy.

    python benchmarks/router_simulation.py [--users 10000] [--replicas 64] [--plot FILE] [--save MACHINE]

hit rate: prompt tokens that were cached where the request went. imbalance: busy time of the busiest replica
over the mean. The last line is JSON.
"""

import bisect
import random
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

from support.affinity_rule import AffinityRule
from support.common import make_parser, publish, table
from support.fleet_model import Load, ModelReplica, Outcome, Policy, Prompt, Simulation

from octavo.router import Fleet, Flight, Weights

_POINTS = 100


class Ours(Policy):
    """The router of `octavo serve --replicas`."""

    name = "ours"

    def __init__(self, load: Load, weights: Weights) -> None:
        self._now = 0.0
        names = [str(index) for index in range(load.num_replicas)]
        self._index = {name: index for index, name in enumerate(names)}
        self._fleet = Fleet(names, weights, lambda: self._now)
        self._flights: dict[int, Flight] = {}

    def choose(self, prompt: Prompt, replicas: list[ModelReplica], now: float) -> int:
        self._now = now
        flight = self._fleet.send(prompt.marks())
        assert flight is not None
        self._flights[prompt.user] = flight
        return self._index[flight.replica.name]

    def note_first_token(self, user: int) -> None:
        self._flights[user].note_first_byte()

    def note_end(self, user: int) -> None:
        self._flights.pop(user).end()

    def note_report(self, replicas: list[ModelReplica], now: float) -> None:
        self._now = now
        for replica, model in zip(self._fleet.replicas, replicas, strict=True):
            replica.note_report(model.report())


class Random(Policy):
    """Any replica."""

    name = "random"

    def __init__(self) -> None:
        self._dice = random.Random(1)

    def choose(self, prompt: Prompt, replicas: list[ModelReplica], now: float) -> int:
        return self._dice.randrange(len(replicas))


class RoundRobin(Policy):
    """One after the other."""

    name = "round robin"
    _last = -1

    def choose(self, prompt: Prompt, replicas: list[ModelReplica], now: float) -> int:
        self._last = (self._last + 1) % len(replicas)
        return self._last


class TwoChoices(Policy):
    """Of two random ones, the one with fewer requests under way."""

    name = "two choices"

    def __init__(self) -> None:
        self._dice = random.Random(1)

    def choose(self, prompt: Prompt, replicas: list[ModelReplica], now: float) -> int:
        pair = self._dice.sample(range(len(replicas)), 2)
        return min(pair, key=lambda index: replicas[index].num_open)


class Affinity(Policy):
    """Ray Serve's PrefixCacheAffinityRouter, by its published rule."""

    name = "Ray's affinity rule"

    def __init__(self, load: Load) -> None:
        self._rule = AffinityRule(load.num_replicas)

    def choose(self, prompt: Prompt, replicas: list[ModelReplica], now: float) -> int:
        return self._rule.choose(prompt.marks(), [replica.num_open for replica in replicas])


class Hashing(Policy):
    """Consistent hashing, of the conversation or of the system prompt."""

    def __init__(self, load: Load, by: str) -> None:
        self.name = f"hash of {by}"
        self._by = by
        points = [
            (_hash(f"{replica} {point}"), replica)
            for replica in range(load.num_replicas)
            for point in range(_POINTS)
        ]
        self._points = sorted(points)

    def choose(self, prompt: Prompt, replicas: list[ModelReplica], now: float) -> int:
        key = str(prompt.user) if self._by == "user" else prompt.digests[0].hex()
        return self._points[bisect.bisect(self._points, (_hash(key), -1)) % len(self._points)][1]


def _hash(text: str) -> int:
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest())


@dataclass(frozen=True)
class Row:
    """One policy's figures; times in seconds of virtual time, but router_us: CPU time of one choice."""

    policy: str
    requests: int
    hit_rate: float
    imbalance: float
    first_token_p50_s: float
    first_token_p99_s: float
    prefill_s: float
    router_us: float


def row_of(policy: str, outcome: Outcome) -> Row:
    """Return a policy's figures."""
    times = sorted(outcome.first_token_s)
    mean = sum(outcome.busy_s) / len(outcome.busy_s)
    return Row(
        policy=policy,
        requests=outcome.num_requests,
        hit_rate=outcome.cached_tokens / outcome.prompt_tokens,
        imbalance=max(outcome.busy_s) / mean,
        first_token_p50_s=times[len(times) // 2],
        first_token_p99_s=times[len(times) * 99 // 100],
        prefill_s=sum(outcome.busy_s),
        router_us=outcome.router_s / outcome.num_requests * 1e6,
    )


def one_cache(load: Load) -> float:
    """Return the hit rate of one replica with all the caches, and all the speed."""
    whole = Load(
        **{
            **asdict(load),
            "num_replicas": 1,
            "cache_tokens": load.cache_tokens * load.num_replicas,
            "prefill_per_s": load.prefill_per_s * load.num_replicas,
        }
    )
    return row_of("", Simulation(whole, RoundRobin()).run()).hit_rate


def draw(rows: Sequence[Row], best: float, path: Path) -> None:
    """Draw hit rates and times to the first token, side by side."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 3.6), sharey=True, layout="constrained")
    names = [row.policy for row in rows]
    left.barh(names, [100 * row.hit_rate for row in rows], color="#4269d0")
    left.axvline(100 * best, color="#333", linestyle="--", linewidth=1)
    left.set_xlabel("prompt tokens found in a cache, %\n(dashed: one cache as large as all)")
    left.invert_yaxis()
    right.barh(names, [row.first_token_p99_s for row in rows], color="#efb118", label="p99")
    right.barh(names, [row.first_token_p50_s for row in rows], color="#3ca951", label="p50", height=0.4)
    right.set_xscale("log")
    right.set_xlabel("time to first token, s of virtual time")
    right.legend()
    figure.savefig(path, dpi=120)


def main() -> None:
    """Run all policies."""
    parser = make_parser(__doc__)
    parser.add_argument("--users", type=int, default=10_000)
    parser.add_argument("--replicas", type=int, default=64)
    parser.add_argument("--prefill", type=float, default=Load.prefill_per_s, help="tokens a second")
    parser.add_argument("--beta", type=float, default=Weights().beta)
    parser.add_argument("--slack", type=float, default=Weights().slack_tokens)
    parser.add_argument("--only-ours", action="store_true")
    parser.add_argument("--plot", type=Path)
    arguments = parser.parse_args()
    load = Load(num_replicas=arguments.replicas, num_users=arguments.users, prefill_per_s=arguments.prefill)
    policies: list[Policy] = [Ours(load, Weights(beta=arguments.beta, slack_tokens=arguments.slack))]
    if not arguments.only_ours:
        policies += [
            Affinity(load),
            Hashing(load, "user"),
            Hashing(load, "system prompt"),
            TwoChoices(),
            RoundRobin(),
            Random(),
        ]
    begun, best = time.monotonic(), one_cache(load)
    rows = [row_of(policy.name, Simulation(load, policy).run()) for policy in policies]
    header = ("policy", "hit rate", "imbalance", "TTFT p50", "p99", "prefill s", "router us")
    cells = [
        (row.policy, f"{row.hit_rate:.1%}", f"{row.imbalance:.2f}", f"{row.first_token_p50_s:.3f}",
         f"{row.first_token_p99_s:.3f}", f"{row.prefill_s:.0f}", f"{row.router_us:.0f}")
        for row in rows
    ]  # fmt: skip
    print(table(header, cells))
    print(f"one cache as large as all: {best:.1%}; {rows[0].requests} requests")
    if arguments.plot:
        draw(rows, best, arguments.plot)
    figures: dict[str, Any] = {
        "load": asdict(load),
        "one_cache_hit_rate": best,
        "rows": [asdict(row) for row in rows],
        "seconds": time.monotonic() - begun,
    }
    publish("router_simulation", figures, arguments)


if __name__ == "__main__":
    main()
