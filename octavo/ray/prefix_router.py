"""Ray Serve's side of the choice of a replica. Ray calls this interface alpha: its version is pinned."""

import time
from collections import OrderedDict
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, ReplicaResult, RequestRouter, RunningReplica

from octavo.router import Choice, Flight, Marks, Replica, Report, Weights, choose, num_tokens_of

REPORT = "octavo_report"
"""Key of a replica's routing statistics."""
# Ray may report the end of a short answer before its routing: this many such ends are remembered.
_MAX_ENDED = 1024


class PrefixRouter(RequestRouter):
    """Sends a request where most of its prompt is cached, unless that replica is too busy."""

    def initialize_state(self, **weights: float) -> None:
        """Begin with no replica; `weights` are those of octavo.router.Weights."""
        self._weights = Weights(**weights)
        self._known: dict[ReplicaID, Replica] = {}
        self._reports: dict[ReplicaID, bytes] = {}
        self._flights: dict[str, Flight] = {}
        # (replica, request) of those that ended before they were counted, oldest first.
        self._ended: OrderedDict[tuple[ReplicaID, str], None] = OrderedDict()
        self._num_choices = 0

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Return the best replica, and the others in case that it takes no more."""
        if pending_request is None:
            return [candidate_replicas]
        # Ray replaces a replica that is dead, but only after a while.
        able = [replica for replica in candidate_replicas if self._updated(replica).may_be_ready]
        able = able or candidate_replicas
        marks, known = _marks_of(pending_request), [self._known[replica.replica_id] for replica in able]
        choice = choose(marks, num_tokens_of(marks, known), known, self._weights)
        if choice is None:
            return []
        best = able[choice.index]
        # This is counted now, not when the request is routed: those that come in between would all choose the
        # same one of several equal replicas.
        self._num_choices += 1
        known[choice.index].last_chosen = self._num_choices
        return [[best], [replica for replica in able if replica is not best]]

    def on_request_routed(
        self, pending_request: PendingRequest, replica_id: ReplicaID, result: ReplicaResult
    ) -> None:
        """Count a request where it was sent."""
        replica = self._known.get(replica_id)
        if replica is None:
            return
        marks = _marks_of(pending_request)
        num_tokens = num_tokens_of(marks, self._known.values())
        saved = min(replica.saved_tokens(marks), num_tokens)
        if marks.digests:
            replica.expect(marks, num_tokens)
        request_id = pending_request.metadata.internal_request_id
        if (replica_id, request_id) in self._ended:
            del self._ended[replica_id, request_id]
        else:
            self._flights[request_id] = Flight(replica, Choice(0, saved, num_tokens - saved))

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """Count a request no longer."""
        flight = self._flights.pop(internal_request_id, None)
        if flight is not None:
            flight.end()
            return
        self._ended[replica_id, internal_request_id] = None
        if len(self._ended) > _MAX_ENDED:
            self._ended.popitem(last=False)

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        """Forget a replica."""
        super().on_replica_actor_died(replica_id)
        self._forget(replica_id)

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Update the set of replicas, and their latest reports."""
        super().update_replicas(replicas)
        ids = {replica.replica_id for replica in replicas}
        for gone in self._known.keys() - ids:
            self._forget(gone)

    def _forget(self, replica_id: ReplicaID) -> None:
        self._known.pop(replica_id, None)
        self._reports.pop(replica_id, None)

    def _updated(self, running: RunningReplica) -> Replica:
        known = self._known.get(running.replica_id)
        if known is None:
            known = Replica(running.replica_id.unique_id, self._weights, time.monotonic)
            self._known[running.replica_id] = known
        report: Any = running.routing_stats.get(REPORT)
        # Ray hands out the very same object until there is news.
        if report is not None and report is not self._reports.get(running.replica_id):
            known.note_report(Report.decode(report))
            self._reports[running.replica_id] = report
        return known


def _marks_of(pending: PendingRequest) -> Marks:
    """Return the marks that the front sends along as the last argument."""
    found = pending.args[-1] if pending.args else None
    return found if isinstance(found, Marks) else Marks()
