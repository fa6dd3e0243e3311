"""The tools of /v1/messages as functions: the client's own, and those whose schemas are Anthropic's."""

from collections.abc import Sequence
from typing import Any

from octavo.server.api.anthropic.messages_structs import ToolChoiceParam, ToolParam, part
from octavo.server.api.structs import FunctionChoice, FunctionTool, JsonObject, NamedTool, Tool, ToolChoice
from octavo.server.api_errors import refused
from octavo.tokenizer.messages import encoded

_MAY_BE_CALLED = "The tool {} can be called"


def _object(required: str, commands: str = "", **properties: JsonObject) -> JsonObject:
    """Return a schema of arguments, of which the first may be one of several commands."""
    command: dict[str, Any] = {"type": "string"}
    if commands:
        command["enum"] = commands.split()
    return {
        "type": "object",
        "properties": {"command": command, **properties},
        "required": required.split(),
        "additionalProperties": False,
    }


_TEXT, _LINE = {"type": "string"}, {"type": "integer"}
_FILES: dict[str, JsonObject] = {
    "path": _TEXT,
    "file_text": _TEXT,
    "old_str": _TEXT,
    "new_str": _TEXT,
    "insert_line": _LINE,
    "insert_text": _TEXT,
    "view_range": {"type": "array", "items": _LINE},
}
_EDITOR = (
    "view shows a file, view_range of its lines, or a folder. create writes file_text. str_replace puts "
    "new_str for old_str, which must occur once. insert puts {} after insert_line. "
)
# Tools that a client runs: how their types begin, what a model is told of them, and the schema.
# Source: platform.claude.com, "Bash tool", "Text editor tool" and "Memory tool".
_PUBLISHED: tuple[tuple[tuple[str, ...], str, JsonObject], ...] = (
    (
        ("bash_",),
        "Runs a command in a shell that stays open between calls. restart opens a new one.",
        _object("command", restart={"type": "boolean"}),
    ),
    (
        ("text_editor_2024", "text_editor_202501"),
        _EDITOR.format("new_str") + "undo_edit takes a file's last edit back.",
        _object("command path", "view create str_replace insert undo_edit", **_FILES),
    ),
    (
        ("text_editor_",),
        _EDITOR.format("insert_text"),
        _object("command path", "view create str_replace insert", **_FILES),
    ),
    (
        ("memory_",),
        "Keeps notes below /memories, for later conversations too. "
        + _EDITOR.format("insert_text")
        + "delete removes path. rename moves old_path to new_path.",
        _object(
            "command",
            "view create str_replace insert delete rename",
            old_path=_TEXT,
            new_path=_TEXT,
            **_FILES,
        ),
    ),
)


def tools_of(found: Sequence[JsonObject], *, defers: bool) -> list[Tool]:
    """Return tools as functions.

    Args:
        found: them, decoded.
        defers: those that want it are shown only where a block refers to them.

    Raises:
        ApiError: one is malformed, or of a type whose schema is not known.
    """
    return [_tool(tool, f"tools[{index}]", defers=defers) for index, tool in enumerate(found)]


def descriptions_of(tools: Sequence[Tool]) -> dict[str, str]:
    """Return what is said of each deferred tool where a block refers to it, by name."""
    later = [tool.function for tool in tools if tool.function.defer_loading]
    return {
        function.name: f"{_MAY_BE_CALLED.format(function.name)}: {_definition(function)}"
        for function in later
    }


def _definition(function: FunctionTool) -> str:
    found = {"name": function.name, "description": function.description, "parameters": function.parameters}
    return encoded({name: value for name, value in found.items() if value}).decode()


def _tool(found: JsonObject, where: str, *, defers: bool) -> Tool:
    kind = found.get("type")
    about = None if kind in (None, "custom") else _published(kind, f"{where}.type")
    tool = part(found, ToolParam, where)
    description, schema = about or (tool.description, tool.input_schema)
    if schema is None:
        raise refused(f"{where}.input_schema", "is missing: expected a JSON schema of the tool's arguments")
    if tool.input_examples:
        schema = {**schema, "examples": tool.input_examples}
    function = FunctionTool(
        name=tool.name,
        description=description,
        parameters=schema,
        strict=tool.strict,
        defer_loading=True if defers and tool.defer_loading else None,
    )
    return Tool(type="function", function=function)


def _published(kind: object, where: str) -> tuple[str, JsonObject]:
    for begins, about, schema in _PUBLISHED:
        if isinstance(kind, str) and kind.startswith(begins):
            return about.strip(), schema
    raise refused(
        where,
        f"{kind!r:.100} is not supported: expected custom, bash_*, text_editor_*, memory_*, or a tool that "
        "Anthropic's servers run, which is left out",
    )


def choice_of(choice: ToolChoiceParam) -> ToolChoice:
    """Return which tools may or must be called.

    Raises:
        ApiError: it has a name and needs none, or the other way round.
    """
    if (choice.name is None) == (choice.type == "tool"):
        raise refused("tool_choice", "has a name if its type is tool, and only then")
    if choice.name is not None:
        return NamedTool(type="function", function=FunctionChoice(name=choice.name))
    return "none" if choice.type == "none" else "required" if choice.type == "any" else "auto"
