"""Fields and tools of requests that are taken and left out, and why: the rest of the answer is the same.

A field that changes which tokens come out never stands here: it is honoured, or refused by name (body.py).
What was left out of a request is named in the header of its answer, and in the log at debug level.
"""

from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any, NamedTuple

HEADER = b"x-octavo-left-out"
SEARCH_TOOLS = "tool_search_tool_*"

# Fields | APIs | why. A field is written as a path, in which [] stands for each item of a list.
_FIELDS = """
user safety_identifier | chat completions responses pooled decisions |
    the client's own user; nothing is kept of it
metadata | chat completions messages pooled | a note to the client itself; nothing is kept of it
store | chat completions responses | answers are not kept
service_tier | chat completions responses messages | there is one tier; see the field priority
speed inference_geo | messages | there is one speed, and one place
moderation | chat responses | nothing is moderated
prompt_cache_key prompt_cache_retention prompt_cache_options | chat completions responses decisions |
    every prefix is cached
options.num_ctx options.num_keep truncate shift | ollama | the server was started with its context's length; a
    prompt that is too long is refused
options.num_batch options.num_gpu options.main_gpu options.num_thread options.numa options.low_vram
    options.f16_kv options.logits_all options.vocab_only options.use_mmap options.use_mlock
    options.embedding_only | ollama | the model is loaded already
options.mirostat_tau options.mirostat_eta | ollama | they belong to mirostat, which is refused
cache_prompt id_slot | chat completions | every prefix is cached
options | ollama_embed | an embedding is not sampled
keep_alive | chat completions ollama ollama_embed | the model stays loaded
cache_control messages[].cache_control messages[].content[].cache_control tools[].cache_control |
    chat messages | every prefix is cached
tools[].function.cache_control | chat | every prefix is cached
system[].cache_control messages[].content[].content[].cache_control
    messages[].content[].content[].content[].cache_control messages[].content[].source.content[].cache_control
    messages[].content[].content[].source.content[].cache_control | messages | every prefix is cached
messages[].content[].citations messages[].content[].content[].citations system[].citations
    messages[].content[].content[].content[].citations messages[].content[].source.content[].citations
    messages[].content[].content[].source.content[].citations | messages | answers cite nothing
messages[].content[].caller messages[].content[].toolset_name messages[].content[].parsed_output | messages |
    the client and other servers note them
messages[].content[].prompt_cache_breakpoint | chat | every prefix is cached
input[].phase | responses decisions | templates know no phases
input[].caller | responses | only the client calls tools
input[].content[].prompt_cache_breakpoint input[].output[].prompt_cache_breakpoint | responses decisions |
    every prefix is cached
stream_options.include_obfuscation | chat completions | events are not padded
stream_options | responses | events are not padded
spaces_between_special_tokens | chat completions | texts are decoded as the tokenizer does it
verbosity | chat | a wish; say it in a message
text.verbosity | responses | a wish; say it in the instructions
web_search_options | chat | this server opens no connections
defer_loading tools[].defer_loading tools[].tools[].defer_loading | responses | the model sees all tools
tools[].allowed_callers tools[].tools[].allowed_callers | responses messages | only the client calls tools
tools[].output_schema tools[].tools[].output_schema | responses | results of tools are taken as they are
tools[].eager_input_streaming | messages | arguments are always streamed
tools[].max_characters | messages | the client runs the tool
client_metadata access_programs | responses | they describe the client
reasoning.summary reasoning.generate_summary reasoning.context | chat responses | reasoning is shown whole
tools[].async tools[].tools[].async input[].async | responses | the client may answer a call when it likes
reasoning.mode | chat responses | the effort alone decides
thinking.budget_tokens | chat messages | only max_tokens bounds an answer
thinking.clear_thinking | chat | the model's chat template decides it
thinking.block_binding | messages | thinking is read as it is sent
output_config.task_budget | messages | only max_tokens bounds an answer
max_tool_calls | responses | it counts calls of server tools, of which there are none
context_management | responses messages | the whole conversation is read, up to the model's length
betas anthropic_beta anthropic_version diagnostics | messages | they describe the client
user_profile_id workspace_id billing_policy fallback_credit_token | messages | nothing is billed
fallbacks | messages | there is one model
mcp_servers | messages | this server opens no connections
"""
# Types of tools | APIs | why; * stands for a date.
_TOOLS = """
web_search web_search_2025_08_26 web_search_preview web_search_preview_2025_03_11 | responses |
    this server opens no connections
file_search mcp | responses | this server opens no connections
code_interpreter local_shell shell image_generation programmatic_tool_calling | responses |
    this server runs no code and makes no images
computer computer_use_preview computer-use-preview | responses | this server has no screen
tool_search | responses | the model sees all tools
apply_patch | responses | give a custom tool of this name
web_search_* web_fetch_* mcp_toolset | messages | this server opens no connections
code_execution_* | messages | this server runs no code
tool_search_tool_* | messages | the model sees all tools
advisor_* | messages | there is one model
"""
# Types of items of the conversation | APIs | why: calls of tools that are left out, and their results.
_ITEMS = """
web_search_call file_search_call code_interpreter_call image_generation_call mcp_list_tools mcp_call
    mcp_approval_request mcp_approval_response program program_output | responses | a server ran the tool
computer_call computer_call_output local_shell_call local_shell_call_output shell_call shell_call_output
    apply_patch_call apply_patch_call_output tool_search_call tool_search_output | responses |
    the tool is left out, too
"""
# Values of include | APIs | why.
_INCLUDES = """
file_search_call.results web_search_call.results web_search_call.action.sources code_interpreter_call.outputs
    computer_call_output.output.image_url message.input_image.image_url | responses |
    the tool is left out, too
"""


