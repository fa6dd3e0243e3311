"""What asks for nothing is taken everywhere; a value of a wrong type is refused by name, wherever it is."""

import json
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from body_cases import ROUTES, places, replaced, with_nulls
from http_helpers import LiveServer

from octavo.server.api.body import decode

# Every JSON type, empty and not.
VALUES: tuple[Any, ...] = (
    None,
    True,
    0,
    -1,
    1.5,
    10**30,
    "",
    "x",
    [],
    [[]],
    [{}],
    {},
    {"type": []},
    {"a": {}},
)


@pytest.mark.parametrize("path", ROUTES)
def test_null_is_taken_for_every_field_that_may_be_missing(path: str) -> None:
    kind, _ = ROUTES[path]
    cases = list(with_nulls(kind))
    open_fields = [field for field in msgspec.structs.fields(kind) if not field.required]
    assert {place for place, _ in cases} >= {f".{field.name}" for field in open_fields}
    for place, body in cases:
        try:
            decode(json.dumps(body).encode(), kind)
        except Exception as error:
            pytest.fail(f"{place} of {path}: {error}")


@pytest.mark.parametrize("path", ROUTES)
def test_any_type_at_any_place_is_answered_or_refused_by_name(
    serve_template: Callable[..., LiveServer], path: str
) -> None:
    live, body = serve_template(tool_call_parser="hermes"), ROUTES[path][1]
    whole = live.http.post(path, json=body)
    assert whole.status_code == 200, whole.text
    wrong = []
    for place in places(body):
        for value in VALUES:
            content = json.dumps(replaced(body, place, value))
            answer = live.http.post(path, content=content, headers={"Content-Type": "application/json"})
            is_named = answer.status_code != 400 or not place or _names(answer.json()["error"], place)
            if answer.status_code not in (200, 400, 404) or not is_named:
                wrong.append(f"{value!r} at {place}: {answer.status_code} {answer.text[:200]}")
    assert not wrong, "\n".join(wrong)
    live.assert_drained()


def _names(error: dict[str, Any], place: tuple[str | int, ...]) -> bool:
    """Whether an error says which field of the body it is about, or which part of it."""
    said = f"{error.get('param')} {error['message']}"
    return any(name in said for name in (*map(str, place), "json_schema", "structured output"))


# Fields of OpenAI's, Anthropic's and vLLM's APIs that Octavo lacks, in which clients write nothing.
NEUTRAL: dict[str, tuple[dict[str, Any], ...]] = {
    "/v1/completions": (
        {"suffix": "", "best_of": 1, "use_beam_search": False, "logprobs": None, "echo": False},
        {
            "user": "me",
            "metadata": {"a": "b"},
            "store": True,
            "service_tier": "auto",
            "prompt_cache_key": "k",
        },
        {"safety_identifier": "s", "spaces_between_special_tokens": True, "prompt_cache_retention": "24h"},
        {"stop": [], "logit_bias": {}, "stop_token_ids": [], "stream_options": {}, "seed": -1},
        {"tools": [], "tool_choice": "none", "response_format": {"type": "text"}, "guided_json": None},
        {"vllm_xargs": {}, "kv_transfer_params": {"a": None}, "max_tokens": 1, "documents": None},
    ),
    "/v1/chat/completions": (
        {"tools": [], "tool_choice": "none", "functions": [], "function_call": None, "modalities": ["text"]},
        {"tools": [], "tool_choice": "auto", "parallel_tool_calls": None, "metadata": None, "audio": None},
        {"logprobs": True, "top_logprobs": 0},
        {"logprobs": False, "top_logprobs": 0, "web_search_options": None, "prediction": None},
        {"top_logprobs": 0, "stream_options": {"include_usage": False}, "chat_template_kwargs": {}},
        {"verbosity": "medium", "reasoning_effort": None, "prompt_cache_retention": None, "seed": -1},
        {"documents": [], "logits_processors": None, "echo": None, "mm_processor_kwargs": {}, "include": []},
        {"stream": True, "stream_options": {"include_usage": None, "include_obfuscation": None}},
    ),
    "/v1/responses": (
        {"reasoning": {}},
        {"reasoning": {"effort": None, "summary": None, "generate_summary": None}},
        {"include": [], "truncation": "disabled", "background": False, "context_management": []},
        {"stream_options": {"include_obfuscation": False}, "text": {"verbosity": "medium", "format": None}},
        {"text": {}, "top_logprobs": 0, "max_tool_calls": None, "conversation": None, "prompt": None},
        {
            "tools": [],
            "tool_choice": "none",
            "metadata": {},
            "instructions": None,
            "prompt_cache_retention": None,
        },
    ),
    "/v1/messages": (
        {"context_management": {"edits": []}},
        {"context_management": {}, "mcp_servers": [], "container": None, "output_config": {}},
        {"output_config": {"effort": None, "format": None}, "cache_control": {"type": "ephemeral"}},
        {"tools": [], "system": [], "stop_sequences": [], "metadata": {}, "inference_geo": None},
        {"tool_choice": {"type": "none"}, "thinking": {"type": "disabled"}, "top_k": None, "system": None},
        {"tool_choice": {"type": "auto", "disable_parallel_tool_use": None, "name": None}},
    ),
}
LEAST = {
    "/v1/completions": {"prompt": "Hi", "max_tokens": 1},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1},
    "/v1/responses": {"input": "Hi", "max_output_tokens": 1},
    "/v1/messages": {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1},
}


