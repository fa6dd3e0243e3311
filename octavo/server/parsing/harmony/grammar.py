"""Grammars of whole answers in harmony: messages of reasoning, then a call or the last message."""

import json
from collections.abc import Mapping, Sequence

from octavo.errors import StructuredOutputError
from octavo.sampling_params import StructuredOutput
from octavo.server.parsing.grammar_rules import ANY_OBJECT, ANY_TEXT, json_rule
from octavo.server.parsing.grammars import HeldFunction, content_rule
from octavo.server.parsing.harmony.messages import CHANNEL, CONSTRAIN, END, MESSAGE, START, Harmony


def harmony_grammar(
    harmony: Harmony,
    functions: Sequence[HeldFunction],
    *,
    must_call: bool,
    content: StructuredOutput | None,
    channel: str | None,
) -> StructuredOutput:
    """Return the grammar of an answer: one call, or a last message.

    Args:
        harmony: the model's special tokens.
        functions: what may be called.
        must_call: one of them must be called.
        content: a form of the last message; not a Lark grammar. None: any text.
        channel: of the message that the prompt left open.

    Raises:
        StructuredOutputError: a call must follow, but the prompt has begun the last message.
    """
    last = ANY_TEXT if content is None else content_rule(content)
    if channel not in (None, "analysis", "commentary"):
        if must_call:
            raise StructuredOutputError("the prompt has begun the last message, so that no call can follow")
        return StructuredOutput(grammar=f"start: {last}")
    token = {piece: f"<[{token_id}]>" for piece, token_id in harmony.ids.items()}
    ends = f'TEXT {token[END]} {token[START]} "assistant"'
    bodies = [f"call_{number}" for number in range(len(functions))] + ([] if must_call else ["last"])
    rules = [
        f"start: {ends if channel else ''} before* ({' | '.join(bodies)})",
        f'before: {token[CHANNEL]} ("analysis" | "commentary") {token[MESSAGE]} {ends}',
        f"TEXT: {ANY_TEXT}",
        f'last: {token[CHANNEL]} "final" {token[MESSAGE]} content',
        f"content: {last}",
    ]
    return StructuredOutput(grammar="\n".join(rules + _call_rules(token, functions)))


def _call_rules(token: Mapping[str, str], functions: Sequence[HeldFunction]) -> list[str]:
    rules = []
    for number, (name, schema) in enumerate(functions):
        to = json.dumps(f"commentary to=functions.{name} ")
        header = f'{token[CHANNEL]} {to} {token[CONSTRAIN]} "json" {token[MESSAGE]}'
        rules += [
            f"call_{number}: {header} arguments_{number}",
            f"arguments_{number}: {json_rule(ANY_OBJECT if schema is None else schema)}",
        ]
    return rules
