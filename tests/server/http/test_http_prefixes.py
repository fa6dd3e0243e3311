"""A coding session of 12 turns through each API: every turn finds nearly all of the turn before in the cache.

Clients change things from turn to turn that mean nothing: Claude Code's billing line, the second in an
environment's date, the order of keys in a tool's schema.
"""

import logging
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from http_helpers import LiveServer
from template_families import QWEN3
from template_samples import CHATML, SMOLLM2

NUM_TURNS = 12
PATHS = ["a.py", "src/é.py", "tests/test_a.py"]
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "path": {"type": "string", "enum": PATHS, "description": "Which file"},
        "line": {"type": "integer", "enum": [1, 20]},
    },
    "required": ["path", "line"],
}
RULES = "You are a careful engineer. " * 15
BILLING = "x-anthropic-billing-header: cc_version=2.1.77.{0:03x}; cc_entrypoint=cli; cch={0:05x};"
HI: list[Any] = [{"role": "user", "content": "Hi"}]
# Bodies of more than 32 KiB are read by another process.
LONG = {"note": "x" * 33_000}
DATE = "\n<env>\nWorking directory: /home/x\nToday's date: 2026-11-28{}\n</env>\n"


def shuffled(value: Any, rng: random.Random) -> Any:
    """The same JSON with the keys of schemas, but not of their properties, in another order."""
    if not isinstance(value, dict):
        return value
    keys = list(value)
    rng.shuffle(keys)
    entries = {key: shuffled(value[key], rng) for key in keys}
    properties = value.get("properties")
    if properties:
        entries["properties"] = {name: shuffled(properties[name], rng) for name in properties}
    return entries


@dataclass
class Session:
    """A conversation as a client keeps it.

    Attributes:
        is_noisy: it changes what means nothing in every turn.
        history: turns in the API's own form.
    """

    server: LiveServer
    is_noisy: bool
    history: list[Any] = field(default_factory=list)
    rng: random.Random = field(default_factory=lambda: random.Random(1))

    @property
    def billing(self) -> str | None:
        return BILLING.format(self.rng.randrange(16**5)) if self.is_noisy else None

    @property
    def rules(self) -> str:
        return RULES + DATE.format(f"T12:{self.rng.randrange(10, 60)}:07Z" if self.is_noisy else "")

    @property
    def schema(self) -> dict[str, Any]:
        return shuffled(SCHEMA, self.rng) if self.is_noisy else SCHEMA

    def turn(self, number: int) -> tuple[int, int]:
        """Answer; return how many tokens the prompt had, and how many of them were cached."""
        raise NotImplementedError

    def usage(self, path: str, body: dict[str, Any]) -> Any:
        answer = self.server.post(path, body)
        assert answer.status_code == 200, answer.text
        return answer.json()


class Chat(Session):
    def turn(self, number: int) -> tuple[int, int]:
        if not self.history:
            self.history.append({"role": "user", "content": "Fix it."})
        parts = [{"type": "text", "text": text} for text in (self.billing, self.rules) if text]
        tool = {"type": "function", "function": {"name": "look", "parameters": self.schema}}
        body = {
            "messages": [{"role": "system", "content": parts}, *self.history],
            "tools": [tool],
            "tool_choice": "none" if number % 4 else "required",
            "parallel_tool_calls": False,
            "max_tokens": 8 if number % 4 else 200,
            "temperature": 0,
        }
        answer = self.usage("/v1/chat/completions", body)
        message = answer["choices"][0]["message"]
        self.history.append(message)
        for call in message.get("tool_calls") or ():
            self.history.append({"role": "tool", "tool_call_id": call["id"], "content": f"Line {number}"})
        if not message.get("tool_calls"):
            self.history.append({"role": "user", "content": "Go on."})
        usage = answer["usage"]
        return usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]