@pytest.mark.parametrize(("path", "fields"), [(path, f) for path, all_ in NEUTRAL.items() for f in all_])
def test_fields_that_ask_for_nothing_are_taken(live: LiveServer, path: str, fields: dict[str, Any]) -> None:
    answer = live.http.post(path, json={**LEAST[path], **fields})
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize(
    ("path", "fields", "named"),
    [
        ("/v1/responses", {"truncation": "auto"}, "truncation"),
        ("/v1/messages", {"container": "c"}, "container"),
        ("/v1/chat/completions", {"prediction": {"type": "content", "content": ""}}, "prediction"),
        ("/v1/chat/completions", {"top_logprobs": 1}, "top_logprobs"),
        ("/v1/chat/completions", {"stream_options": {"include_usage": True}}, "stream_options"),
        ("/v1/completions", {"best_of": 2}, "best_of"),
        ("/v1/completions", {"temprature": 0}, "temprature"),
    ],
)
def test_fields_that_ask_for_something_are_not(
    live: LiveServer, path: str, fields: dict[str, Any], named: str
) -> None:
    answer = live.http.post(path, json={**LEAST[path], **fields})
    assert answer.status_code == 400
    assert named in answer.json()["error"]["message"]


def test_no_top_logprobs_are_those_of_the_tokens_alone(live: LiveServer) -> None:
    body = {
        **LEAST["/v1/chat/completions"],
        "logprobs": True,
        "top_logprobs": 0,
        "max_tokens": 3,
        "ignore_eos": True,
    }
    content = live.http.post("/v1/chat/completions", json=body).json()["choices"][0]["logprobs"]["content"]
    assert len(content) == 3
    assert all(entry["top_logprobs"] == [] and entry["logprob"] <= 0 for entry in content)


HISTORY: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        "messages": [
            {"role": "system", "content": "Be kind.", "name": None},
            {
                "role": "user",
                "content": [{"type": "text", "text": "Hi", "cache_control": None}],
                "name": None,
            },
            {
                "role": "assistant",
                "content": "Hello",
                "refusal": None,
                "audio": None,
                "annotations": [],
                "tool_calls": None,
                "function_call": None,
                "reasoning_content": None,
                "reasoning": None,
                "name": None,
            },
            {"role": "user", "content": "Again", "tool_call_id": None, "tool_calls": None},
        ]
    },
    "/v1/responses": {
        "input": [
            {"type": None, "id": None, "status": None, "role": "user", "content": "Hi"},
            {
                "type": "reasoning",
                "id": "r",
                "summary": None,
                "content": None,
                "status": None,
                "encrypted": None,
            },
            {
                "type": "message",
                "role": "assistant",
                "content": [
                    {"type": "output_text", "text": "Hello", "annotations": None, "logprobs": None},
                ],
                "phase": None,
            },
            {"role": "user", "content": [{"type": "input_text", "text": "Again", "detail": None}]},
        ]
    },
    "/v1/messages": {
        "system": [{"type": "text", "text": "Be kind.", "cache_control": None, "citations": None}],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "Hi", "cache_control": None}]},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "Hm", "signature": None},
                    {"type": "text", "text": "Hello", "citations": [], "parsed_output": None},
                ],
            },
            {"role": "user", "content": "Again"},
        ],
    },
}


@pytest.mark.parametrize("path", HISTORY)
def test_nulls_in_history_are_nothing(live: LiveServer, path: str) -> None:
    answer = live.http.post(path, json={**LEAST[path], **HISTORY[path]})
    assert answer.status_code == 200, answer.text
