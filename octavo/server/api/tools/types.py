"""Tools in requests, and their calls in answers."""

from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, Struct, UnsetType

MAX_TOOLS = 128
FunctionName = Annotated[str, Meta(min_length=1, max_length=128, pattern=r"^[A-Za-z0-9_.:/-]+$(?!\n)")]


class FunctionTool(Struct, forbid_unknown_fields=True, kw_only=True):
    """A function that may be called. Without parameters it takes none."""

    name: FunctionName
    description: str | UnsetType | None = UNSET
    parameters: dict[str, Any] | UnsetType | None = UNSET
    strict: bool | None = None


class Tool(Struct, forbid_unknown_fields=True, kw_only=True):
    """A tool by OpenAI's form."""

    type: Literal["function"]
    function: FunctionTool


class FunctionChoice(Struct, forbid_unknown_fields=True, kw_only=True):
    """A function's name."""

    name: str


class NamedTool(Struct, forbid_unknown_fields=True, kw_only=True):
    """The tool that must be called."""

    type: Literal["function"]
    function: FunctionChoice


Tools = Annotated[list[Tool], Meta(max_length=MAX_TOOLS)]
ToolChoice = Literal["none", "auto", "required"] | NamedTool


class CalledFunction(Struct, kw_only=True):
    """A call: a function's name and its arguments, a JSON object as text. In a stream, what is new in it."""

    arguments: str
    name: str | UnsetType = UNSET


class ToolCall(Struct, kw_only=True):
    """A call in a whole answer."""

    id: str
    function: CalledFunction
    type: Literal["function"] = "function"


class ToolCallDelta(Struct, kw_only=True):
    """What is new in a call; the first delta has its id and its name."""

    index: int
    function: CalledFunction
    id: str | UnsetType = UNSET
    type: str | UnsetType = UNSET
