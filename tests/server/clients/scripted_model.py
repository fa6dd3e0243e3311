"""A tiny random model for agents: a context of 128k tokens, words as tokens, a template with tools."""

import json
from pathlib import Path

import tokenizers
from tiny_model import TINY_LLAMA
from tokenizers import decoders, models, pre_tokenizers, trainers

ROOT = Path(__file__).parents[3]
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TURN_END = 2
ASSISTANT = "<|im_start|>assistant\n"
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


def write_scripted_model(folder: Path) -> Path:
    """Write the model's files, without weights; its tokenizer has learned from the documents."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=4096,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train(sorted(str(path) for path in ROOT.glob("docs/*.md")), trainer)
    backend.save(str(folder / "tokenizer.json"))
    config = {"eos_token": "<|im_end|>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    sizes = {"vocab_size": backend.get_vocab_size(), "max_position_embeddings": 2**17, "bos_token_id": 0}
    (folder / "config.json").write_text(json.dumps({**TINY_LLAMA, **sizes, "eos_token_id": TURN_END}))
    return folder
