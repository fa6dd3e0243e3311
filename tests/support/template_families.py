"""Chat templates of our own, each with what the templates of one family of models do."""

# Templates have long lines.
# ruff: noqa: E501, RUF001

LLAMA4 = """{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}
    {%- if messages[0]['content'] is string %}{%- set head = messages[0]['content']|trim %}
    {%- else %}{%- set head = messages[0]['content'][0]['text']|trim %}{%- endif %}
    {%- set messages = messages[1:] %}
{%- else %}{%- set head = "" %}{%- endif %}
{%- if tools is not none and not tools_in_user_message %}
    {{- "<|header|>system<|end|>\\n\\nEnvironment: ipython\\n" + head }}
    {%- for t in tools %}{{- t | tojson(indent=4) }}{{- "\\n\\n" }}{%- endfor %}
{%- elif head %}{{- head + "<|eot|>" }}{%- endif %}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
    {{- '<|header|>' + message['role'] + '<|end|>\\n\\n' }}{{- message['content'] }}{{- "<|eot|>" }}
    {%- elif 'tool_calls' in message and message.tool_calls|length > 0 %}
        {%- for tool_call in message.tool_calls %}
            {%- if tool_call.function.arguments is mapping %}
            {{- '[' ~ tool_call.function.name ~ '(' }}
            {%- for k, v in tool_call.function.arguments | items %}{{- k ~ '=' ~ (v|tojson) ~ (", " if not loop.last else "") }}{%- endfor %}
            {{- ')]' }}{%- endif %}
        {%- endfor %}<|eom|>
    {%- elif message.role == "tool" or message.role == "ipython" %}
        {%- if message.content is mapping or (message.content is iterable and message.content is not string) %}
            {{- message.content | tojson }}
        {%- else %}{{- {"output": message.content} | tojson }}{%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|header|>assistant<|end|>\\n\\n' }}{%- endif %}
"""
MISTRAL = """{%- if messages[0]["role"] == "system" %}
    {%- set system_message = messages[0]["content"] %}{%- set loop_messages = messages[1:] %}
{%- else %}{%- set loop_messages = messages %}{%- endif %}
{%- if not tools is defined %}{%- set tools = none %}{%- endif %}
{%- set user_messages = loop_messages | selectattr("role", "equalto", "user") | list %}
{%- set ns = namespace(index=0) %}
{%- for message in loop_messages %}
    {%- if not (message.role == "tool" or (message.tool_calls is defined and message.tool_calls is not none)) %}
        {%- if (message["role"] == "user") != (ns.index % 2 == 0) %}
            {{- raise_exception("roles must alternate, got " ~ message.role ~ " at " ~ ns.index) }}
        {%- endif %}{%- set ns.index = ns.index + 1 %}
    {%- endif %}
{%- endfor %}
{{- bos_token }}
{%- for message in loop_messages %}
    {%- if message["role"] == "user" %}
        {%- if tools is not none and (message == user_messages[-1]) %}
            {{- "[AVAILABLE_TOOLS][" }}
            {%- for tool in tools %}
                {%- set tool = tool.function %}
                {{- '{"type": "function", "function": {' }}
                {%- for key, val in tool.items() if key != "return" %}
                    {%- if val is string %}{{- '"' + key + '": "' + val + '"' }}
                    {%- else %}{{- '"' + key + '": ' + val|tojson }}{%- endif %}
                    {%- if not loop.last %}{{- ", " }}{%- endif %}
                {%- endfor %}
                {{- "}}" }}
                {%- if not loop.last %}{{- ", " }}{%- else %}{{- "]" }}{%- endif %}
            {%- endfor %}{{- "[/AVAILABLE_TOOLS]" }}
        {%- endif %}
        {%- if loop.last and system_message is defined %}{{- "[INST]" + system_message + "\\n\\n" + message["content"] + "[/INST]" }}
        {%- else %}{{- "[INST]" + message["content"] + "[/INST]" }}{%- endif %}
    {%- elif message.tool_calls is defined and message.tool_calls is not none %}
        {{- "[TOOL_CALLS][" }}
        {%- for tool_call in message.tool_calls %}
            {%- set out = tool_call.function|tojson %}{{- out[:-1] }}
            {%- if not tool_call.id is defined or tool_call.id|length != 9 %}{{- raise_exception("ids have 9 characters") }}{%- endif %}
            {{- ', "id": "' + tool_call.id + '"}' }}
            {%- if not loop.last %}{{- ", " }}{%- else %}{{- "]" + eos_token }}{%- endif %}
        {%- endfor %}
    {%- elif message["role"] == "assistant" %}{{- message["content"] + eos_token }}
    {%- elif message["role"] == "tool" or message["role"] == "tool_results" %}
        {%- if message.content is defined and message.content.content is defined %}{%- set content = message.content.content %}
        {%- else %}{%- set content = message.content %}{%- endif %}
        {{- '[TOOL_RESULTS]{"content": ' + content|string + ", " }}{{- '"call_id": "' + message.tool_call_id + '"}[/TOOL_RESULTS]' }}
    {%- else %}{{- raise_exception("Only user and assistant roles are supported!") }}{%- endif %}
{%- endfor %}"""
QWEN3 = """{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
    {{- "# Tools\\n<tools>" }}{%- for tool in tools %}{{- "\\n" }}{{- tool | tojson }}{%- endfor %}{{- "\\n</tools><|im_end|>\\n" }}
{%- elif messages[0].role == 'system' %}{{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}{%- endif %}
{%- set ns = namespace(multi_step_tool=true, last_query_index=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi_step_tool and message.role == "user" and message.content is string and not(message.content.startswith('<tool_response>') and message.content.endswith('</tool_response>')) %}
        {%- set ns.multi_step_tool = false %}{%- set ns.last_query_index = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.content is string %}{%- set content = message.content %}{%- else %}{%- set content = '' %}{%- endif %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {%- set reasoning_content = '' %}
        {%- if message.reasoning_content is string %}{%- set reasoning_content = message.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set reasoning_content = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {%- if loop.index0 > ns.last_query_index and (loop.last or (not loop.last and reasoning_content)) %}
            {{- '<|im_start|>' + message.role + '\\n<think>\\n' + reasoning_content.strip('\\n') + '\\n</think>\\n\\n' + content.lstrip('\\n') }}
        {%- else %}{{- '<|im_start|>' + message.role + '\\n' + content }}{%- endif %}
        {%- if message.tool_calls %}
            {%- for tool_call in message.tool_calls %}
                {%- if (loop.first and content) or (not loop.first) %}{{- '\\n' }}{%- endif %}
                {%- if tool_call.function %}{%- set tool_call = tool_call.function %}{%- endif %}
                {{- '<tool_call>\\n{"name": "' }}{{- tool_call.name }}{{- '", "arguments": ' }}
                {%- if tool_call.arguments is string %}{{- tool_call.arguments }}{%- else %}{{- tool_call.arguments | tojson }}{%- endif %}
                {{- '}\\n</tool_call>' }}
            {%- endfor %}
        {%- endif %}{{- '<|im_end|>\\n' }}
    {%- elif message.role == "tool" %}
        {%- if loop.first or (messages[loop.index0 - 1].role != "tool") %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\\n<tool_response>\\n' }}{{- content }}{{- '\\n</tool_response>' }}
        {%- if loop.last or (messages[loop.index0 + 1].role != "tool") %}{{- '<|im_end|>\\n' }}{%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}"""
