"""What writes to sockets cost by themselves: the part of streaming that belongs to the kernel."""

import socket
import subprocess
import sys
import time
from pathlib import Path


def cpu_s_of_writes(num_streams: int, num_events: int, event_bytes: int, step_s: float) -> float:
    """Seconds of CPU to write so many events to each of so many clients, all of them at every step.

    The client is the one that reads a server's streams (stream_reader).
    """
    event = (b"data: " + b"x" * event_bytes)[: event_bytes - 2] + b"\n\n"
    with socket.create_server(("127.0.0.1", 0), backlog=num_streams) as listener:
        numbers = (listener.getsockname()[1], "/v1/completions", num_streams, num_events)
        command = [sys.executable, "-m", "support.stream_reader", *map(str, numbers)]
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, cwd=Path(__file__).parents[1]) as client:
            connections = [listener.accept()[0] for _ in range(num_streams)]
            for connection in connections:
                connection.recv(1 << 16)
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            begun = time.process_time()
            for _ in range(num_events):
                for connection in connections:
                    connection.sendall(event)
                if step_s:
                    time.sleep(step_s)
            cpu_s = time.process_time() - begun
            for connection in connections:
                connection.close()
            assert client.wait() == 0
    return cpu_s
