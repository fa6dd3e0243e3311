"""A client that costs little: opens streams over plain sockets, reads them to their ends, counts events.

    python -m support.stream_reader PORT PATH STREAMS TOKENS [IDS]        (the last line printed is JSON)

Needs nothing but Python's library, so that it starts at once and leaves the processor to the server.
"""

import json
import selectors
import socket
import sys
import time
from typing import Any

_BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hello"}]},
    "/v1/completions": {},
}


def read_streams(
    port: int, path: str, num_streams: int, num_tokens: int, num_ids: int = 1
) -> dict[str, float]:
    """Read so many streams side by side; those of completions have prompts of so many ids.

    Returns:
        events: all of them, [DONE] included; bytes: of the answers; ended: streams that came to [DONE];
        begun_s: from the first request to the last answer's beginning.
    """
    fields = {"stream": True, "max_tokens": num_tokens, "ignore_eos": True, "temperature": 0}
    prompt = {"prompt": list(range(20_000, 20_000 + num_ids))} if path == "/v1/completions" else {}
    body = json.dumps({**_BODIES[path], **prompt, **fields}, separators=(",", ":")).encode()
    request = (
        f"POST {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    ).encode() + body
    selector = selectors.DefaultSelector()
    begun, waiting, begun_s = time.perf_counter(), set[socket.socket](), 0.0
    for _ in range(num_streams):
        connection = socket.create_connection(("127.0.0.1", port))
        connection.sendall(request)
        connection.setblocking(False)
        selector.register(connection, selectors.EVENT_READ)
        waiting.add(connection)
    events = num_bytes = ended = 0
    while selector.get_map():
        for key, _ in selector.select():
            connection = key.fileobj
            assert isinstance(connection, socket.socket)
            piece = connection.recv(1 << 16)
            num_bytes += len(piece)
            if connection in waiting and b"data: " in piece:
                waiting.remove(connection)
                begun_s = time.perf_counter() - begun
            events += piece.count(b"data: ")
            ended += b"[DONE]" in piece
            if not piece:
                selector.unregister(connection)
                connection.close()
    return {"events": events, "bytes": num_bytes, "ended": ended, "begun_s": begun_s}


if __name__ == "__main__":
    port, path, *numbers = sys.argv[1:]
    print(json.dumps(read_streams(int(port), path, *map(int, numbers))))