GEMMA3 = """{{ bos_token }}
{%- if messages[0]['role'] == 'system' -%}
    {%- if messages[0]['content'] is string -%}{%- set first_user_prefix = messages[0]['content'] + '\\n\\n' -%}
    {%- else -%}{%- set first_user_prefix = messages[0]['content'][0]['text'] + '\\n\\n' -%}{%- endif -%}
    {%- set loop_messages = messages[1:] -%}
{%- else -%}{%- set first_user_prefix = "" -%}{%- set loop_messages = messages -%}{%- endif -%}
{%- for message in loop_messages -%}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}{{ raise_exception("Conversation roles must alternate") }}{%- endif -%}
    {%- set role = "model" if (message['role'] == 'assistant') else message['role'] -%}
    {{ '<start_of_turn>' + role + '\\n' + (first_user_prefix if loop.first else "") }}
    {%- if message['content'] is string -%}{{ message['content'] | trim }}
    {%- elif message['content'] is iterable -%}
        {%- for item in message['content'] -%}{%- if item['type'] == 'image' -%}{{ '<image>' }}{%- elif item['type'] == 'text' -%}{{ item['text'] | trim }}{%- endif -%}{%- endfor -%}
    {%- else -%}{{ raise_exception("Invalid content type") }}{%- endif -%}
    {{ '<end_of_turn>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{'<start_of_turn>model\\n'}}{%- endif -%}
"""
PHI4 = "{% for message in messages %}{% if message['role'] == 'system' and 'tools' in message and message['tools'] is not none %}{{ '<|' + message['role'] + '|>' + message['content'] + '<|tool|>' + message['tools'] + '<|/tool|>' + '<|end|>' }}{% else %}{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% else %}{{ eos_token }}{% endif %}"
DEEPSEEK = """{% if not add_generation_prompt is defined %}{% set add_generation_prompt = false %}{% endif %}{% set ns = namespace(is_first=false, is_tool=false, is_output_first=true, system_prompt='', is_first_sp=true) %}
{%- for message in messages %}{%- if message['role'] == 'system' %}{%- if ns.is_first_sp %}{% set ns.system_prompt = ns.system_prompt + message['content'] %}{% set ns.is_first_sp = false %}{%- else %}{% set ns.system_prompt = ns.system_prompt + '\\n\\n' + message['content'] %}{%- endif %}{%- endif %}{%- endfor %}{{ bos_token }}{{ ns.system_prompt }}
{%- for message in messages %}
{%- if message['role'] == 'user' %}{%- set ns.is_tool = false -%}{{'<｜User｜>' + message['content']}}{%- endif %}
{%- if message['role'] == 'assistant' and 'tool_calls' in message %}{%- set ns.is_tool = false -%}
{%- for tool in message['tool_calls'] %}{%- if loop.first %}{{'<｜Assistant｜><｜tool▁calls▁begin｜>'}}{%- endif %}{{'<｜tool▁call▁begin｜>' + tool['type'] + '<｜tool▁sep｜>' + tool['function']['name'] + '\\n```json\\n' + tool['function']['arguments']|tojson + '\\n```'}}{%- endfor %}
{%- elif message['role'] == 'assistant' %}{% set content = message['content'] %}{% if '</think>' in content %}{% set content = content.split('</think>')[-1] %}{% endif %}{{'<｜Assistant｜>' + content + '<｜end▁of▁sentence｜>'}}{%- endif %}
{%- if message['role'] == 'tool' %}{%- set ns.is_tool = true -%}{%- if ns.is_output_first %}{{'<｜tool▁outputs▁begin｜>' + message['content']}}{%- set ns.is_output_first = false %}{%- else %}{{'\\n' + message['content']}}{%- endif %}{%- endif %}
{%- endfor -%}
{% if add_generation_prompt and not ns.is_tool %}{{'<｜Assistant｜><think>\\n'}}{% endif %}"""
COMMAND_R = """{{ bos_token }}{% if messages[0]['role'] == 'system' %}{% set loop_messages = messages[1:] %}{% set system_message = messages[0]['content'] %}{% elif false == true %}{% set loop_messages = messages %}{% else %}{% set loop_messages = messages %}{% set system_message = false %}{% endif %}
{%- macro document_turn(documents) -%}
{%- for doc in documents %}{{ '\\nDocument: ' ~ loop.index0 ~ '\\n' }}{%- for k, v in doc.items() %}{{ k|title ~ ': ' ~ v ~ ('' if loop.last else '; ') }}{%- endfor %}{%- endfor %}
{%- endmacro %}
{%- macro json_type(t) %}{% if t == 'string' %}str{% elif t in ['integer', 'number'] %}{{ {'integer': 'int', 'number': 'float'}[t] }}{% elif t is iterable and t is not string %}Union[{% for x in t %}{{ json_type(x) }}{{ ', ' if not loop.last }}{% endfor %}]{% else %}{{ t|default('Any', true)|string|capitalize }}{% endif %}{% endmacro %}
{%- for tool in tools or [] %}
def {{ tool.function.name }}({% for name, p in tool.function.parameters.properties|dictsort %}{{ name }}: {{ json_type(p.type) }}{{ ' = ' ~ p.default if p.default is defined }}{{ ', ' if not loop.last }}{% endfor %}) -> List[Dict]:
    \"\"\"{{ tool.function.description|wordwrap(30)|indent(4) }}
    \"\"\"
{%- endfor %}
{{- document_turn(documents) if documents else 'no documents' }}
{% if system_message != false %}{{ '<|SYSTEM|>' + system_message }}{% endif %}
{%- for message in loop_messages %}{% set content = message['content'] %}
{%- if message['role'] == 'user' %}{{ '<|USER|>' + content.strip() }}{% elif message['role'] == 'assistant' %}{{ '<|CHATBOT|>' + (content or '').strip() }}
{%- if message.tool_calls %}{{ '\\nAction: ```json\\n[\\n' }}{% for c in message.tool_calls %}{{ {'tool_name': c.function.name, 'parameters': c.function.arguments}|tojson(indent=4)|indent(4, first=true) }}{{ ',\\n' if not loop.last }}{% endfor %}{{ '\\n]```' }}{% endif %}
{%- elif message['role']|lower == 'tool' %}{{ '<results>' ~ (message['content']|replace('\\n', ' ')|truncate(20)) ~ '</results>' }}{% endif %}{% endfor %}"""
HARMONY = """{%- macro render_typescript_type(spec, required=[], is_nullable=false) -%}
    {%- if spec.type == "array" -%}{{ render_typescript_type(spec['items'], required) ~ "[]" }}
    {%- elif spec.type is defined and spec.type is iterable and spec.type is not string and spec.type is not mapping and spec.type[0] is defined -%}{{ spec.type | join(" | ") }}
    {%- elif spec.enum -%}{{ '"' + spec.enum|join('" | "') + '"' }}
    {%- elif spec.type == "object" and spec.properties -%}
        {{- "{\\n" }}{%- for name, s in spec.properties.items() -%}{{ name }}{% if name not in (spec.required or []) %}?{% endif %}{{- ": " }}{{ render_typescript_type(s, spec.required or []) }}
        {%- if s.default is defined -%}{{- ", // default: " ~ (s.default|tojson if s.default is not number else s.default|string) }}{%- endif -%}
        {%- if not loop.last -%}{{ "," }}{%- endif -%}{{- "\\n" }}{%- endfor -%}{{- "}" }}
    {%- else -%}{{- {"integer": "number", "boolean": "boolean"}.get(spec.type, "any") }}{%- endif -%}
    {%- if is_nullable %}{{- " | null" }}{%- endif -%}
{%- endmacro -%}
{{- "<|start|>system<|message|>Knowledge cutoff: 2024-06\\nCurrent date: " + strftime_now("%Y-%m-%d") + "\\n\\n" }}
{%- if reasoning_effort is not defined %}{%- set reasoning_effort = "medium" %}{%- endif %}{{- "Reasoning: " + reasoning_effort + "<|end|>" }}
{%- if messages[0].role == "developer" or messages[0].role == "system" %}{%- set developer_message = messages[0].content %}{%- set loop_messages = messages[1:] %}{%- else %}{%- set developer_message = "" %}{%- set loop_messages = messages %}{%- endif %}
{%- if developer_message or tools %}{{- "<|start|>developer<|message|>" }}{%- if developer_message %}{{- "# Instructions\\n\\n" + developer_message }}{%- endif %}
{%- for tool in tools or [] %}{%- set tool = tool.function %}{{- "// " + tool.description + "\\ntype " + tool.name + " = (_: " + render_typescript_type(tool.parameters) + ") => any;\\n" }}{%- endfor %}{{- "<|end|>" }}{%- endif %}
{%- set last_tool_call = namespace(name=none) %}
{%- for message in loop_messages -%}
    {%- if message.role == 'assistant' -%}
        {%- if "content" in message and "<|channel|>" in (message.content or '') %}{{- raise_exception("a channel in the content") }}{%- endif %}
        {%- if "tool_calls" in message %}
            {%- set future = namespace(found=false) %}{%- for m in loop_messages[loop.index:] %}{%- if m.role == 'assistant' and "tool_calls" not in m %}{%- set future.found = true %}{%- endif %}{%- endfor %}
            {%- if message.thinking and not future.found %}{{- "<|start|>assistant<|channel|>analysis<|message|>" + message.thinking + "<|end|>" }}{%- endif %}
            {%- set call = message.tool_calls[0].function %}{{- "<|start|>assistant to=functions." ~ call.name ~ "<|channel|>commentary json<|message|>" }}{{- call.arguments|tojson }}{{- "<|call|>" }}{%- set last_tool_call.name = call.name %}
        {%- elif loop.last and not add_generation_prompt %}{{- "<|start|>assistant<|channel|>final<|message|>" + message.content + "<|return|>" }}
        {%- else %}{{- "<|start|>assistant<|channel|>final<|message|>" + message.content + "<|end|>" }}{%- set last_tool_call.name = none %}{%- endif %}
    {%- elif message.role == 'tool' -%}
        {%- if last_tool_call.name is none %}{{- raise_exception("a result without a call") }}{%- endif %}
        {{- "<|start|>functions." + last_tool_call.name }}{{- " to=assistant<|channel|>commentary<|message|>" + message.content|tojson + "<|end|>" }}
    {%- elif message.role == 'user' -%}{{- "<|start|>user<|message|>" + message.content + "<|end|>" }}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}<|start|>assistant{%- endif -%}"""
