"""Metrics: those of all replicas merged, and the router's own."""

from collections.abc import Iterator, Mapping

from prometheus_client import CollectorRegistry, Counter, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from octavo.router import Fleet, Flight

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def merged(texts: Mapping[str, bytes]) -> bytes:
    """Merge the metrics of several replicas.

    Args:
        texts: replica -> metrics in Prometheus' text format.
    """
    # The keys are the HELP and TYPE lines: Prometheus wants all samples of a metric together.
    metrics: dict[bytes, list[bytes]] = {}
    for replica, text in texts.items():
        label = b'replica="%s"' % replica.encode()
        head = b""
        for line in text.splitlines():
            if line.startswith(b"# HELP"):
                head = line
            elif line.startswith(b"# TYPE"):
                head += b"\n" + line
                metrics.setdefault(head, [])
            elif line:
                metrics[head].append(_labelled(line, label))
    return b"".join(b"\n".join((head, *samples)) + b"\n" for head, samples in metrics.items())


def _labelled(sample: bytes, label: bytes) -> bytes:
    name, space, value = sample.partition(b" ")
    name, brace, labels = name.partition(b"{")
    if brace:
        return name + b"{" + label + b"," + labels + space + value
    return name + b"{" + label + b"}" + space + value


class RouterMetrics:
    """The router's counters and gauges."""

    def __init__(self, fleet: Fleet) -> None:
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(_FleetCollector(fleet))
        self._saved = Counter(
            "octavo:router_saved_tokens",
            "prompt tokens that the chosen replica was known to hold",
            ["replica"],
            registry=self._registry,
        )
        self._sent = Counter(
            "octavo:router_requests", "requests sent to a replica", ["replica"], registry=self._registry
        )
        self._retries = Counter(
            "octavo:router_retries",
            "requests sent to another replica, as one refused or died",
            registry=self._registry,
        )

    def note(self, flight: Flight) -> None:
        """Count a request sent to a replica."""
        self._sent.labels(flight.replica.name).inc()
        self._saved.labels(flight.replica.name).inc(flight.choice.saved_tokens)

    def note_retry(self) -> None:
        """Count a retry on another replica."""
        self._retries.inc()

    def text(self) -> bytes:
        """Return all of them in Prometheus' text format."""
        return generate_latest(self._registry)


class _FleetCollector(Collector):
    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    def collect(self) -> Iterator[Metric]:
        for name, help_, field in (
            ("octavo:router_replica_ready", "whether it takes requests, 0 or 1", "is_ready"),
            ("octavo:router_load_tokens", "what it has to do, as the router counts", "load_tokens"),
            ("octavo:router_open_requests", "requests sent to it and not ended", "num_open"),
            ("octavo:router_marks", "beginnings of prompts that it is known to hold", "num_marks"),
        ):
            family = GaugeMetricFamily(name, help_, labels=["replica"])
            for replica in self._fleet.replicas:
                family.add_metric([replica.name], float(getattr(replica, field)))
            yield family