class Responses(Session):
    def turn(self, number: int) -> tuple[int, int]:
        if not self.history:
            self.history.append({"role": "user", "content": "Fix it."})
        body = {
            "instructions": "\n".join(text for text in (self.billing, self.rules) if text),
            "input": self.history,
            "tools": [{"type": "function", "name": "look", "parameters": self.schema}],
            "tool_choice": "none" if number % 4 else "required",
            "parallel_tool_calls": False,
            "max_output_tokens": 8 if number % 4 else 200,
            "temperature": 0,
        }
        answer = self.usage("/v1/responses", body)
        self.history += answer["output"]
        calls = [item["call_id"] for item in answer["output"] if item["type"] == "function_call"]
        for call in calls:
            told = {"type": "function_call_output", "call_id": call, "output": f"Line {number}"}
            self.history.append(told)
        if not calls:
            self.history.append({"role": "user", "content": "Go on."})
        usage = answer["usage"]
        return usage["input_tokens"], usage["input_tokens_details"]["cached_tokens"]


class Messages(Session):
    def turn(self, number: int) -> tuple[int, int]:
        if not self.history:
            self.history.append({"role": "user", "content": "Fix it."})
        marked = {"cache_control": {"type": "ephemeral"}}
        texts = [text for text in (self.billing, self.rules) if text]
        last = self.history[-1]["content"]
        # Claude Code marks the last turn, whose content is a list then, and a text in the next request.
        blocks = [{"type": "text", "text": last}] if isinstance(last, str) else last
        body = {
            "system": [{"type": "text", "text": text, **marked} for text in texts],
            "messages": [
                *self.history[:-1],
                {"role": "user", "content": [*blocks[:-1], blocks[-1] | marked]},
            ],
            "tools": [{"name": "look", "input_schema": self.schema}],
            "tool_choice": {
                "type": "none" if number % 4 else "any",
                "disable_parallel_tool_use": True,
            },
            "max_tokens": 8 if number % 4 else 200,
            "temperature": 0,
        }
        answer = self.usage("/v1/messages", body)
        self.history.append({"role": "assistant", "content": answer["content"]})
        results = [
            {"type": "tool_result", "tool_use_id": block["id"], "content": f"Line {number}"}
            for block in answer["content"]
            if block["type"] == "tool_use"
        ]
        self.history.append({"role": "user", "content": results or "Go on."})
        usage = answer["usage"]
        assert usage["cache_creation_input_tokens"] == 0
        cached = usage["cache_read_input_tokens"]
        return usage["input_tokens"] + cached, cached


SESSIONS = {"chat": Chat, "responses": Responses, "messages": Messages}
TEMPLATES = {"smollm2": SMOLLM2, "chatml with tools": CHATML, "qwen3": QWEN3}
Serve = Callable[..., LiveServer]


@pytest.fixture
def serve(serve_template: Serve) -> Serve:
    def start(template: str, **options: Any) -> LiveServer:
        engine = {"num_blocks": 4096, **options.pop("engine", {})}
        return serve_template(template, engine=engine, max_model_len=16384, **options)

    return start


def hits(session: Session, num_turns: int = NUM_TURNS) -> Iterator[tuple[int, int]]:
    """Yield of each turn from the second on: tokens of the turn before, and how many were cached."""
    before, _ = session.turn(0)
    for number in range(1, num_turns):
        num_tokens, num_cached = session.turn(number)
        yield before, num_cached
        before = num_tokens


@pytest.mark.parametrize("api", SESSIONS)
@pytest.mark.parametrize(
    ("template", "is_noisy"),
    [("chatml with tools", False), *((template, True) for template in TEMPLATES)],
)
def test_every_turn_finds_the_one_before(serve: Serve, template: str, api: str, is_noisy: bool) -> None:
    server = serve(TEMPLATES[template])
    found = list(hits(SESSIONS[api](server, is_noisy)))
    assert all(num_cached >= 0.95 * before for before, num_cached in found), found
    # The same conversation begins with the same tokens, whatever it says beside them.
    num_tokens, num_cached = SESSIONS[api](server, not is_noisy).turn(0)
    assert num_cached >= num_tokens - 4
    server.assert_drained()


@pytest.mark.parametrize("api", SESSIONS)
def test_the_step_can_be_switched_off(serve: Serve, api: str) -> None:
    server = serve(CHATML, canonical_prompts=False)
    found = list(hits(SESSIONS[api](server, is_noisy=True), 3))
    assert all(num_cached < 0.5 * before for before, num_cached in found), found


