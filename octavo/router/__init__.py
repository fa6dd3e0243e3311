"""Prefix-aware routing: which replica answers a request. Pure Python, no sockets, no PyTorch.

| file | does |
|---|---|
| `marks.py` | cuts a prompt into marks: digests of ever longer prefixes |
| `ledger.py` | in a replica: which marks its prefix cache holds now, and its report to the router |
| `fleet.py` | in the router: the state of each replica, and the requests in flight |
| `score.py` | the score of a replica for a request, and the choice by it |

The transports are `octavo.server.replicas` (unix sockets) and `octavo.ray` (Ray Serve).
"""

from octavo.router.fleet import Fleet, Flight, Replica, num_tokens_of
from octavo.router.ledger import Ledger, Report
from octavo.router.marks import Marks, marks_of, read_marks
from octavo.router.score import Choice, Weights, choose

__all__ = [
    "Choice",
    "Fleet",
    "Flight",
    "Ledger",
    "Marks",
    "Replica",
    "Report",
    "Weights",
    "choose",
    "marks_of",
    "num_tokens_of",
    "read_marks",
]
