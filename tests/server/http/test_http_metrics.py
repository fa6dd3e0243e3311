"""/metrics: every name that dashboards for vLLM and ours ask for, with its type, labels and meaning."""

import re
from pathlib import Path

import pytest
from http_helpers import LiveServer
from prometheus_client.parser import text_string_to_metric_families

ROOT = Path(__file__).parents[3]
TEXT = "/v1/completions"
PLAIN = ("engine", "model_name")
# Name without a counter's _total: type, labels beside engine and model_name.
EXPECTED: dict[str, tuple[str, tuple[str, ...]]] = {
    **dict.fromkeys(
        (
            "vllm:num_requests_running",
            "vllm:num_requests_waiting",
            "vllm:kv_cache_usage_perc",
            "octavo:waiting_tokens",
            "octavo:live_requests",
            "octavo:seconds_since_progress",
            "octavo:kv_blocks",
            "octavo:kv_blocks_referenced",
            "octavo:kv_blocks_shared",
            "octavo:kv_blocks_cached",
            "octavo:kv_blocks_leaked",
            "octavo:kv_saved_bytes",
            "octavo:forest_nodes",
        ),
        ("gauge", ()),
    ),
    "vllm:num_requests_waiting_by_reason": ("gauge", ("reason",)),
    **dict.fromkeys(
        (
            "vllm:prefix_cache_queries",
            "vllm:prefix_cache_hits",
            "vllm:num_preemptions",
            "vllm:prompt_tokens",
            "vllm:prompt_tokens_cached",
            "vllm:generation_tokens",
            "octavo:steps",
            "octavo:computed_tokens",
            "octavo:saved_kv_tokens",
            "octavo:evicted_blocks",
            "octavo:prefix_lost_tokens",
            "octavo:late_kernels",
            "octavo:late_graphs",
            "octavo:late_allocations",
            "octavo:engine_restarts",
        ),
        ("counter", ()),
    ),
    "vllm:prompt_tokens_by_source": ("counter", ("source",)),
    "vllm:request_success": ("counter", ("finished_reason",)),
    "vllm:admission_rejections": ("counter", ("reason",)),
    **dict.fromkeys(
        (
            "vllm:time_to_first_token_seconds",
            "vllm:inter_token_latency_seconds",
            "vllm:request_time_per_output_token_seconds",
            "vllm:e2e_request_latency_seconds",
            "vllm:request_queue_time_seconds",
            "vllm:request_inference_time_seconds",
            "vllm:request_prefill_time_seconds",
            "vllm:request_decode_time_seconds",
            "vllm:request_prompt_tokens",
            "vllm:request_generation_tokens",
            "vllm:request_max_num_generation_tokens",
            "vllm:request_prefill_kv_computed_tokens",
            "vllm:request_num_preemptions",
            "vllm:request_params_n",
            "vllm:request_params_max_tokens",
            "vllm:iteration_tokens_total",
            "octavo:grammar_compile_seconds",
        ),
        ("histogram", ()),
    ),
}
# With labels of their own.
OTHERS = {"vllm:cache_config_info": "gauge", "octavo:http_responses": "counter"}


@pytest.fixture(scope="module")
def families(tiny_server: LiveServer) -> dict:
    """What is there after four completions with a common prefix, run side by side, and some JSON."""
    body = {"prompt": [*range(60, 100)], "n": 4, "max_tokens": 8, "ignore_eos": True}
    assert tiny_server.post(TEXT, body).status_code == 200
    asks = {"prompt": [60], "max_tokens": 2, "structured_outputs": {"choice": ["a", "b"]}}
    assert tiny_server.post(TEXT, asks).status_code == 200
    text = tiny_server.http.get("/metrics").text
    return {family.name: family for family in text_string_to_metric_families(text)}


def test_names_types_and_labels(families: dict) -> None:
    assert {name for name in families if not name.endswith("_created")} == EXPECTED.keys() | OTHERS.keys()
    for name, (kind, labels) in EXPECTED.items():
        family = families[name]
        assert family.type == kind, name
        assert family.documentation, name
        for sample in family.samples:
            assert {*sample.labels} - {"le"} == {*PLAIN, *labels}, name
            assert (sample.labels["engine"], sample.labels["model_name"]) == ("0", "tiny")
    for name, kind in OTHERS.items():
        assert families[name].type == kind


def value(families: dict, name: str, **labels: str) -> float:
    found = [
        sample.value
        for family in families.values()
        for sample in family.samples
        if sample.name == name and labels.items() <= sample.labels.items()
    ]
    assert len(found) == 1, name
    return found[0]


def test_values_agree_with_one_another(families: dict) -> None:
    ended = value(families, "vllm:request_success_total", finished_reason="length")
    stopped = value(families, "vllm:request_success_total", finished_reason="stop")
    for name in ("e2e_request_latency_seconds", "request_prompt_tokens", "request_num_preemptions"):
        assert value(families, f"vllm:{name}_count") >= ended + stopped
    assert value(families, "vllm:prompt_tokens_total") == sum(
        value(families, "vllm:prompt_tokens_by_source_total", source=source)
        for source in ("local_compute", "local_cache_hit")
    )
    assert value(families, "vllm:iteration_tokens_total_sum") == value(
        families, "octavo:computed_tokens_total"
    )
    assert value(families, "vllm:iteration_tokens_total_count") == value(families, "octavo:steps_total")
    # Four completions read 36 tokens of a prompt of 40 once instead of four times in each of seven steps.
    assert value(families, "octavo:saved_kv_tokens_total") >= 7 * 3 * 36
    assert value(families, "octavo:grammar_compile_seconds_count") >= 1
    tokens = value(families, "vllm:request_generation_tokens_sum")
    assert value(families, "vllm:generation_tokens_total") >= tokens >= 33


def test_a_scraper_may_ask_for_the_head_first(live: LiveServer) -> None:
    answer = live.http.head("/metrics")
    assert (answer.status_code, answer.content) == (200, b"")
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")


def test_every_name_is_documented() -> None:
    named = set(re.findall(r"`((?:vllm|octavo):\w+)`", (ROOT / "docs" / "metrics.md").read_text()))
    assert named == EXPECTED.keys() | OTHERS.keys()