class LeftOut(NamedTuple):
    """A field or a type of tool, the APIs that take it, and why it may be left out."""

    name: str
    apis: tuple[str, ...]
    why: str


def _rows(table: str) -> tuple[LeftOut, ...]:
    lines = [line.split(" | ") for line in table.replace("\n    ", " ").strip().splitlines()]
    return tuple(
        LeftOut(name, tuple(apis.split()), why) for names, apis, why in lines for name in names.split()
    )


FIELDS, TOOLS, ITEMS, INCLUDES = map(_rows, (_FIELDS, _TOOLS, _ITEMS, _INCLUDES))
_LISTS = {"tools": TOOLS, "input": ITEMS, "include": INCLUDES}


@cache
def _paths_of(api: str) -> tuple[str, ...]:
    return tuple(row.name for row in FIELDS if api in row.apis)


@cache
def _inner_names(api: str) -> tuple[bytes, ...]:
    """Return the last names of paths and the first ones of tools, as JSON writes them.

    A struct may hold such objects unread.
    """
    names = {path.rpartition(".")[2] + '"' for path in _paths_of(api) if "." in path}
    kinds = {row.name.partition("*")[0] for row in (*TOOLS, *ITEMS) if api in row.apis}
    return tuple(f'"{name}'.encode() for name in sorted(names | kinds))


def may_hold_more(body: bytes, api: str) -> bool:
    """Return whether something within a body may have to be left out; cheap, and right if it says no."""
    return any(name in body for name in _inner_names(api))


def leave_out(fields: dict[str, Any], api: str) -> tuple[str, ...]:
    """Take out of a body what the tables name for an API; return the names of what was there."""
    found = [path for path in _paths_of(api) if _take_out(fields, path.split("."))]
    return (*found, *_leave_items(fields, api))


def _take_out(place: object, steps: Sequence[str]) -> bool:
    """Take out a field wherever its path leads; return whether it was there and said something."""
    step, rest = steps[0], steps[1:]
    if not isinstance(place, dict):
        return False
    if not rest:
        return place.pop(step, None) is not None
    found = [_take_out(inner, rest) for inner in _inner(place, step)]
    return any(found)


def _inner(place: dict[str, Any], step: str) -> Iterator[object]:
    inner = place.get(step.removesuffix("[]"))
    if step.endswith("[]"):
        yield from inner if isinstance(inner, list) else ()
    else:
        yield inner


def _leave_items(fields: dict[str, Any], api: str) -> list[str]:
    """Take items of lists out by their types; return the lists and the types."""
    found = []
    for name, rows in _LISTS.items():
        items = fields.get(name)
        if isinstance(items, list):
            kinds = [_listed_name(item, api, rows) for item in items]
            fields[name] = [item for item, kind in zip(items, kinds, strict=True) if not kind]
            found += [f"{name}[] {kind}" for kind in kinds if kind]
    for item in fields["input"] if isinstance(fields.get("input"), list) else ():
        if isinstance(item, dict) and item.get("type") == "additional_tools":
            found += leave_out(item, api)
    return list(dict.fromkeys(found))


def _listed_name(item: object, api: str, rows: Sequence[LeftOut]) -> str:
    """Return an item's type as its table writes it, if it is left out: no header repeats a client's."""
    kind = item.get("type") if isinstance(item, dict) else item
    for row in rows if isinstance(kind, str) else ():
        begin, star, _ = row.name.partition("*")
        if api in row.apis and (str(kind).startswith(begin) if star else kind == begin):
            return row.name
    return ""


def tool_name(kind: object, api: str) -> str:
    """Return a type of tool as the table writes it, if it is left out."""
    return _listed_name(kind, api, TOOLS)
