"""Which of several replicas of a server answers a request: pure Python, without sockets and without PyTorch.

| file | does |
|---|---|
| `marks.py` | cuts the text of a request into marks: digests that stand for its beginnings |
| `ledger.py` | in a replica: which marks are in its prefix tree now; makes its `Report` |
| `fleet.py` | in the router: what is known of each replica, and what is under way |
| `choice.py` | the choice itself |

Transports are in `octavo.server.replicas`.
"""

from octavo.router.choice import Choice, Weights, choose
from octavo.router.fleet import Fleet, Flight, Replica, num_tokens_of
from octavo.router.ledger import Ledger
from octavo.router.marks import Marks, marks_of
from octavo.router.report import Report

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
]
