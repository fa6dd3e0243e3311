"""Qwen3-Coder's tags, and how to tell a text that speaks of them from a call that lacks one."""

import re
from collections.abc import Set

TOOL_CALL, END_TOOL_CALL = "<tool_call>", "</tool_call>"
FUNCTION, END_FUNCTION = "<function=", "</function>"
PARAMETER, END_PARAMETER = "<parameter=", "</parameter>"
INNER_TAGS = (PARAMETER, END_PARAMETER, END_FUNCTION)
"""What stands inside a call."""

_OUTER_TAGS = (TOOL_CALL, END_TOOL_CALL, FUNCTION, END_FUNCTION)
_PARAMETER = re.compile(r"(<function=[^<>\n]{1,256}>\s*)?<parameter=([^<>\n]{1,256})>")


def holds_tags(value: str) -> bool:
    """Return whether a value holds tags that belong around parameters; they may be misplaced."""
    return any(tag in value for tag in _OUTER_TAGS)


def lacks_its_end(value: str, key: str, keys: Set[str]) -> bool:
    """Return whether another parameter seems to begin within a value, so that the value's own end is missing.

    A text may speak of a parameter that the call has already, as no call has one twice; but not where its tag
    would stand if it was written twice.

    Args:
        value: all that stands between the parameter's tags.
        key: the parameter.
        keys: all parameters of the call so far, this one included.
    """
    for tag in _PARAMETER.finditer(value):
        if tag[1] or tag[2].strip() not in keys:
            return True
        is_line = value.startswith("\n") and tag.start() == 1 and value.startswith("\n", tag.end())
        if tag[2].strip() == key and (tag.start() == 0 or is_line):
            return True
    return False
