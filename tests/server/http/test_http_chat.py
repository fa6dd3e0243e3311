"""POST /v1/chat/completions: whole answers and streams."""

# ruff: noqa: RUF001

import json
import re

import pytest
from http_helpers import LiveServer, chat

URL = "/v1/chat/completions"

PROMPTS = [
    "Repeat: 😀🎉🇩🇪👩‍👩‍👧‍👦",
    "Write five emoji.",
    "请用中文介绍一下北京。",
    "日本語で自己紹介してください。",
    "한국어로 인사해 주세요.",
    "Say hello in Greek, Russian and Arabic: Γειά, Привет, مرحبا",
    "What is gravity?",
    "List three fruits 🍎🍌🍇 with their emoji.",
    "翻译: The cat sat on the mat 🐈",
    "naïve café — “quotes” … ‘single’",
    "Zalgo: h̷e̸l̵l̶o̷",
    "Math: ∑ᵢ xᵢ² ≤ ∞ ⇒ ℝ",
    "𝔘𝔫𝔦𝔠𝔬𝔡𝔢 𝓽𝓮𝔁𝓽",
    "Tabs\tand\nnewlines\r\nand nulls \u0001",
    "🏳️‍🌈🏴‍☠️👍🏽",
    "ไทย ภาษา",
    "हिन्दी में लिखिए",
    "Write a JSON object with an emoji in it.",
    "汉字與漢字 😶‍🌫️ mixed with English",
    "",
]


def text_of(events: list[dict], index: int = 0) -> str:
    return "".join(
        choice["delta"].get("content", "")
        for event in events
        for choice in event["choices"]
        if choice["index"] == index
    )


def test_a_whole_answer_has_openais_shape(live: LiveServer) -> None:
    response = live.post(URL, chat("What is gravity?", model="tiny", user="me", ignore_eos=True))
    answer = response.json()
    assert response.headers["content-type"] == "application/json"
    assert answer["object"] == "chat.completion"
    assert answer["id"].startswith("chatcmpl-")
    choice = answer["choices"][0]
    assert choice["message"]["role"] == "assistant"
    assert isinstance(choice["message"]["content"], str)
    assert choice["finish_reason"] == "length"
    assert choice["logprobs"] is None
    usage = answer["usage"]
    assert usage["completion_tokens"] == 8
    assert usage["total_tokens"] == usage["prompt_tokens"] + 8
    assert "token_ids" not in choice


@pytest.mark.parametrize("text", PROMPTS)
def test_a_stream_adds_up_to_the_whole_answer(live: LiveServer, text: str) -> None:
    body = chat(text, max_tokens=20, temperature=1.0, seed=5)
    whole = live.post(URL, body).json()
    events = live.events(URL, body)
    assert text_of(events).encode() == whole["choices"][0]["message"]["content"].encode()
    ends = [choice["finish_reason"] for event in events for choice in event["choices"]]
    assert ends[-1] == whole["choices"][0]["finish_reason"]
    assert not any(ends[:-1])