GLM = """[gMASK]<sop>
{%- if tools -%}<|system|>
{% for tool in tools %}{{ tool | tojson(ensure_ascii=False) }}
{% endfor %}{%- endif -%}
{%- macro visible_text(content) -%}{%- if content is string -%}{{- content }}{%- elif content is iterable and content is not mapping -%}{%- for item in content -%}{%- if item is mapping and item.type == 'text' -%}{{- item.text }}{%- elif item is string -%}{{- item }}{%- endif -%}{%- endfor -%}{%- else -%}{{- content }}{%- endif -%}{%- endmacro -%}
{%- set ns = namespace(last_user_index=-1) %}{%- for m in messages %}{%- if m.role == 'user' %}{% set ns.last_user_index = loop.index0 -%}{%- endif %}{%- endfor %}
{% for m in messages %}
{%- if m.role == 'user' -%}<|user|>
{{ visible_text(m.content) }}{{- '/nothink' if (enable_thinking is defined and not enable_thinking and not visible_text(m.content).endswith("/nothink")) else '' -}}
{%- elif m.role == 'assistant' -%}<|assistant|>{%- set reasoning_content = '' %}{%- set content = visible_text(m.content) %}
{%- if m.reasoning_content is string %}{%- set reasoning_content = m.reasoning_content %}{%- elif '</think>' in content %}{%- set reasoning_content = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}{%- set content = content.split('</think>')[-1].lstrip('\\n') %}{%- endif %}
{%- if loop.index0 > ns.last_user_index and reasoning_content -%}{{ '\\n<think>' + reasoning_content.strip() + '</think>'}}{%- else -%}{{ '\\n<think></think>' }}{%- endif -%}
{%- if content.strip() -%}{{ '\\n' + content.strip() }}{%- endif -%}
{% if m.tool_calls %}{% for tc in m.tool_calls %}{%- if tc.function %}{%- set tc = tc.function %}{%- endif %}{{ '\\n<tool_call>' + tc.name }}{% set _args = tc.arguments %}{% for k, v in _args.items() %}<arg_key>{{ k }}</arg_key><arg_value>{{ v | tojson(ensure_ascii=False) if v is not string else v }}</arg_value>{% endfor %}</tool_call>{% endfor %}{% endif %}
{%- elif m.role == 'tool' -%}
{%- if loop.first or (messages[loop.index0 - 1].role != "tool") %}{{- '<|observation|>' }}{%- endif %}{{- '\\n<tool_response>\\n' }}{{- m.content }}{{- '\\n</tool_response>' }}
{%- elif m.role == 'system' -%}<|system|>
{{ visible_text(m.content) }}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}<|assistant|>{{- '\\n<think></think>' if (enable_thinking is defined and not enable_thinking) else '' -}}{%- endif -%}"""
QWEN_CODER = """{% macro render_extra_keys(json_dict, handled_keys) %}{%- if json_dict is mapping %}{%- for json_key in json_dict if json_key not in handled_keys %}{%- if json_dict[json_key] is mapping or (json_dict[json_key] is sequence and json_dict[json_key] is not string) %}{{- '\\n<' ~ json_key ~ '>' ~ (json_dict[json_key] | tojson | safe) ~ '</' ~ json_key ~ '>' }}{%- else %}{{- '\\n<' ~ json_key ~ '>' ~ (json_dict[json_key] | string) ~ '</' ~ json_key ~ '>' }}{%- endif %}{%- endfor %}{%- endif %}{% endmacro %}
{%- for tool in tools or [] %}{%- if tool.function is defined %}{%- set tool = tool.function %}{%- endif %}{{- "\\n<function>\\n<name>" ~ tool.name ~ "</name>" }}
{%- if tool.parameters is defined and tool.parameters is mapping and tool.parameters.properties is defined %}{%- for param_name, param_fields in tool.parameters.properties|items %}{{- '\\n<parameter><name>' ~ param_name ~ '</name>' }}{%- set handled_keys = ['name', 'type', 'description'] %}{{- render_extra_keys(param_fields, handled_keys) }}{{- '</parameter>' }}{%- endfor %}{%- endif %}{{- '</function>' }}{%- endfor %}
{%- for message in messages %}{{- '<|im_start|>' + message.role }}{%- if message.content is defined and message.content is string and message.content | trim | length > 0 %}{{- '\\n' + message.content | trim + '\\n' }}{%- endif %}
{%- for tool_call in message.tool_calls or [] %}{%- set args_value = none %}{%- for args_name, args_value in tool_call.function.arguments|items %}{{- '<parameter=' + args_name + '>\\n' }}{%- set args_value = args_value | tojson | safe if args_value is mapping or (args_value is sequence and args_value is not string) else args_value | string %}{{- args_value }}{{- '\\n</parameter>\\n' }}{%- endfor %}{%- endfor %}{{- '<|im_end|>\\n' }}{%- endfor %}"""
SMOLLM3 = """{# a template with notes #}
{%- set reasoning_mode = '/think' if enable_thinking | default(true) else '/no_think' -%}
{%- if messages[0].role == 'system' -%}{%- set custom = messages[0].content.replace('/no_think', '').replace('/think', '').rstrip() -%}{%- if '/no_think' in messages[0].content -%}{%- set reasoning_mode = '/no_think' -%}{%- endif -%}{%- else -%}{%- set custom = '' -%}{%- endif -%}
{{- '<|im_start|>system\\nToday: ' ~ strftime_now('%d %B %Y') ~ '\\nMode: ' ~ reasoning_mode ~ '\\n' ~ (custom ~ '\\n' if custom) ~ '<|im_end|>\\n' -}}
{%- for message in messages -%}{%- set content = message.content if message.content is string else '' -%}
{%- if message.role == 'user' -%}{{ '<|im_start|>user\\n' + content + '<|im_end|>\\n' }}
{%- elif message.role == 'assistant' -%}{% generation %}{%- if reasoning_mode == '/think' -%}{{ '<|im_start|>assistant\\n' + content.lstrip('\\n') + '<|im_end|>\\n' }}{%- else -%}{{ '<|im_start|>assistant\\n<think>\\n\\n</think>\\n' + content.lstrip('\\n') + '<|im_end|>\\n' }}{%- endif -%}{% endgeneration %}
{%- elif message.role == 'tool' -%}{{ '<|im_start|>user\\n' + content + '<|im_end|>\\n' }}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- if reasoning_mode == '/no_think' -%}{{ '<think>\\n\\n</think>\\n' }}{%- endif -%}{%- endif -%}"""
LOOPS = """{%- for message in messages recursive %}
{%- if message is string %}{% continue %}{% endif %}
  {%- if loop.index > 6 %}{% break %}{% endif %}
{{ loop.index ~ '/' ~ loop.length ~ ' ' ~ loop.revindex0 ~ ' ' ~ loop.cycle('odd', 'even') ~ ' ' ~ (loop.previtem.role if loop.previtem is defined else '-') ~ ' ' ~ (loop.nextitem.role|default('-')) ~ ' ' ~ loop.changed(message.role) ~ ' ' ~ loop.depth }}
    {% if message.tool_calls %}
        {% for call in message.tool_calls %}
            {{- call.function.name }}: {{ call.function.arguments|dictsort(by='key')|map('first')|join(',') }}
        {% endfor %}
    {% endif %}
{%- else %}
none
{%- endfor %}
{% set j = joiner('; ') %}{% for m in messages|groupby('role') %}{{ j() }}{{ m.grouper }}={{ m.list|length }}{% endfor %}
{%- call(x) wrap('b') %} inner {{ x }} {% endcall %}
{% filter upper %}said {{ messages|map(attribute='content')|select('string')|join('|')|trim }}{% endfilter %}
{% with a = 1, b = messages|length %}{{ a + b }}{% endwith %}{% raw %}{{ raw }}{% endraw %}
  {%+ if true %}  kept {% endif +%}
 end
"""
LOOPS = (
    "{% macro wrap(tag, n=2) %}<{{ tag }}>{{ caller(n) }}</{{ tag }}>{{ varargs|length }}{{ kwargs }}{% endmacro %}"
    + LOOPS
)
ENDS = "\r\n{% if messages %}\r\n  {{ messages[0].content }}\r\n{% endif %}\rlast\n\n"
MARKED = "\ufeff{{ messages[0].content }}\n"
FAMILIES = {
    name.lower(): source for name, source in globals().items() if name.isupper() and isinstance(source, str)
}

TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": 'It\'s <b>wet</b> & "cold" in Zürich 😀\nor not, as the forecast of the day may say',
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "enum": ["a", "b"], "default": "a"},
                "days": {"type": ["integer", "null"], "minimum": 1e-7, "maximum": 1e16, "default": 2.0},
                "more": {
                    "type": "array",
                    "items": {"type": "object", "properties": {"x": {"type": "boolean"}}},
                },
            },
            "required": ["city"],
        },
    },
}
ARGUMENTS = {
    "city": "Zürich <&>'\"\\\n",
    "g": 2.0,
    "f": 1e-07,
    "e": 1e22,
    "h": 1e16,
    "i": 10**20,
    "z": -0.0,
    "n": None,
    "t": True,
    "l": [1.5, {"a": [], "b": {}}, "\u2028"],
}


def call(number: int) -> dict:
    return {
        "id": f"call{number:05}",
        "type": "function",
        "function": {"name": "weather", "arguments": ARGUMENTS},
    }


def result(number: int, content: str) -> dict:
    return {"role": "tool", "tool_call_id": f"call{number:05}", "name": "weather", "content": content}


USER = {"role": "user", "content": "What is it?"}
ANSWER = {"role": "assistant", "content": "<think>\nhm\n</think>\n\nIt is.\n"}
CONVERSATIONS = {
    "one": [USER],
    "system": [{"role": "system", "content": " Be brief. /no_think "}, USER],
    "developer": [{"role": "developer", "content": "Be brief."}, USER],
    "turns": [USER, ANSWER, {"role": "user", "content": "  And <|x|> \u00a0 {{ 7 * 7 }}?\r\n"}],
    "reasoning": [USER, {"role": "assistant", "content": "Yes.", "reasoning_content": "\nwhy\n"}, USER],
    "answer last": [USER, ANSWER],
    "call": [USER, {"role": "assistant", "content": "", "tool_calls": [call(1)]}, result(1, "20 °C\n<b>")],
    "calls": [
        {"role": "system", "content": "S"},
        USER,
        {"role": "assistant", "content": "So:", "tool_calls": [call(1), call(2)], "thinking": "t"},
        result(1, '{"a": 1}'),
        result(2, "x" * 40),
        {"role": "assistant", "content": "Done."},
        {"role": "user", "content": "Thanks"},
    ],
    "second system": [
        {"role": "system", "content": "A"},
        USER,
        ANSWER,
        {"role": "system", "content": "B"},
        USER,
    ],
}
