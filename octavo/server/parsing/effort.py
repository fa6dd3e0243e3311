"""How much a model is to reason: from the words of APIs to the switches of its chat template."""

from typing import Any

from octavo.tokenizer.chat_template import ChatTemplate

_LEVELS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
_HARMONY_LEVELS = ("low", "medium", "high")
_SWITCHES = ("enable_thinking", "thinking")


def reasoning_variables(
    template: ChatTemplate, effort: str | None, thinks: bool | None, *, is_harmony: bool
) -> dict[str, Any]:
    """Return the variables that say so to a template; none if it has no switch for what is asked.

    Args:
        template: the model's.
        effort: one of OpenAI's or Anthropic's levels, or a word of the model's own.
        thinks: whether it is to reason at all; None: unless the effort is "none".
        is_harmony: the template is gpt-oss's, which writes any level, but was trained on three.
    """
    known = template.variables
    if thinks is None and effort is not None:
        thinks = effort != "none"
    found: dict[str, Any] = {} if thinks is None else {name: thinks for name in _SWITCHES if name in known}
    if effort is not None and "reasoning_effort" in known:
        levels = _HARMONY_LEVELS if is_harmony else template.words(_LEVELS)
        found["reasoning_effort"] = _nearest(effort, levels)
    return found


def _nearest(effort: str, levels: tuple[str, ...]) -> str:
    """Return the level, or the next one above it, or else the highest; a single one names a default."""
    if effort not in _LEVELS or len(levels) < 2:
        return effort
    above = [level for level in levels if _LEVELS.index(level) >= _LEVELS.index(effort)]
    return above[0] if above else levels[-1]
