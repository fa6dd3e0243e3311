"""POST /v1/completions, /v1/responses, /tokenize, /detokenize, and what answers a GET."""

import json
import re

import pytest
from http_helpers import LiveServer

URL = "/v1/completions"
IDS = [70, 100, 130, 160, 190]


def complete(live: LiveServer, **fields: object) -> dict:
    response = live.post(URL, {"temperature": 0, "max_tokens": 4, "ignore_eos": True, **fields})
    assert response.status_code == 200, response.text
    return response.json()


def test_four_forms_of_prompts(live: LiveServer) -> None:
    text = "Hello 😀"
    ids = live.post("/tokenize", {"prompt": text}).json()["tokens"]
    expected = complete(live, prompt=text)["choices"][0]["text"]
    assert complete(live, prompt=ids)["choices"][0]["text"] == expected
    for several in ([text, "other"], [ids, IDS]):
        answer = complete(live, prompt=several)
        assert answer["choices"][0]["text"] == expected
        assert [choice["index"] for choice in answer["choices"]] == [0, 1]
    assert answer["usage"]["prompt_tokens"] == len(ids) + len(IDS)
    assert answer["usage"]["completion_tokens"] == 8


def test_the_default_is_16_tokens(live: LiveServer) -> None:
    answer = live.post(URL, {"prompt": IDS, "ignore_eos": True}).json()
    assert answer["object"] == "text_completion"
    assert answer["usage"]["completion_tokens"] == 16
    assert answer["choices"][0]["finish_reason"] == "length"


def test_echo_with_logprobs_as_lm_eval_asks(live: LiveServer) -> None:
    body = {"prompt": [IDS], "max_tokens": 1, "logprobs": 1, "echo": True, "seed": 1234}
    choice = complete(live, **body)["choices"][0]
    found = choice["logprobs"]
    assert {len(column) for column in found.values()} == {len(IDS) + 1}
    assert found["token_logprobs"][0] is None
    assert found["top_logprobs"][0] is None
    tokens = found["token_logprobs"][1:]
    assert all(value <= 0 for value in tokens)
    # The most likely token is there beside the prompt's own.
    tops = found["top_logprobs"][1:]
    assert all(max(top.values()) >= value for top, value in zip(tops, tokens, strict=True))
    assert max(tops[-1].values()) == tokens[-1]
    # The same as the model's own log-probabilities of that prompt.
    alone = complete(live, prompt=IDS, prompt_logprobs=0)["choices"][0]["prompt_logprobs"]
    expected = [entry[str(one)]["logprob"] for one, entry in zip(IDS[1:], alone[1:], strict=True)]
    assert tokens[:-1] == pytest.approx(expected, abs=1e-4)


def test_echo_gives_the_prompt_back(live: LiveServer) -> None:
    text = "Hello 😀"
    answer = complete(live, prompt=text, echo=True)["choices"][0]["text"]
    assert answer == text + complete(live, prompt=text)["choices"][0]["text"]
    only = complete(live, prompt=text, echo=True, max_tokens=0, logprobs=0, return_token_ids=True)
    choice = only["choices"][0]
    assert choice["text"] == text
    assert choice["token_ids"] == []
    assert len(choice["logprobs"]["tokens"]) == len(choice["prompt_token_ids"])
    assert only["usage"]["completion_tokens"] == 0
    # Offsets point into the text, as far as characters are whole.
    assert choice["logprobs"]["text_offset"][:6] == [0, 1, 2, 3, 4, 5]
    events = live.events(URL, {"prompt": text, "echo": True, "max_tokens": 0})
    assert "".join(choice["text"] for event in events for choice in event["choices"]) == text


