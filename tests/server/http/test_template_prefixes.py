"""Each turn's prompt begins with the prompt of the turn before, wherever the chat template allows it.

What a template changes in what it has shown before is named here, and in docs/serving.md.
"""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from template_families import FAMILIES, HARMONY, QWEN3
from template_samples import CHATML, SMOLLM2, TEMPLATES
from tiny_chat import write_model

from octavo.engine.prompt_reader import PromptReader
from octavo.outputs import CompletionOutput
from octavo.server.api.anthropic import messages_input
from octavo.server.api.anthropic.messages_structs import MessagesRequest
from octavo.server.api.chat_answers import whole_message
from octavo.server.api.prompt_tokens import Prompts
from octavo.server.api.responses import response_input
from octavo.server.api.responses.response_structs import ResponsesRequest
from octavo.server.api.structs import ChatRequest, Tool
from octavo.server.api.tools.toolbox import Toolbox, rendered, toolbox_of
from octavo.server.parsing.formats import formats_of
from octavo.tokenizer import Tokenizer

FIND: dict[str, Any] = {
    "name": "find",
    "description": "Finds a text",
    "parameters": {"type": "object", "properties": {"text": {"type": "string"}, "most": {"type": "integer"}}},
}
TOOLS = msgspec.convert([{"type": "function", "function": FIND}], list[Tool])
ALL = {name: source for name, source in FAMILIES.items() if name not in ("loops", "ends", "marked")}
ALL |= {f"small {name}": source for name, source in TEMPLATES.items()}
# They move the tools, or the system's turn, to the last turn of the user.
MOVING = {"mistral", "small mistral"}


class Model:
    """A tokenizer of bytes with a chat template."""

    def __init__(self, folder: Path, source: str) -> None:
        vocabulary = Tokenizer.from_folder(write_model(folder)).vocabulary
        self.tokenizer = Tokenizer(replace(vocabulary, chat_templates={"default": source}))
        reader = PromptReader(
            self.tokenizer, self.tokenizer.vocab_size, max_model_len=1 << 20, num_kv_tokens=1 << 20
        )
        self.prompts = Prompts(reader)
        self.formats = formats_of(self.tokenizer, "auto", "auto")

    def prompt(
        self, messages: list[Any], *, choice: Any = "none", begins: bool = True
    ) -> tuple[str, Toolbox]:
        chat = ChatRequest(messages=messages, tools=TOOLS, tool_choice=choice, add_generation_prompt=begins)
        box = toolbox_of(chat, self.formats, None)
        text = rendered(self.prompts, chat, box).text
        return text, box.with_prompt(text)


def call(number: int) -> dict[str, Any]:
    arguments = json.dumps({"text": f'é {number} "None"\n', "most": number}, ensure_ascii=False)
    function = {"name": "find", "arguments": arguments}
    return {"id": f"call{number:05}", "type": "function", "function": function}


def conversation(*, reasons: bool = False) -> Iterator[list[dict[str, Any]]]:
    """Yield what is there when each of 12 turns begins."""
    history: list[dict[str, Any]] = [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "Hi"},
    ]
    for number in range(12):
        yield list(history)
        thought = {"reasoning_content": f"Hm {number}."} if reasons else {}
        if number % 4 == 3:
            history.append({"role": "assistant", "content": f"It is {number}.", **thought})
            history.append({"role": "user", "content": f"What else than {number}?"})
            continue
        content = None if number % 2 else "I look for it."
        history.append({"role": "assistant", "content": content, "tool_calls": [call(number)], **thought})
        history.append({"role": "tool", "tool_call_id": f"call{number:05}", "content": "None <|im_end|>"})


def turns_that_differ(model: Model, *, reasons: bool = False) -> list[int]:
    """The turns whose prompts do not begin with all that was there in the turn before."""
    found, before = [], ""
    for number, messages in enumerate(conversation(reasons=reasons)):
        text, _ = model.prompt(messages)
        if not text.startswith(before):
            found.append(number)
        # One template ends what is not to be answered.
        before = model.prompt(messages, begins=False)[0].removesuffix("<|im_end|>")
    return found


@pytest.mark.parametrize("name", [name for name in ALL if name not in MOVING])
def test_a_prompt_begins_with_the_one_before(tmp_path: Path, name: str) -> None:
    assert turns_that_differ(Model(tmp_path, ALL[name])) == []


