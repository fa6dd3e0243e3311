"""A tiny random model for agents: a context of 128k tokens, words as tokens, a template with tools."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tiny_harmony
import tokenizers
from tiny_model import TINY_LLAMA
from tokenizers import decoders, models, pre_tokenizers, trainers

ROOT = Path(__file__).parents[3]
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
# Tools, calls and results as Qwen3 writes them.
TEMPLATE = """\
{%- set first = messages[0].content if messages[0].role == "system" else "" -%}
{%- if tools -%}
  {{- "<|im_start|>system\\n" + first + "\\n\\n# Tools\\n" -}}
  {%- for tool in tools -%}{{- tool | tojson + "\\n" -}}{%- endfor -%}
  {{- "<|im_end|>\\n" -}}
{%- elif first -%}
  {{- "<|im_start|>system\\n" + first + "<|im_end|>\\n" -}}
{%- endif -%}
{%- for message in messages -%}
  {%- if message.role == "tool" -%}
    {%- if loop.previtem.role != "tool" -%}{{- "<|im_start|>user" -}}{%- endif -%}
    {{- "\\n<tool_response>\\n" + message.content + "\\n</tool_response>" -}}
    {%- if loop.last or loop.nextitem.role != "tool" -%}{{- "<|im_end|>\\n" -}}{%- endif -%}
  {%- elif message.role == "assistant" -%}
    {{- "<|im_start|>assistant\\n" -}}
    {%- if message.reasoning_content -%}
      {{- "<think>\\n" + message.reasoning_content + "\\n</think>\\n\\n" -}}
    {%- endif -%}
    {{- message.content or "" -}}
    {%- for call in message.tool_calls or [] -%}
      {%- if message.content or not loop.first -%}{{- "\\n" -}}{%- endif -%}
      {{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' -}}
      {{- call.function.arguments | tojson + "}\\n</tool_call>" -}}
    {%- endfor -%}
    {{- "<|im_end|>\\n" -}}
  {%- elif not (loop.first and message.role == "system") -%}
    {{- "<|im_start|>" + message.role + "\\n" + message.content + "<|im_end|>\\n" -}}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- "<|im_start|>assistant\\n" -}}{%- endif -%}
"""


@dataclass(frozen=True)
class Form:
    """How a model writes.

    Attributes:
        special: its special tokens; ends: those that end a turn.
        template: writes history as the model would have written it.
        write: writes a turn.
        number: how many turns stand in a prompt.
        has_one_call: a turn ends after one call.
    """

    special: tuple[str, ...]
    ends: tuple[str, ...]
    template: str
    write: Callable[[Mapping[str, Any]], str]
    number: Callable[[str], int]
    has_one_call: bool = False


def _qwen(turn: Mapping[str, Any]) -> str:
    thought = f"<think>\n{turn['thought']}\n</think>\n\n" if "thought" in turn else ""
    calls = [json.dumps(call, ensure_ascii=False) for call in turn.get("calls", ())]
    parts = [turn.get("text", ""), *(f"<tool_call>\n{call}\n</tool_call>" for call in calls)]
    return thought + "\n".join(part for part in parts if part) + "<|im_end|>"


def _harmony(turn: Mapping[str, Any]) -> str:
    thought = turn.get("thought", "")
    said = f"<|channel|>analysis<|message|>{thought}<|end|><|start|>assistant" if thought else ""
    for call in turn.get("calls", ()):
        arguments = json.dumps(call["arguments"], ensure_ascii=False)
        head = f"<|channel|>commentary to=functions.{call['name']} <|constrain|>json<|message|>"
        return f"{said}{head}{arguments}<|call|>"
    return f"{said}<|channel|>final<|message|>{turn['text']}<|return|>"


FORMS = {
    "qwen": Form(
        SPECIAL, ("<|im_end|>",), TEMPLATE, _qwen, lambda prompt: prompt.count("<|im_start|>assistant\n") - 1
    ),
    "harmony": Form(
        ("<|endoftext|>", *tiny_harmony.PIECES),
        ("<|return|>", "<|call|>"),
        tiny_harmony.TEMPLATE,
        _harmony,
        lambda prompt: prompt.count("<|start|>functions.") + prompt.count("<|channel|>final<"),
        has_one_call=True,
    ),
}


def write_scripted_model(folder: Path, form: Form) -> Path:
    """Write the model's files, without weights; its tokenizer has learned from the documents."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=4096,
        special_tokens=list(form.special),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train(sorted(str(path) for path in ROOT.glob("docs/*.md")), trainer)
    backend.save(str(folder / "tokenizer.json"))
    config = {"eos_token": form.ends[0], "chat_template": form.template}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    sizes = {"vocab_size": backend.get_vocab_size(), "max_position_embeddings": 2**17, "bos_token_id": 0}
    ends = [backend.token_to_id(end) for end in form.ends]
    (folder / "config.json").write_text(json.dumps({**TINY_LLAMA, **sizes, "eos_token_id": ends}))
    return folder
