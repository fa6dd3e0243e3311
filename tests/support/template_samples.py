"""Chat templates in the style of common model families, and conversations to render with them."""

from datetime import datetime
from types import ModuleType

import pytest


def transformers_at(now: datetime, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Transformers' module of chat templates, whose clock stands still."""
    from transformers.utils import chat_template_utils

    class FixedClock(datetime):
        @classmethod
        def now(cls, tz=None):
            return now

    monkeypatch.setattr(chat_template_utils, "datetime", FixedClock)
    return chat_template_utils


SMOLLM2 = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful AI assistant named SmolLM, "
    "trained by Hugging Face<|im_end|>\n' }}"
    "{% endif %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CHATML = """\
{%- macro turn(role, content) %}
{{- '<|im_start|>' ~ role ~ '\\n' ~ content|trim ~ '<|im_end|>\\n' }}
{%- endmacro %}
{%- if tools %}
    {{- '<|im_start|>system\\n# Tools\\n' }}
    {%- for tool in tools %}
    {{- tool | tojson ~ '\\n' }}
    {%- endfor %}
    {{- tools | tojson(indent=2) | indent(4) }}
    {{- '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(last_user=-1, multi=true) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi and message.role == 'user' %}
        {%- set ns.multi = false %}
        {%- set ns.last_user = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == 'assistant' and message.tool_calls %}
        {{- '<|im_start|>assistant' }}
        {%- for call in message.tool_calls %}
            {%- set function = call.function if call.function is defined else call %}
            {{- '\\n<tool_call>\\n{"name": "' ~ function.name ~ '", "arguments": ' }}
            {{- function.arguments | tojson }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif '</think>' in message.content and loop.index0 < ns.last_user %}
        {{- turn(message.role, message.content.split('</think>')[-1].lstrip('\\n')) }}
    {%- else %}
        {{- turn(message.role, message.content) }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""
LLAMA3 = """\
{{- bos_token }}
{% if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{% else %}
    {%- set system_message = "" %}
{% endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{{- "Today Date: " + (date_string if date_string is defined else strftime_now("%d %b %Y")) + "\\n\\n" }}
{{- system_message + "<|eot_id|>" }}
{% for message in messages %}
    {% if not (message.role == 'tool' or 'tool_calls' in message) %}
{{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
{{- message['content'] | trim + '<|eot_id|>' }}
    {% elif 'tool_calls' in message %}
        {%- if not message.tool_calls|length == 1 %}
            {{- raise_exception("This model only supports single tool-calls at once!") }}
        {%- endif %}
        {%- for key, value in message.tool_calls[0].function.arguments.items() %}
            {{- key + '="' ~ value ~ '"' }}
            {%- if not loop.last %}{{- ", " }}{% endif %}
        {%- endfor %}
    {% else %}
        {%- if message.content is mapping or message.content is iterable and message.content is not string %}
            {{- message.content | tojson }}
        {%- else %}
            {{- message.content }}
        {%- endif %}
    {% endif %}
{% endfor %}
{% if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}
"""
MISTRAL = """\
{%- set system_message = messages[0].content if messages[0].role == 'system' else none %}
{%- set loop_messages = messages[1:] if system_message is not none else messages %}
{{ bos_token }}{% for message in loop_messages %}
{%- if message['role'] not in ['user', 'assistant', 'tool'] %}
{{- raise_exception('Only user and assistant roles are supported, got ' + message.role) }}
{%- elif message['role'] == 'user' %}
{%- if loop.last and system_message %}
{{- ' [INST] ' + system_message + '\\n\\n' + message.content + ' [/INST]' }}
{%- else %}{{ ' [INST] ' + message.content + ' [/INST]' }}{% endif %}
{%- else %}{{ ' ' + (message.content or '') | replace('\\r\\n', '\\n') + eos_token }}{% endif %}
{%- endfor %}
"""
GEMMA = """\
{{ bos_token }}{% for message in messages %}{% if message['role'] == 'assistant' %}{% set role = 'model' %}
{% else %}{% set role = message['role']|upper|lower %}{% endif %}
{{ '<start_of_turn>' + role + '\\n' + ([message['content'] or '', loop.index, true, none, 0.5]|join('|')) }}
<end_of_turn>
{% generation %}{{ message.name|default('nobody', true)|title }}{% endgeneration %}
{% endfor %}{% if add_generation_prompt %}{{'<start_of_turn>model\n'}}{% endif %}"""
TEMPLATES = {"smollm2": SMOLLM2, "chatml": CHATML, "llama3": LLAMA3, "mistral": MISTRAL, "gemma": GEMMA}

CALL = {
    "type": "function",
    "id": "a",
    "function": {"name": "weather", "arguments": {"city": "Zürich", "days": 2}},
}
TOOL = {
    "type": "function",
    "function": {"name": "weather", "description": "<b>It's & wet</b>", "x": [1, 0.5, None]},
}
CONVERSATIONS = {
    "one": [{"role": "user", "content": "Hi <there> & 'you' \"all\"\n"}],
    "system": [{"role": "system", "content": " Be brief. "}, {"role": "user", "content": "Why?"}],
    "turns": [
        {"role": "user", "content": "你好 😀"},
        {"role": "assistant", "content": "<think>\nhm\n</think>\n\nHello"},
        {"role": "user", "content": "", "name": "ann lee"},
        {"role": "assistant", "content": "  {{ 7 * 7 }} {% raw %}\r\n"},
        {"role": "user", "content": "And?"},
    ],
    "tools": [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "content": '{"temperature": 20}', "tool_call_id": "a"},
    ],
    "two calls": [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": "", "tool_calls": [CALL, CALL]},
    ],
}
