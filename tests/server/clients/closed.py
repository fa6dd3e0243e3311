"""Runs other projects' agents so that nothing can leave the machine, and says if one tries.

Every proxy that an agent may take is a door that opens to nothing and notes who knocked; only 127.0.0.1 is
reached without it. Home and configuration are a folder of the test's own.
"""

import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

TIMEOUT_S = 180


def jobs() -> list[dict[str, Any]]:
    """What a client shall do: request, answer, folder, streamed; see agent_scripts.prepared."""
    return json.loads((Path(sys.argv[2]) / "jobs.json").read_text())


class Door:
    """A proxy that lets nobody through.

    Attributes:
        url: where it listens.
        knocks: the first line of each request.
    """

    def __init__(self) -> None:
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        self.knocks: list[str] = []
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        while True:
            connection, _ = self._socket.accept()
            with connection:
                connection.settimeout(5)
                self.knocks.append(connection.recv(400).split(b"\r\n")[0].decode("latin1"))


def run_closed(
    command: Sequence[str], folder: Path, home: Path, variables: Mapping[str, str]
) -> subprocess.CompletedProcess[str]:
    """Run an agent in a folder.

    Args:
        command: the agent and its arguments.
        folder: where it works.
        home: its home, which is made if it is missing.
        variables: further variables of its environment, which has no others but PATH, LANG and proxies.

    Raises:
        AssertionError: it failed, or it tried to reach another machine.
    """
    home.mkdir(exist_ok=True)
    door = Door()
    proxies = dict.fromkeys(("http_proxy", "https_proxy", "all_proxy"), door.url)
    proxies |= {name.upper(): url for name, url in proxies.items()}
    local = {"no_proxy": "127.0.0.1,localhost", "NO_PROXY": "127.0.0.1,localhost"}
    plain = {"PATH": os.environ["PATH"], "LANG": "C.UTF-8", "HOME": str(home)}
    done = subprocess.run(
        command,
        cwd=folder,
        env={**plain, **proxies, **local, **variables},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert done.returncode == 0, f"exit code {done.returncode}: {done.stdout[-1500:]} {done.stderr[-1500:]}"
    assert not door.knocks, f"it tried to reach {door.knocks}"
    return done
