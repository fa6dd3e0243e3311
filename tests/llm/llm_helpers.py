"""What the tests of the public API share."""

from octavo import LLM


def assert_drained(llm: LLM) -> None:
    """No request and no reference is left, and the pool agrees with itself."""
    assert not llm.engine.has_unfinished_requests
    assert llm.stats.kv.num_referenced == 0
    llm.engine.manager.check_invariants()
