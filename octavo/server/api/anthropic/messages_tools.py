"""The tools of /v1/messages as functions: the client's own, and those whose schemas are Anthropic's."""

from collections.abc import Sequence

from octavo.server.api.anthropic.messages_structs import ToolChoiceParam, ToolParam, part
from octavo.server.api.structs import FunctionChoice, FunctionTool, JsonObject, NamedTool, Tool, ToolChoice
from octavo.server.api.tools.tool_choice import function_tool
from octavo.server.api_errors import refused
from octavo.tokenizer.messages import encoded

_EDITOR = (
    "view shows a file, view_range of its lines, or a folder. create writes file_text. str_replace puts "
    "new_str for old_str, which must occur once. insert puts {} after insert_line."
)
_FILES = "path file_text old_str new_str insert_text insert_line:integer view_range:array"
_OLD, _NEW = _EDITOR.format("new_str"), _EDITOR.format("insert_text")
_OLD_EDITS, _EDITS = "view create str_replace insert undo_edit", "view create str_replace insert"
# Tools that a client runs: how their types begin, required arguments, commands, other arguments, and what a
# model is told. Source: platform.claude.com, "Bash tool", "Text editor tool" and "Memory tool".
_PUBLISHED = (
    ("bash_", "command", "", "restart:boolean", "Runs a command in a shell. A restart opens a new one."),
    ("text_editor_2024", "command path", _OLD_EDITS, _FILES, _OLD),
    ("text_editor_202501", "command path", _OLD_EDITS, _FILES, _OLD),
    ("text_editor_", "command path", _EDITS, _FILES, _NEW),
    ("memory_", "command", f"{_EDITS} delete rename", f"{_FILES} old_path new_path", f"Keeps notes. {_NEW}"),
)


def tools_of(found: Sequence[JsonObject], *, defers: bool) -> list[Tool]:
    """Return tools as functions; `defers`: some are shown only where a block refers to them.

    Raises:
        ApiError: one is malformed, or of a type whose schema is not known.
    """
    return [_tool(tool, f"tools[{index}]", defers=defers) for index, tool in enumerate(found)]


def _tool(found: JsonObject, where: str, *, defers: bool) -> Tool:
    kind = found.get("type")
    about = None if kind in (None, "custom") else _published(kind, f"{where}.type")
    tool = part(found, ToolParam, where)
    description, schema = about or (tool.description, tool.input_schema)
    if schema is None:
        raise refused(f"{where}.input_schema", "is missing: expected a JSON schema of the tool's arguments")
    function = FunctionTool(
        name=tool.name,
        description=description,
        parameters={**schema, "examples": tool.input_examples} if tool.input_examples else schema,
        strict=tool.strict,
        defer_loading=True if defers and tool.defer_loading else None,
    )
    return Tool(type="function", function=function)


def _published(kind: object, where: str) -> tuple[str, JsonObject]:
    """Return what a model is told of a type of tools, and the schema of their arguments."""
    for begin, required, commands, others, about in _PUBLISHED:
        if isinstance(kind, str) and kind.startswith(begin):
            named = (entry.partition(":") for entry in others.split())
            command = {"type": "string", **({"enum": commands.split()} if commands else {})}
            properties = {"command": command, **{name: {"type": of or "string"} for name, _, of in named}}
            return about, {"type": "object", "properties": properties, "required": required.split()}
    known = "custom, bash_*, text_editor_*, memory_*, or a tool of Anthropic's servers, which is left out"
    raise refused(where, f"{kind!r:.100} is not supported: expected {known}")


def descriptions_of(tools: Sequence[Tool]) -> dict[str, str]:
    """Return what is said of each deferred tool where a block refers to it, by name."""
    found = {}
    for function in (one for one in map(function_tool, tools) if one.defer_loading):
        parts = {
            "name": function.name,
            "description": function.description,
            "parameters": function.parameters,
        }
        written = encoded({name: value for name, value in parts.items() if value}).decode()
        found[function.name] = f"The tool {function.name} can be called: {written}"
    return found


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
