"""Fixtures every room's tests share."""

import os

# Two test processes share the machine: threads of one would spin against the other's.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
