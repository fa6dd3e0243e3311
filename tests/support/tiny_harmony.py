"""The tiny chat model with gpt-oss's special tokens, and a chat template like its own."""

import json
from pathlib import Path

import tokenizers
from tiny_chat import write_model

PIECES = ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|return|>", "<|call|>")
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 4}, "unit": {"enum": ["C", "F"]}},
            "required": ["city", "unit"],
            "additionalProperties": False,
        },
    },
}
TEMPLATE = """\
{%- set last_call = namespace(name=none) -%}
{{- "<|start|>system<|message|>You are a model.\\nReasoning: " + (reasoning_effort or "medium") -}}
{{- "\\n# Valid channels: analysis, commentary, final.<|end|>" -}}
{%- if tools -%}
  {{- "<|start|>developer<|message|># Tools\\n\\nnamespace functions {\\n" -}}
  {%- for tool in tools -%}
    {{- "// " + tool.function.description + "\\n" -}}
    {{- "type " + tool.function.name + " = (_: " + (tool.function.parameters | tojson) + ") => any;\\n" -}}
  {%- endfor -%}
  {{- "}<|end|>" -}}
{%- endif -%}
{%- for message in messages -%}
  {%- if message.role == "assistant" -%}
    {%- if "content" in message and "<|channel|>" in message.content -%}
      {{- raise_exception("markup in the content") -}}
    {%- endif -%}
    {%- if "tool_calls" in message -%}
      {%- if message.content and message.thinking -%}
        {{- raise_exception("Cannot pass both content and thinking beside tool calls") -}}
      {%- elif message.thinking or message.content -%}
        {%- set thought = message.thinking or message.content -%}
        {{- "<|start|>assistant<|channel|>analysis<|message|>" + thought + "<|end|>" -}}
      {%- endif -%}
      {%- set call = message.tool_calls[0].function -%}
      {{- "<|start|>assistant to=functions." + call.name + "<|channel|>commentary json<|message|>" -}}
      {{- call.arguments | tojson -}}
      {{- "<|call|>" -}}
      {%- set last_call.name = call.name -%}
    {%- elif loop.last and not add_generation_prompt -%}
      {%- if "thinking" in message -%}
        {{- "<|start|>assistant<|channel|>analysis<|message|>" + message.thinking + "<|end|>" -}}
      {%- endif -%}
      {{- "<|start|>assistant<|channel|>final<|message|>" + message.content + "<|return|>" -}}
    {%- else -%}
      {{- "<|start|>assistant<|channel|>final<|message|>" + message.content + "<|end|>" -}}
    {%- endif -%}
  {%- elif message.role == "tool" -%}
    {%- if last_call.name is none -%}{{- raise_exception("no call before this") -}}{%- endif -%}
    {{- "<|start|>functions." + last_call.name + " to=assistant<|channel|>commentary<|message|>" -}}
    {{- message.content | tojson + "<|end|>" -}}
  {%- else -%}
    {{- "<|start|>" + message.role + "<|message|>" + message.content + "<|end|>" -}}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- "<|start|>assistant" -}}{%- endif -%}
"""


def write_harmony_model(folder: Path) -> Path:
    """Write the model's files, without weights."""
    write_model(folder, max_model_len=4096)
    backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    backend.add_special_tokens(list(PIECES))
    backend.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|return|>"}))
    ends = [backend.token_to_id(piece) for piece in ("<|return|>", "<|endoftext|>", "<|call|>")]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    config = json.loads((folder / "config.json").read_text())
    sizes = {"vocab_size": backend.get_vocab_size(), "eos_token_id": ends[0]}
    (folder / "config.json").write_text(json.dumps(config | sizes))
    return folder
