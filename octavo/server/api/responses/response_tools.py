"""Tools of /v1/responses as a chat's: those of a namespace are functions whose names begin with its own."""

from collections.abc import Iterator, Mapping, Sequence

from octavo.server.api.left_out import tool_name
from octavo.server.api.responses.response_structs import (
    AnyTool,
    CustomResponseTool,
    Namespace,
    ResponsesRequest,
    ResponseTool,
    ResponseToolChoice,
)
from octavo.server.api.structs import (
    AllowedTools,
    CustomFormat,
    CustomGrammar,
    CustomTool,
    FunctionChoice,
    FunctionTool,
    JsonObject,
    NamedTool,
    Tool,
    ToolChoice,
)
from octavo.server.api_errors import refused

Names = Mapping[str, tuple[str | None, str]]
"""Namespaces and names of tools, by the names that a model knows."""

# OpenAI's own models know all functions by this namespace, so that it says nothing.
_PLAIN = "functions"


def flat_name(namespace: object, name: str) -> str:
    """Return the name by which a model knows a tool of a namespace; None: it has none."""
    if not isinstance(namespace, str) or namespace == _PLAIN:
        return name
    return f"{namespace.removesuffix('__')}__{name}"


def names_of(tools: Sequence[AnyTool]) -> Names:
    """Return what the names that a model knows stand for."""
    return {flat_name(space, tool.name): (space, tool.name) for space, tool, _ in _flat(tools)}


def chat_tools(tools: Sequence[AnyTool]) -> list[Tool]:
    """Return tools as a chat's. A namespace's description becomes part of each of its tools'."""
    return [_tool(space, tool, about) for space, tool, about in _flat(tools)]


def _flat(
    tools: Sequence[AnyTool],
) -> Iterator[tuple[str | None, ResponseTool | CustomResponseTool, str | None]]:
    for tool in tools:
        if isinstance(tool, Namespace):
            yield from ((tool.name, inner, tool.description) for inner in tool.tools)
        else:
            yield None, tool, None


def _tool(space: str | None, tool: ResponseTool | CustomResponseTool, about: str | None) -> Tool:
    name, description = flat_name(space, tool.name), tool.description
    if about:
        description = f"{about}\n{description}" if description else about
    if isinstance(tool, CustomResponseTool):
        custom = CustomTool(name=name, description=description or None, format=_format(tool))
        return Tool(type="custom", custom=custom)
    function = FunctionTool(
        name=name, description=description, parameters=tool.parameters, strict=tool.strict
    )
    return Tool(type="function", function=function)


def _format(tool: CustomResponseTool) -> CustomFormat | None:
    given = tool.format
    if given is None or given.type == "text":
        return None
    if given.definition is None or given.syntax is None:
        raise refused("tools", f"must hold definition and syntax in the format of {tool.name!r}")
    return CustomFormat(
        type="grammar", grammar=CustomGrammar(definition=given.definition, syntax=given.syntax)
    )


def chat_choice(fields: ResponsesRequest) -> ToolChoice | None:
    """Return a request's tool_choice as a chat's.

    Raises:
        ApiError: it lacks what its type names, or names what is not in tools.
    """
    choice = fields.tool_choice
    if not isinstance(choice, ResponseToolChoice):
        return choice
    names = names_of(fields.tools or ())
    if choice.type != "allowed_tools":
        if choice.name is None:
            raise refused("tool_choice", f"must hold a name for its type {choice.type}")
        return NamedTool(type="function", function=FunctionChoice(name=known_name(choice.name, None, names)))
    if choice.mode is None or choice.tools is None:
        raise refused("tool_choice", "must hold mode and tools for its type allowed_tools")
    allowed = [{"name": name} for tool in choice.tools for name in _allowed(tool, names)]
    return NamedTool(type="allowed_tools", allowed_tools=AllowedTools(mode=choice.mode, tools=allowed))


def _allowed(tool: JsonObject, names: Names) -> list[str]:
    """Return the tools that one entry of allowed_tools means; a tool that was left out is none."""
    kind, name, space = tool.get("type"), tool.get("name"), tool.get("namespace")
    if tool_name(kind, ResponsesRequest.api):
        return []
    if kind == "namespace" and isinstance(name, str):
        return [flat for flat, (inside, _) in names.items() if inside == name]
    if kind not in ("function", "custom") or not isinstance(name, str):
        raise refused("tool_choice", "must name each of its tools, such as {type: function, name: f}")
    return [known_name(name, space, names)]


def known_name(name: str, space: object, names: Names) -> str:
    """Return the name by which the model knows a tool, which may be named without its namespace."""
    flat = flat_name(space, name)
    if flat in names:
        return flat
    others = [known for known, (_, bare) in names.items() if bare == name and space is None]
    return others[0] if len(others) == 1 else flat