def test_the_events_of_a_stream(live: LiveServer) -> None:
    options = {"include_usage": True}
    events = live.events(URL, chat("Hi", max_tokens=3, stream_options=options, return_token_ids=True))
    assert events[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert len(events[0]["prompt_token_ids"]) == events[-1]["usage"]["prompt_tokens"]
    assert all("prompt_token_ids" not in event for event in events[1:])
    assert events[-1]["choices"] == []
    assert events[-1]["usage"]["completion_tokens"] == 3
    assert events[-1]["usage"]["prompt_tokens_details"]["cached_tokens"] >= 0
    assert all("usage" not in event for event in events[:-1])
    ids = [token_id for event in events[1:-1] for token_id in event["choices"][0]["token_ids"]]
    assert len(ids) == 3
    assert {event["id"] for event in events} == {events[0]["id"]}
    assert all(event["object"] == "chat.completion.chunk" for event in events)


def test_usage_in_every_event_when_asked(live: LiveServer) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    events = live.events(URL, chat("Hi", max_tokens=3, stream_options=options))
    counts = [event["usage"]["completion_tokens"] for event in events]
    assert counts == sorted(counts)
    assert (counts[0], counts[-1]) == (0, 3)


def test_several_answers_are_told_apart(live: LiveServer) -> None:
    body = chat("Tell me a story", n=3, temperature=1.0, seed=3, max_tokens=6)
    whole = live.post(URL, body).json()
    assert [choice["index"] for choice in whole["choices"]] == [0, 1, 2]
    events = live.events(URL, body)
    for index in range(3):
        assert text_of(events, index) == whole["choices"][index]["message"]["content"]
    roles = [choice["index"] for event in events for choice in event["choices"] if "role" in choice["delta"]]
    assert sorted(roles) == [0, 1, 2]
    assert len({choice["message"]["content"] for choice in whole["choices"]}) > 1


def test_stream_interval_gathers_tokens(live: LiveServer) -> None:
    body = chat("Count to ten", max_tokens=9, return_token_ids=True)
    whole = live.post(URL, body).json()
    events = live.events(URL, {**body, "stream_interval": 4})
    sizes = [len(event["choices"][0]["token_ids"]) for event in events[1:]]
    assert all(size >= 4 for size in sizes[:-1])
    assert sum(sizes) == 9
    assert text_of(events) == whole["choices"][0]["message"]["content"]


def test_logprobs(live: LiveServer) -> None:
    body = chat("What is gravity?", max_tokens=4, logprobs=True, top_logprobs=3)
    content = live.post(URL, body).json()["choices"][0]["logprobs"]["content"]
    assert len(content) == 4
    for entry in content:
        assert len(entry["top_logprobs"]) == 3
        # Greedy: the token that came is the most likely one.
        assert entry["top_logprobs"][0]["token"] == entry["token"]
        assert bytes(entry["bytes"]).decode("utf-8", "replace") == entry["token"]
        values = [top["logprob"] for top in entry["top_logprobs"]]
        assert values == sorted(values, reverse=True)
        assert entry["logprob"] <= 0
    streamed = [
        one
        for event in live.events(URL, body)
        for choice in event["choices"]
        if choice["logprobs"]
        for one in choice["logprobs"]["content"]
    ]
    assert [one["token"] for one in streamed] == [one["token"] for one in content]


def test_prompt_logprobs_and_ids_as_tokens(live: LiveServer) -> None:
    body = chat("Hi", max_tokens=1, prompt_logprobs=1, return_token_ids=True, logprobs=True)
    answer = live.post(URL, {**body, "return_tokens_as_token_ids": True}).json()
    ids = answer["prompt_token_ids"]
    assert len(answer["prompt_logprobs"]) == len(ids)
    assert answer["prompt_logprobs"][0] is None
    assert all(str(one) in entry for one, entry in zip(ids[1:], answer["prompt_logprobs"][1:], strict=True))
    token = answer["choices"][0]["logprobs"]["content"][0]["token"]
    assert token == f"token_id:{answer['choices'][0]['token_ids'][0]}"


def test_the_real_model_answers(real: LiveServer) -> None:
    answer = real.post(URL, chat("What is gravity?", max_tokens=3)).json()
    assert answer["choices"][0]["message"]["content"] == "Gravity is"
    assert real.post(URL, chat("What is gravity?", stop=" is")).json()["choices"][0]["stop_reason"] == " is"


def test_sampling_fields_reach_the_engine(live: LiveServer) -> None:
    def answer(**fields: object) -> dict:
        body = chat("What is gravity?", return_token_ids=True, ignore_eos=True, **fields)
        return live.post(URL, body).json()["choices"][0]

    plain = answer()
    first = plain["token_ids"][0]
    assert answer(stop_token_ids=[first])["token_ids"] == [first]
    assert answer(stop_token_ids=[first])["stop_reason"] == first
    assert len(answer(stop_token_ids=[first], min_tokens=2)["token_ids"]) > 1
    assert answer(logit_bias={str(first): -100})["token_ids"][0] != first
    assert len(answer(max_completion_tokens=2, max_tokens=None)["token_ids"]) == 2
    seeded = {"temperature": 1.5, "seed": 11}
    assert answer(**seeded) == answer(**seeded)
    assert answer(**seeded) != answer(temperature=1.5, seed=12)
    assert answer(**seeded, top_k=1)["token_ids"] == plain["token_ids"]
    assert answer(**seeded, top_p=1e-6)["token_ids"] == plain["token_ids"]
    assert answer(**seeded, min_p=1.0)["token_ids"] == plain["token_ids"]
    # The bias wins every time, but not twice against a penalty.
    biased = {"logit_bias": {"267": 1.0}, "max_tokens": 4}
    assert set(answer(**biased)["token_ids"]) == {267}
    for penalty in ({"presence_penalty": 2.0}, {"frequency_penalty": 2.0}, {"repetition_penalty": 100.0}):
        assert set(answer(**biased, **penalty)["token_ids"]) != {267}, penalty
    body = chat("Hi", logit_bias={"2": 100}, max_tokens=3)
    assert live.post(URL, body).json()["choices"][0]["finish_reason"] == "stop"
    special = live.post(URL, {**body, "ignore_eos": True, "skip_special_tokens": False}).json()
    assert special["choices"][0]["message"]["content"] == "<|im_end|>" * 3


def test_stop_strings(live: LiveServer) -> None:
    letter = live.post("/tokenize", {"prompt": "x"}).json()["tokens"][0]
    body = chat("Hi", logit_bias={str(letter): 100}, return_token_ids=True)
    plain = live.post(URL, {**body, "stop": ["q", "xxx"]}).json()["choices"][0]
    assert (plain["message"]["content"], plain["stop_reason"], plain["finish_reason"]) == ("", "xxx", "stop")
    kept = live.post(URL, {**body, "stop": "xxx", "include_stop_str_in_output": True}).json()["choices"][0]
    assert kept["message"]["content"] == "xxx"
    assert text_of(live.events(URL, {**body, "stop": "xxx"})) == ""


def test_cached_tokens_depend_on_the_salt(live: LiveServer) -> None:
    def cached(salt: str) -> int:
        body = chat("A prompt that nobody else sends, long enough to fill a block or two.", cache_salt=salt)
        return live.post(URL, body).json()["usage"]["prompt_tokens_details"]["cached_tokens"]

    assert cached("salt one") == 0
    assert cached("salt one") > 0
    assert cached("salt two") == 0


def test_the_final_message_is_continued(live: LiveServer) -> None:
    messages = [
        {"role": "user", "content": "What is the capital of France?"},
        {"role": "assistant", "content": "The capital of France is"},
    ]
    body = {"messages": messages, "max_tokens": 1, "temperature": 0, "return_token_ids": True}
    answer = live.post(URL, {**body, "continue_final_message": True}).json()
    # It ends where the message does, not after it.
    tokenizer = live.loop.engine.tokenizer
    assert tokenizer is not None
    assert tokenizer.decode(answer["prompt_token_ids"]).endswith("The capital of France is")
    whole = live.post(URL, {**body, "add_generation_prompt": False}).json()
    assert len(whole["prompt_token_ids"]) > len(answer["prompt_token_ids"])
    empty = [*messages[:1], {"role": "assistant", "content": ""}]
    found = live.post(URL, {**body, "messages": empty, "continue_final_message": True})
    assert found.status_code == 200


def test_prompts_are_truncated_on_demand(live: LiveServer) -> None:
    body = chat("one two three four five", return_token_ids=True)
    ids = live.post(URL, body).json()["prompt_token_ids"]
    cut = live.post(URL, {**body, "truncate_prompt_tokens": 5}).json()["prompt_token_ids"]
    assert cut == ids[-5:]
    left = {"truncate_prompt_tokens": 5, "truncation_side": "right"}
    assert live.post(URL, {**body, **left}).json()["prompt_token_ids"] == ids[:5]
    assert live.post(URL, {**body, "truncate_prompt_tokens": -1}).json()["prompt_token_ids"] == ids


def test_text_parts_nulls_and_neutral_fields_are_taken(live: LiveServer) -> None:
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "Hi"}], "name": None},
        {"role": "assistant", "content": "Hello", "refusal": None, "tool_calls": None, "annotations": []},
        {"role": "user", "content": "Again"},
    ]
    neutral = {"tools": [], "tool_choice": "auto", "response_format": {"type": "text"}, "best_of": 1}
    ignored = {"metadata": {"a": "b"}, "store": False, "chat_template_kwargs": {"enable_thinking": False}}
    body = {"messages": messages, "max_tokens": 1, **neutral, **ignored, "priority": 3, "temperature": None}
    response = live.post(URL, body)
    assert response.status_code == 200, response.text


