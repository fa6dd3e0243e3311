"""`octavo bench serve`'s client against the real model: nothing is lost, and both count the same tokens."""

import asyncio
from typing import Any

import pytest
from http_helpers import LiveServer

from octavo.bench_client.load import run_load
from octavo.bench_client.options import LoadOptions
from octavo.bench_client.summary import summarise


@pytest.mark.parametrize("endpoint", ["completions", "chat"])
def test_load_on_the_real_model(real: LiveServer, endpoint: Any) -> None:
    before = real.loop.stats()
    options = LoadOptions(
        base_url=real.url,
        endpoint=endpoint,
        num_prompts=4,
        max_concurrency=2,
        input_len=(5, 12),
        output_len=(3, 6),
        ignore_eos=True,
    )
    figures = summarise(options, asyncio.run(run_load(options)))
    assert (figures["completed"], figures["errors"]) == (4, {})
    assert not any("usage" in warning or "shorter" in warning for warning in figures["warnings"])
    after = real.loop.stats()
    assert figures["total_output_tokens"] == after.num_output_tokens - before.num_output_tokens
    assert figures["total_input_tokens"] == after.num_prompt_tokens - before.num_prompt_tokens
    assert 0 < figures["median_ttft_ms"] < figures["median_e2el_ms"]
    assert figures["max_concurrent_requests"] == 2
