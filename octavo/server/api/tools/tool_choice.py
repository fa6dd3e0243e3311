"""The tools of a request as functions, and the names that its tool_choice lets a model call."""

from collections.abc import Set

from octavo.server.api.structs import CustomTool, FunctionTool, NamedTool, Tool, ToolChoice
from octavo.server.api_errors import refused
from octavo.server.parsing.custom.text_tool import TextParameters, described


def function_tool(tool: Tool) -> FunctionTool:
    """Return a tool as a function; that of a custom tool has one argument, its text, and is strict.

    Raises:
        ApiError: it lacks what its type names.
    """
    if tool.type == "function" and tool.function:
        return tool.function
    if tool.type == "function" or not tool.custom:
        raise refused("tools", f"must hold an object {tool.type} for a tool of type {tool.type}")
    return _text_tool(tool.custom)


def _text_tool(tool: CustomTool) -> FunctionTool:
    grammar = None if tool.format is None else tool.format.grammar
    if tool.format is not None and (tool.format.type == "grammar") != (grammar is not None):
        raise refused("tools", f"must hold a grammar in the format of {tool.name!r} if its type is grammar")
    syntax, definition = (None, "") if grammar is None else (grammar.syntax, grammar.definition)
    return FunctionTool(
        name=tool.name,
        description=described(tool.description, syntax, definition),
        parameters=TextParameters(syntax, definition),
        strict=True,
    )


def chosen_names(choice: ToolChoice) -> tuple[Set[str] | None, bool]:
    """Return the tools that may be called (None: all), and whether one must be.

    Raises:
        ApiError: it lacks what its type names.
    """
    if not isinstance(choice, NamedTool):
        return None, choice == "required"
    if choice.type == "allowed_tools" and choice.allowed_tools:
        allowed = choice.allowed_tools
        return {_name(tool) for tool in allowed.tools}, allowed.mode == "required"
    named = choice.function if choice.type == "function" else choice.custom
    if not named or choice.type == "allowed_tools":
        raise refused("tool_choice", f"must hold an object {choice.type} for its type")
    return {named.name}, True


def _name(tool: dict[str, object]) -> str:
    found = tool.get(str(tool.get("type")), tool)
    name = found.get("name") if isinstance(found, dict) else None
    if not isinstance(name, str):
        raise refused("tool_choice", "must name each of its tools, such as {type: function, name: f}")
    return name
