"""Fixtures every room's tests share."""

import os
from importlib.util import find_spec

# Two test processes share the machine: threads of one would spin against the other's.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

if os.environ.get("TRITON_INTERPRET") == "1" and find_spec("triton"):
    import interpreted_triton

    interpreted_triton.patch()