@pytest.mark.parametrize("api", SESSIONS)
def test_a_conversation_that_stops_hitting_is_logged_once(
    serve: Serve, api: str, caplog: pytest.LogCaptureFixture
) -> None:
    server = serve(SMOLLM2, canonical_prompts=False, log_prompt_excerpts=True)
    with caplog.at_level(logging.WARNING, "octavo.server"):
        list(hits(SESSIONS[api](server, is_noisy=False), 3))
        assert not caplog.messages
        list(hits(SESSIONS[api](server, is_noisy=True), 4))
    (told,) = [text for text in caplog.messages if "stopped hitting" in text]
    assert "version=2.1.77.' came '" in told
    assert RULES not in told
    assert len(told) < 500


def test_a_long_body_is_put_into_the_same_form_by_the_process_that_reads_it(serve: Serve) -> None:
    server = serve(CHATML)
    cached = []
    for start in ("", BILLING.format(1), BILLING.format(2)):
        messages = [{"role": "system", "content": start + "\n" + RULES if start else RULES}, *HI]
        body = {"messages": messages, "max_tokens": 1, "metadata": LONG}
        usage = server.post("/v1/chat/completions", body).json()["usage"]
        cached.append(usage["prompt_tokens"] - usage["prompt_tokens_details"]["cached_tokens"])
    assert max(cached[1:]) <= 4


def test_tokenize_and_count_tokens_see_what_is_computed(serve: Serve) -> None:
    server = serve(CHATML)
    texts = [BILLING.format(7) + "\n" + RULES, RULES]
    tokens = [
        server.post(
            "/tokenize",
            {"messages": [{"role": "system", "content": text}, *HI]},
        ).json()["tokens"]
        for text in texts
    ]
    assert tokens[0] == tokens[1]
    counts = {
        server.post("/v1/messages/count_tokens", {"system": text, "messages": HI}).json()["input_tokens"]
        for text in texts
    }
    assert len(counts) == 1


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"prompt_cache_key": "k"}),
        ("/v1/chat/completions", {"prompt_cache_retention": "24h"}),
        ("/v1/responses", {"prompt_cache_key": "k"}),
        ("/v1/messages", {"cache_control": {"type": "ephemeral"}}),
        ("/v1/messages", {"system": [{"type": "text", "text": "x", "cache_control": {"type": "ephemeral"}}]}),
    ],
)
@pytest.mark.parametrize("is_long", [False, True])
def test_hints_keep_a_prompt_cached_longer(serve: Serve, path: str, body: dict, is_long: bool) -> None:
    """Of long bodies, too, which another process reads."""
    server = serve(SMOLLM2)
    pool = server.loop.engine.manager.store.pool
    is_input = path.endswith("responses")
    asked = {"input": RULES} if is_input else {"messages": [{"role": "user", "content": RULES}]}
    asked |= {("max_output_tokens" if is_input else "max_tokens"): 2} | (
        {"metadata": LONG} if is_long else {}
    )
    server.post(path, asked).raise_for_status()
    server.assert_drained()
    assert pool.num_kept == 0
    server.post(path, {**asked, **body}).raise_for_status()
    server.assert_drained()
    assert pool.num_kept >= len(RULES) // 4


def test_streams_tell_what_was_cached(serve: Serve) -> None:
    server = serve(SMOLLM2)
    ask = {"max_tokens": 2, "messages": [{"role": "user", "content": RULES}]}
    chat = ask | {"stream_options": {"include_usage": True}}
    usage = [server.events("/v1/chat/completions", chat)[-1]["usage"] for _ in range(2)][1]
    num_cached = usage["prompt_tokens_details"]["cached_tokens"]
    assert num_cached >= usage["prompt_tokens"] - 4
    for path, body, name in (
        ("/v1/messages", ask, '"cache_read_input_tokens":'),
        ("/v1/responses", {"input": RULES, "max_output_tokens": 2}, '"cached_tokens":'),
    ):
        told = server.post(path, body | {"stream": True}).text.splitlines()
        assert f"{name}{num_cached}" in next(line for line in reversed(told) if name in line)


@pytest.mark.slow
@pytest.mark.parametrize("api", SESSIONS)
def test_a_real_model_finds_its_own_answers(real: LiveServer, api: str) -> None:
    """Its answers come back as the tokens that it wrote: most of them are hits, too."""
    found = list(hits(SESSIONS[api](real, is_noisy=True)))
    assert all(num_cached >= 0.95 * before - 16 for before, num_cached in found), found