def test_streams_of_several_prompts(live: LiveServer) -> None:
    body = {"prompt": [IDS, [71, 72], [90]], "n": 2, "max_tokens": 5, "seed": 4, "ignore_eos": True}
    whole = live.post(URL, body).json()
    options = {"include_usage": True}
    events = live.events(URL, {**body, "stream_options": options, "logprobs": 0, "return_token_ids": True})
    for choice in whole["choices"]:
        parts = [one for event in events for one in event["choices"] if one["index"] == choice["index"]]
        assert "".join(part["text"] for part in parts) == choice["text"]
        assert parts[-1]["finish_reason"] == "length"
        assert parts[0]["prompt_token_ids"] == body["prompt"][choice["index"] // 2]
        offsets = [offset for part in parts for offset in part["logprobs"]["text_offset"]]
        assert offsets == sorted(offsets)
        assert len(offsets) == 5
    assert events[-1]["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"] == 30


def test_tokenize_and_back(live: LiveServer) -> None:
    text = "naïve 😀 <|im_end|> 北京"
    found = live.post("/tokenize", {"prompt": text, "model": "tiny", "return_token_strs": True}).json()
    assert found["count"] == len(found["tokens"]) == len(found["token_strs"])
    assert found["max_model_len"] == 512
    assert live.post("/detokenize", {"tokens": found["tokens"]}).json() == {"prompt": text}
    messages = [{"role": "user", "content": "Hi"}]
    chat = live.post("/tokenize", {"messages": messages}).json()["tokens"]
    rendered = live.post("/detokenize", {"tokens": chat}).json()["prompt"]
    assert rendered == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert live.post("/tokenize", {}).status_code == 400
    assert live.post("/detokenize", {"tokens": [10**6]}).status_code == 400


def test_responses(live: LiveServer) -> None:
    body = {"input": "Hi", "instructions": "Be brief", "max_output_tokens": 5, "temperature": 0}
    whole = live.post("/v1/responses", body).json()
    assert whole["object"] == "response"
    assert whole["usage"]["output_tokens"] <= 5
    text = whole["output"][0]["content"][0]["text"]
    parts = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hi"}]}
    same = live.post("/v1/responses", {**body, "input": [parts]}).json()
    assert same["output"][0]["content"][0]["text"] == text
    with live.http.stream("POST", "/v1/responses", json={**body, "stream": True}) as answer:
        lines = list(answer.iter_lines())
    events = [json.loads(line[6:]) for line in lines if line.startswith("data: ")]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert [f"event: {event['type']}" for event in events] == [
        line for line in lines if line.startswith("event")
    ]
    deltas = [event["delta"] for event in events if event["type"] == "response.output_text.delta"]
    assert "".join(deltas) == text
    assert (events[0]["type"], events[-1]["type"]) == ("response.created", f"response.{whole['status']}")
    for field in ({"previous_response_id": "x"}, {"background": True}, {"tools": [{"type": "function"}]}):
        refused = live.post("/v1/responses", {**body, **field})
        assert refused.status_code == 400
        assert refused.json()["error"]["param"].startswith(next(iter(field)))
    image = [{"role": "user", "content": [{"type": "input_image", "image_url": "http://x"}]}]
    assert live.post("/v1/responses", {**body, "input": image}).status_code == 400


def test_models_version_and_health(live: LiveServer) -> None:
    (card,) = live.http.get("/v1/models").json()["data"]
    assert (card["id"], card["max_model_len"], card["object"]) == ("tiny", 512, "model")
    assert live.http.get("/v1/models/tiny").json() == card
    missing = live.http.get("/v1/models/org/other")
    assert missing.status_code == 404
    assert missing.json()["error"]["code"] == "model_not_found"
    assert re.match(r"\d+\.\d+", live.http.get("/version").json()["version"])
    for path in ("/health", "/ping", "/ready"):
        assert live.http.get(path).status_code == 200
    assert live.http.get("/health").json()["status"] == "ready"


def test_metrics_have_the_names_of_dashboards(live: LiveServer) -> None:
    complete(live, prompt=IDS)
    text = live.http.get("/metrics").text
    assert live.http.head("/metrics").status_code == 200
    samples = dict(line.rsplit(" ", 1) for line in text.splitlines() if line and not line.startswith("#"))
    labels = '{engine="0",model_name="tiny"}'
    for name in (
        "vllm:num_requests_running",
        "vllm:num_requests_waiting",
        "vllm:kv_cache_usage_perc",
        "vllm:prefix_cache_queries_total",
        "vllm:prefix_cache_hits_total",
        "vllm:num_preemptions_total",
        "vllm:prompt_tokens_total",
        "vllm:generation_tokens_total",
        "vllm:time_to_first_token_seconds_count",
        "vllm:inter_token_latency_seconds_sum",
        "vllm:e2e_request_latency_seconds_count",
        "vllm:request_queue_time_seconds_count",
        "vllm:request_params_n_count",
        "octavo:kv_blocks_shared",
    ):
        assert name + labels in samples, name
    assert float(samples["vllm:generation_tokens_total" + labels]) >= 4
    assert float(samples["vllm:time_to_first_token_seconds_count" + labels]) >= 1
    assert 'vllm:request_success_total{engine="0",finished_reason="length",model_name="tiny"}' in samples
    assert 'num_gpu_blocks="256"' in text
    assert 'octavo:http_responses_total{status="200"}' in samples


def test_openapi_describes_every_route(live: LiveServer) -> None:
    from octavo.server.app import ROUTES

    document = live.http.get("/openapi.json").json()
    described = {(method.upper(), path) for path, ways in document["paths"].items() for method in ways}
    served = {(method, path.replace(":path", "")) for method, path, _ in ROUTES}
    refused = {("POST", f"/api/{name}") for name in ("pull", "push", "create", "copy")}
    refused.add(("DELETE", "/api/delete"))
    assert served - described == {("GET", "/ping"), ("GET", "/openapi.json"), ("GET", "/api/hello")} | refused
    # Generated clients send what is described.
    without_body = {
        path
        for path, methods in document["paths"].items()
        if "requestBody" not in methods.get("post", {"requestBody": 0})
    }
    assert without_body == {"/v1/responses/{name}/cancel", "/v1/batches/{name}/cancel"}
    assert described <= served
    names = set(document["components"]["schemas"])
    references = set(re.findall(r"#/components/schemas/(\w+)", json.dumps(document)))
    assert references <= names
    fields = document["components"]["schemas"]["ChatRequest"]["properties"]
    assert {"messages", "top_k", "cache_salt"} <= fields.keys()


def test_only_long_texts_are_read_by_other_threads(live: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(work: object, *arguments: object) -> None:
        raise AssertionError("another thread is asked")

    expected = complete(live, prompt=["a" * 257])["choices"]
    with monkeypatch.context() as patched:
        patched.setattr(live.gate.context, "run", run)
        for prompt in ("a" * 256, IDS, IDS * 60, [IDS, IDS]):
            assert complete(live, prompt=prompt, stream=False)["choices"]
        for prompt in ("a" * 257, ["a"]):
            assert live.post(URL, {"prompt": prompt}).status_code == 500
    assert complete(live, prompt=["a" * 257])["choices"] == expected


@pytest.mark.parametrize(
    ("prompt", "told"),
    [
        ([], "1 to 256 prompts, got 0"),
        ([1, "a"], "got several of these"),
        ([[1], "a"], "got several of these"),
        ([1, [1]], "got several of these"),
        ([[1], []], "at least one token"),
        ([5, 10**6], "got 1000000"),
        ([5, -1], "got -1"),
        ([5, 2**31], "got 2147483648"),
        ([[5], [2**70]], "got 1180591620717411303424"),
    ],
)
def test_ids_that_are_no_prompt(live: LiveServer, prompt: object, told: str) -> None:
    for more in ({}, {"truncate_prompt_tokens": 8}):
        response = live.post(URL, {"prompt": prompt, **more})
        assert response.status_code == 400
        assert told in response.json()["error"]["message"]
