"""`octavo.ray:app` on Ray Serve: two replicas of a tiny model. `make ray-test` installs Ray and runs it."""

from pathlib import Path

import pytest
from ray_helpers import NEEDS_RAY, run_program, write_options

pytestmark = [NEEDS_RAY, pytest.mark.timeout(400)]


def test_documents_stay_together_and_requests_end_with_their_clients(tmp_path: Path) -> None:
    write_options(tmp_path)
    found = run_program("ray_prefixes.py", tmp_path, timeout_s=200)
    assert (found["model"], found["health"]) == ("tiny", "ready")
    assert (found["without_key"], found["no_json"]) == (401, 415)
    first, *later = found["cached"]
    assert first == [0] * 8
    assert later == [[320] * 8] * 2
    assert found["salted"] == [0, 320, 0, 320, 320]
    assert (found["last"], found["kind"].split(";")[0]) == ("data: [DONE]", "text/event-stream")
    assert found["during"] == 1


def test_deaths_and_updates_take_nobody_else_along(tmp_path: Path) -> None:
    write_options(tmp_path)
    found = run_program("ray_deaths.py", tmp_path, timeout_s=380)
    assert found["quick"] == [200]
    assert (found["kept"]["flights"], found["kept"]["open"]) == (0, 0)
    assert found["kept"]["marks"] <= 2 * 2 * 4096
    killed, *others = found["streams"]
    assert (killed["error"], killed["last"]) == ("replica_died", "data: [DONE]")
    whole = [one for one in others if one["replica"] != killed["replica"]]
    assert whole
    assert all((one["reasons"], one["num_tokens"]) == (["length"], 3000) for one in whole)
    again = found["whole"]
    assert (again["status"], again["num_tokens"]) == (200, 1500)
    assert again["replica"] != again["killed"]
    assert found["kept_after"]["known"] <= 2
    assert (found["kept_after"]["flights"], found["kept_after"]["open"]) == (0, 0)
    update = found["update"]
    assert (update["reasons"], update["num_tokens"], update["last"]) == (["length"], 800, "data: [DONE]")
    assert update["model"] == "new"
    # Three seconds, and what a busy machine adds.
    assert found["health"]["status"] == 503
    assert found["health"]["seconds"] < 8
