"""OpenAI's own client, sync and async, against a live server."""

import asyncio
from collections.abc import Iterator
from types import ModuleType
from typing import Any, Literal

import pydantic
import pytest
from http_helpers import LiveServer, chat, eventually

MESSAGES = [{"role": "user", "content": "What is gravity? 😀"}]
ARGUMENTS = {"model": "tiny", "messages": MESSAGES, "seed": 7, "max_completion_tokens": 12}


@pytest.fixture
def client(live: LiveServer, openai: ModuleType) -> Iterator[Any]:
    with openai.OpenAI(base_url=f"{live.url}/v1", api_key="unused", max_retries=0) as client:
        yield client


def test_chats_completions_and_models(client: Any) -> None:
    answer = client.chat.completions.create(**ARGUMENTS, logprobs=True, top_logprobs=2)
    assert answer.choices[0].message.role == "assistant"
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    assert answer.choices[0].logprobs is not None
    assert len(answer.choices[0].logprobs.content[0].top_logprobs) == 2
    stream = client.chat.completions.create(**ARGUMENTS, stream=True, stream_options={"include_usage": True})
    chunks = list(stream)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == answer.choices[0].message.content
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == answer.usage.completion_tokens
    completion = client.completions.create(
        model="tiny", prompt=["a", "b"], max_tokens=3, extra_body={"top_k": 1}
    )
    assert len(completion.choices) == 2
    parts = client.completions.create(model="tiny", prompt="a", max_tokens=3, stream=True, temperature=0)
    assert all(part.object == "text_completion" for part in parts)
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").id == "tiny"


class Light(pydantic.BaseModel):
    color: Literal["red", "green"]
    blinks: bool


def test_an_answer_of_a_type(client: Any) -> None:
    arguments = {**ARGUMENTS, "max_completion_tokens": 60}
    answer = client.chat.completions.parse(**arguments, response_format=Light)
    assert isinstance(answer.choices[0].message.parsed, Light)
    with client.chat.completions.stream(**arguments, response_format=Light) as stream:
        final = stream.get_final_completion()
    assert final.choices[0].message.parsed == answer.choices[0].message.parsed


def test_a_response_of_a_type(client: Any, openai: ModuleType) -> None:
    arguments = {"model": "tiny", "input": "Hi", "temperature": 0, "max_output_tokens": 400}
    answer = client.responses.parse(**arguments, text_format=Light)
    assert isinstance(answer.output_parsed, Light)
    assert answer.text.format.type == "json_schema"
    whole = client.responses.create(**arguments, text={"format": {"type": "json_object"}})
    assert whole.output_text.lstrip().startswith("{")
    with pytest.raises(openai.BadRequestError, match="needs a schema"):
        client.responses.create(**arguments, text={"format": {"type": "json_schema", "name": "none"}})


def test_responses(client: Any) -> None:
    arguments = {"model": "tiny", "input": "Hi", "temperature": 0, "max_output_tokens": 8}
    answer = client.responses.create(**arguments)
    with client.responses.stream(**arguments) as stream:
        events = list(stream)
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == answer.output_text == events[-1].response.output_text
    assert events[-1].type == f"response.{answer.status}"


def test_errors_are_the_clients_own(client: Any, openai: ModuleType) -> None:
    with pytest.raises(openai.BadRequestError, match="did you mean 'temperature'"):
        client.chat.completions.create(**ARGUMENTS, extra_body={"temprature": 1})
    with pytest.raises(openai.NotFoundError, match="no model"):
        client.chat.completions.create(**{**ARGUMENTS, "model": "gpt"})
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="tiny", prompt=[5] * 600)
    assert caught.value.code == "context_length_exceeded"


def test_an_error_in_a_stream_is_raised(slow_live: LiveServer, client: Any, openai: ModuleType) -> None:
    engine = slow_live.loop.engine
    stream = client.chat.completions.create(
        model="tiny", messages=MESSAGES, max_tokens=400, stream=True, extra_body={"ignore_eos": True}
    )
    next(stream)
    launch = engine.runner.launch

    def broken(step: object) -> object:
        engine.runner.launch = launch  # type: ignore[method-assign]
        raise RuntimeError

    engine.runner.launch = broken  # type: ignore[method-assign]
    with pytest.raises(openai.APIError, match="the model step failed"):
        list(stream)


def test_leaving_a_stream_ends_it(slow_live: LiveServer, client: Any) -> None:
    stream = client.chat.completions.create(
        model="tiny", messages=MESSAGES, max_tokens=400, stream=True, extra_body={"ignore_eos": True}
    )
    next(stream)
    stream.close()
    eventually(lambda: slow_live.loop.stats().num_live == 0)


def test_the_async_client_side_by_side(live: LiveServer, openai: ModuleType) -> None:
    expected = live.post("/v1/chat/completions", chat("x", seed=3, max_tokens=6)).json()

    async def many() -> list[str | None]:
        async with openai.AsyncOpenAI(base_url=f"{live.url}/v1", api_key="unused") as client:

            async def whole() -> str | None:
                body = chat("x", seed=3, max_tokens=6)
                answer = await client.chat.completions.create(model="tiny", **body)
                return answer.choices[0].message.content

            async def streamed() -> str:
                body = chat("x", seed=3, max_tokens=6)
                stream = await client.chat.completions.create(model="tiny", **body, stream=True)
                return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

            return await asyncio.gather(*[way() for _ in range(8) for way in (whole, streamed)])

    assert set(asyncio.run(many())) == {expected["choices"][0]["message"]["content"]}
