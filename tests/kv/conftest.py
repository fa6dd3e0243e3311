"""Fixtures of the block bookkeeping's tests."""

from collections.abc import Iterator

import pytest
from kv_helpers import Managers


@pytest.fixture
def make() -> Iterator[Managers]:
    managers = Managers()
    yield managers
    for manager in managers.made:
        manager.check_invariants()