def test_the_clients_request_id_comes_back(live: LiveServer) -> None:
    response = live.post(URL, chat("Hi", max_tokens=1), headers={"X-Request-Id": "mine-1"})
    assert response.headers["x-request-id"] == "mine-1"
    assert response.json()["id"] == "chatcmpl-mine-1"
    hostile = live.post(URL, chat("Hi", max_tokens=1), headers={"X-Request-Id": "a" * 500})
    assert len(hostile.headers["x-request-id"]) == 32


SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}, "people": {"type": "integer", "maximum": 99}},
    "required": ["city", "people"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("stream", [False, True])
def test_answers_follow_a_schema(real: LiveServer, stream: bool) -> None:
    asked = {"type": "json_schema", "json_schema": {"name": "place", "schema": SCHEMA, "strict": True}}
    body = chat("Where?", max_tokens=60, temperature=1.0, seed=1, response_format=asked, stream=stream)
    if stream:
        events = real.events(URL, body)
        text = "".join(e["choices"][0]["delta"].get("content") or "" for e in events if e["choices"])
    else:
        text = real.post(URL, body).json()["choices"][0]["message"]["content"]
    found = json.loads(text)
    assert set(found) == {"city", "people"}
    assert found["city"] in ("Paris", "Rome")
    assert found["people"] <= 99


def test_answers_follow_vllms_form_too(real: LiveServer) -> None:
    for asked, pattern in (
        ({"choice": ["left", "right"]}, "left|right"),
        ({"regex": "[a-f]{4}"}, "[a-f]{4}"),
    ):
        body = chat("Go on", max_tokens=20, structured_outputs=asked)
        text = real.post(URL, body).json()["choices"][0]["message"]["content"]
        assert re.fullmatch(pattern, text), text
