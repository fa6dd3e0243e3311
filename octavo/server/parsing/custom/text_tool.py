"""Custom tools as functions: the text that they take becomes the argument `input`."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from octavo.errors import StructuredOutputError
from octavo.server.parsing.custom.lark_text import tokens, written
from octavo.server.parsing.xml_values import XmlTags

INPUT = "input"


class TextParameters(dict[str, Any]):
    """The schema of a custom tool's arguments.

    Attributes:
        lark: the grammar of its text, in Lark; None: any text, or one that the schema describes.
    """

    def __init__(self, syntax: str | None = None, definition: str = "") -> None:
        """Describe any text, or one by a grammar whose syntax is "regex" or "lark"."""
        text = {"type": "string"}
        if syntax == "regex":
            text["pattern"] = f"^(?:{definition})$"
        self.lark = definition if syntax == "lark" else None
        required = {"properties": {INPUT: text}, "required": [INPUT], "additionalProperties": False}
        super().__init__({"type": "object", **required})


def lark_rules(rule: str, schema: Mapping[str, Any] | None, tags: XmlTags | None) -> list[str] | None:
    """Return rules for the arguments of a tool whose text has a grammar in Lark; None if it has none.

    With tags, the text stands between these; without, in JSON.

    Raises:
        StructuredOutputError: the grammar cannot be written for texts within JSON.
    """
    if not isinstance(schema, TextParameters) or schema.lark is None:
        return None
    around = (f'{{"{INPUT}": "', '"}')
    last = ""
    if tags is not None:
        begin, end = f"{tags.parameter}{INPUT}{tags.end_keys[0]}{tags.around}", f"{tags.end_parameter}\n"
        last = tags.around or end[0]
        around = (begin, last, end if tags.around else end[1:])
    begin, *end = map(json.dumps, around)
    text = lark_text(f"{rule}_text", schema.lark, in_json=tags is None, end=last)
    return [f"{rule}: {begin} {rule}_text {' '.join(end)}", text]


def lark_text(rule: str, source: str, *, in_json: bool, end: str) -> str:
    """Return a rule of a text by its grammar in Lark, within JSON or before a text that ends it.

    Raises:
        StructuredOutputError: the grammar could end the block that it is put into, or cannot be within JSON.
    """
    depth = 0
    for kind, text in tokens(source):
        if kind == "other":
            depth += text.count("{") - text.count("}")
        if depth < 0:
            raise StructuredOutputError("the grammar closes a brace that it has not opened")
    return f"{rule}: %lark {{\n{written(source, in_json=in_json, end=end)}\n}}"


def described(description: str | None, syntax: str | None, definition: str) -> str:
    """Return a tool's description with the form of its text, which no schema shows to the model."""
    parts: Sequence[str] = [description] if description else []
    if syntax is None:
        return "\n".join([*parts, f"The argument `{INPUT}` is any text."])
    named = "Lark grammar" if syntax == "lark" else "regular expression"
    return "\n".join([*parts, f"The argument `{INPUT}` is a text that matches this {named}:", definition])
