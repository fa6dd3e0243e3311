"""Fixtures every room's tests share."""

import os
import signal
import threading
from importlib.util import find_spec

# Two test processes share the machine: threads of one would spin against the other's.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

# A shell that runs tests in the background has them, and all that they start, ignore Ctrl-C.
if threading.current_thread() is threading.main_thread():
    signal.signal(signal.SIGINT, signal.default_int_handler)

if os.environ.get("TRITON_INTERPRET") == "1" and find_spec("triton"):
    import interpreted_triton

    interpreted_triton.patch()
