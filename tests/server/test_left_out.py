"""What the tables name is taken, left out and named: fields at any depth, tools that a server would run."""

from typing import Any

import msgspec
import pytest

from octavo.server.api.anthropic.messages_structs import MessagesRequest
from octavo.server.api.body import REFUSED, decode
from octavo.server.api.left_out import FIELDS, TOOLS, leave_out
from octavo.server.api.responses.response_structs import ResponsesRequest
from octavo.server.api.structs import ChatRequest, CompletionRequest, RequestBody
from octavo.server.api_errors import ApiError

KINDS: dict[str, type[RequestBody]] = {
    kind.api: kind for kind in (ChatRequest, CompletionRequest, ResponsesRequest, MessagesRequest)
}
TURN = {"role": "user", "content": "Hi"}
LEAST: dict[str, dict[str, Any]] = {
    "chat": {"messages": [TURN]},
    "completions": {"prompt": "Hi"},
    "responses": {"input": "Hi"},
    "messages": {"messages": [TURN], "max_tokens": 1},
}
# Objects in which a field may stand, by API and path.
HOLDERS: dict[str, dict[str, Any]] = {
    "chat tools[]": {"type": "function", "function": {"name": "f"}},
    "responses tools[]": {"type": "function", "name": "f"},
    "messages tools[]": {"name": "f", "input_schema": {}},
    **{f"{api} messages[]": TURN for api in ("chat", "messages")},
    "chat tools[].function": {"name": "f"},
    **{f"{api} thinking": {"type": "enabled"} for api in ("chat", "messages")},
}
FIELD_CASES = [(row.name, api) for row in FIELDS for api in row.apis if api in KINDS]
TOOL_CASES = [(row.name, api) for row in TOOLS for api in row.apis]


def body_with(api: str, path: str, value: object) -> dict[str, Any]:
    """Return the least body of an API with a value at a path."""
    steps = path.split(".")
    for end in range(len(steps) - 1, 0, -1):
        prefix = ".".join(steps[:end])
        value = {**HOLDERS.get(f"{api} {prefix}", {}), steps[end].removesuffix("[]"): value}
        value = [value] if steps[end - 1].endswith("[]") else value
    return {**LEAST[api], steps[0].removesuffix("[]"): value}


def is_decoded(path: str, api: str) -> bool:
    """Whether the least body with it is one of the API."""
    return ".tools[]" not in path and "content[].content" not in path


def test_a_row_is_about_no_field_that_is_honoured() -> None:
    for row in FIELDS:
        for api in row.apis:
            assert api not in KINDS or row.name not in KINDS[api].__struct_fields__, row
            assert row.name in REFUSED or row.why, row


@pytest.mark.parametrize(("path", "api"), FIELD_CASES, ids=str)
def test_a_field_of_the_table_is_left_out_and_named(path: str, api: str) -> None:
    body = body_with(api, path, {"any": "value"})
    assert leave_out(body, api) == (path,)
    assert b"any" not in msgspec.json.encode(body)
    assert leave_out(body_with(api, path, None), api) == ()


@pytest.mark.parametrize(("path", "api"), [case for case in FIELD_CASES if is_decoded(*case)], ids=str)
def test_a_body_with_it_is_decoded_as_without(path: str, api: str) -> None:
    body, bare = body_with(api, path, {"any": "value"}), body_with(api, path, None)
    found, names = decode(msgspec.json.encode(body), KINDS[api])
    leave_out(bare, api)
    assert (found, names) == (decode(msgspec.json.encode(bare), KINDS[api])[0], (path,))


@pytest.mark.parametrize(("name", "api"), TOOL_CASES, ids=str)
def test_a_tool_that_a_server_would_run_is_left_out_and_named(name: str, api: str) -> None:
    tool = {"type": name.replace("*", "20991231"), "name": "it", "server_url": "http://192.0.2.1"}
    body = LEAST[api] | {"tools": [HOLDERS[f"{api} tools[]"], tool, tool]}
    found, names = decode(msgspec.json.encode(body), KINDS[api])
    assert names == (f"tools[] {name}",)
    (kept,) = msgspec.to_builtins(found)["tools"]
    assert kept["name"] == "f"


@pytest.mark.parametrize("api", KINDS)
def test_what_no_table_names_is_refused(api: str) -> None:
    """Neither a field that is left out elsewhere, nor one that looks like a row, is dropped silently."""
    for name in ("client_metadatum", "tools[]", "stream_options.include_obfuscation", "keep_alife"):
        with pytest.raises(ApiError, match="unknown field"):
            decode(msgspec.json.encode(LEAST[api] | {name: 1}), KINDS[api])
    for row in FIELDS:
        if api not in row.apis and "." not in row.name and row.name not in KINDS[api].__struct_fields__:
            with pytest.raises(ApiError):
                decode(msgspec.json.encode(LEAST[api] | {row.name: 1}), KINDS[api])


def test_a_name_in_a_text_changes_nothing() -> None:
    body = {"messages": [{"role": "user", "content": 'say "cache_control": {} and "user"'}]}
    found, names = decode(msgspec.json.encode(body), ChatRequest)
    assert (found.messages, names) == (body["messages"], ())