@pytest.mark.parametrize("name", sorted(MOVING))
def test_some_templates_move_what_comes_first(tmp_path: Path, name: str) -> None:
    """It is the user's new turn that moves them."""
    assert set(turns_that_differ(Model(tmp_path, ALL[name]))) >= {4, 8}


@pytest.mark.parametrize("source", [QWEN3, HARMONY])
def test_templates_drop_earlier_reasoning_when_the_user_speaks(tmp_path: Path, source: str) -> None:
    assert set(turns_that_differ(Model(tmp_path, source), reasons=True)) <= {4, 5, 8, 9}


WRITTEN = [
    "I look.\n<tool_call>\n{0}\n</tool_call>",
    "<tool_call>\n{0}\n</tool_call>",
    "It is there.",
    "Über 😀\n\n* a list\n",
    "<think>\nHm.\n</think>\n\n<tool_call>\n{0}\n</tool_call>",
]


@pytest.mark.parametrize(
    ("source", "written"),
    [(SMOLLM2, written) for written in WRITTEN[:-1]] + [(QWEN3, written) for written in WRITTEN],
)
def test_an_answer_comes_back_as_it_was_written(tmp_path: Path, source: str, written: str) -> None:
    """In the form that the template teaches: then the next prompt goes on with the answer's own tokens."""
    model = Model(tmp_path, source)
    arguments = json.loads(call(1)["function"]["arguments"])
    text = written.format(json.dumps({"name": "find", "arguments": arguments}, ensure_ascii=False))
    (before, box) = model.prompt(start := next(conversation()), choice="auto")
    ids = model.tokenizer.encode(text, add_special_tokens=False)
    completion = CompletionOutput(index=0, text=text, token_ids=ids, finish_reason="stop")
    message, _ = whole_message(completion, box.reader(), parallel=True)
    answer = msgspec.json.decode(msgspec.json.encode(message))
    calls = answer.get("tool_calls", [])
    told = [{"role": "tool", "tool_call_id": one["id"], "content": "x"} for one in calls]
    after, _ = model.prompt([*start, answer, *(told or start[1:])], choice="auto")
    assert after.startswith(before + text.rstrip())


def test_all_apis_render_a_conversation_alike(tmp_path: Path) -> None:
    for messages in conversation(reasons=True):
        texts = [
            Model(tmp_path, source).prompt(each)[0]
            for source in (QWEN3, CHATML)
            for each in (
                messages,
                [message | {"content": message["content"] or ""} for message in messages],
                [message | {"name": None, "refusal": None} for message in messages],
                response_input.chat_of(msgspec.convert(as_response(messages), ResponsesRequest)).messages,
                messages_input.chat_of(msgspec.convert(as_messages(messages), MessagesRequest)).messages,
            )
        ]
        assert len(set(texts)) == 2


def as_response(messages: list[dict[str, Any]]) -> dict[str, Any]:
    items: list[dict[str, Any]] = []
    for message in messages[1:]:
        if message["role"] == "tool":
            output = {"call_id": message["tool_call_id"], "output": message["content"]}
            items.append({"type": "function_call_output", **output})
            continue
        if "reasoning_content" in message:
            text = {"type": "reasoning_text", "text": message["reasoning_content"]}
            items.append({"type": "reasoning", "summary": [], "content": [text]})
        if message["content"]:
            items.append({"role": message["role"], "content": message["content"]})
        for one in message.get("tool_calls", ()):
            items.append({"type": "function_call", "call_id": one["id"], **one["function"]})
    return {"instructions": messages[0]["content"], "input": items}


def as_messages(messages: list[dict[str, Any]]) -> dict[str, Any]:
    turns: list[dict[str, Any]] = []
    for message in messages[1:]:
        if message["role"] == "tool":
            result = {"tool_use_id": message["tool_call_id"], "content": message["content"]}
            turns.append({"role": "user", "content": [{"type": "tool_result", **result}]})
            continue
        blocks: list[dict[str, Any]] = []
        if "reasoning_content" in message:
            blocks.append({"type": "thinking", "thinking": message["reasoning_content"], "signature": ""})
        if message["content"]:
            blocks.append({"type": "text", "text": message["content"]})
        for one in message.get("tool_calls", ()):
            arguments = json.loads(one["function"]["arguments"])
            blocks.append({"type": "tool_use", "id": one["id"], "name": "find", "input": arguments})
        turns.append({"role": message["role"], "content": blocks})
    return {"system": messages[0]["content"], "messages": turns, "max_tokens": 1}
