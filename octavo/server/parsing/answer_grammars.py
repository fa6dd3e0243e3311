"""Grammars of whole answers: perhaps reasoning, then tool calls, or content of a form, or either.

They are written in llguidance's dialect of Lark; see grammar_rules.py.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from octavo.engine.structured.compiler import choice_regex
from octavo.errors import StructuredOutputError
from octavo.sampling_params import StructuredOutput
from octavo.server.parsing.call_formats import CallFormat, GemmaFormat, Markers, XmlFormat
from octavo.server.parsing.custom.text_tool import lark_rules
from octavo.server.parsing.gemma.gemma_call import QUOTE
from octavo.server.parsing.gemma.gemma_grammar import gemma_rules
from octavo.server.parsing.grammar_rules import (
    ANY_OBJECT,
    ANY_TEXT,
    json_rule,
    pattern_terminal,
    row,
    without,
)
from octavo.server.parsing.harmony import CHANNEL, CONSTRAIN, END, MESSAGE, START, Harmony
from octavo.server.parsing.xml_grammar import parameter_rules
from octavo.tokenizer import Tokenizer

ConstrainedFunction = tuple[str, Mapping[str, Any] | None]
"""A function's name and the schema that holds for its arguments; None: any object."""

# The beginning of an object that may be a call without a marker; see LlamaReader. White space is Python's.
_SPACES = r"[\s\x1c-\x1f\x85]*"
_BEGINS_LIKE_A_CALL = (
    rf' & ~/{_SPACES}\{{{_SPACES}"(name"|type"|id"|arguments"|parameters"|[^"\\]*\\)(?s:.*)/'
)


class GrammarWriter:
    """Writes grammars for one vocabulary."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def special_id(self, marker: str) -> int | None:
        """Return the id of a marker that is one special token: text never matches that."""
        ids = self._tokenizer.encode(marker, add_special_tokens=False)
        return ids[0] if len(ids) == 1 and ids[0] in self._tokenizer.special_ids else None

    def write(
        self,
        *,
        calls: str | None,
        content: StructuredOutput | None,
        reasoning: Markers | None,
        has_begun: bool,
        free: CallFormat | None = None,
    ) -> StructuredOutput:
        """Return the grammar of an answer.

        Args:
            calls: rules of tool calls, from `calls`.
            content: a form that content may have; not a Lark grammar.
            reasoning: markers of reasoning that may come first.
            has_begun: the prompt opened the reasoning, so it must come first.
            free: format of calls that may follow any text, and need not come.
        """
        rules, bodies = [], []
        if calls is not None:
            rules.append(calls)
            bodies.append("calls" if free is None else "free")
            # A lexer follows a single path: where reasoning may come first, no other text may begin like it.
            opened = "" if reasoning is None or has_begun else reasoning[0]
            rules += [] if free is None else self._free(free, opened)
        if content is not None:
            rules.append(f"content: {content_rule(content)}")
            bodies.append("content")
        body = f"({' | '.join(bodies)})"
        if reasoning is None:
            return StructuredOutput(grammar="\n".join([f"start: {body}", *rules]))
        begin, end = reasoning
        start = f"start: thought {body}" if has_begun else f"start: ({self._literal(begin)} thought)? {body}"
        special = self.special_id(end)
        if special is None:
            thought = f"thought: thinking space\nthinking[suffix={json.dumps(end)}]: {ANY_TEXT}"
        else:
            thought = f"thought: {ANY_TEXT} <[{special}]> space"
        return StructuredOutput(grammar="\n".join([start, thought, r"space: /\n{0,2}/", *rules]))

    def calls(self, form: CallFormat, functions: Sequence[ConstrainedFunction], *, parallel: bool) -> str:
        """Return rules for one call or more of these functions, in a model's own format.

        The rule `calls` is all of it; `rest` is what follows the trigger of the first call.

        Raises:
            StructuredOutputError: the format cannot express a schema.
        """
        before, trigger, after = form.begin.rpartition(form.trigger)
        # Calls without a marker have nothing before them.
        begin, after = self._texts(form, before + trigger), after if trigger else ""
        rules = []
        for number, (name, schema) in enumerate(functions):
            call = row([self._texts(form, after), *self._call(form, f"arguments_{number}", name)])
            rules += [f"call_{number}: {call}", *self._arguments(form, f"arguments_{number}", schema)]
        one = f"({' | '.join(f'call_{number}' for number in range(len(functions)))})"
        separator = json.dumps(form.separator) if form.separator else ""
        another = row([separator, "" if form.is_list else begin, one])
        several = f"{one} ({another})*" if parallel else one
        rest = f'"[" {several} "]"' if form.is_list else several
        return "\n".join([f"calls: {row([begin, 'rest'])}", f"rest: {rest}", *rules])

    def _free(self, form: CallFormat, opened: str) -> list[str]:
        """Return rules of any text, in which nothing but calls follows the trigger.

        Args:
            form: format of the calls.
            opened: how the text may not begin.
        """
        special = self.special_id(form.trigger)
        text = ANY_TEXT + (_BEGINS_LIKE_A_CALL if form.is_bare else "")
        text += f" & ~/{choice_regex([opened])}(?s:.*)/" if opened else ""
        bare = " | calls" if form.is_bare else ""
        if special is not None:
            return [f"free: TEXT (<[{special}]> rest)?{bare}", f"TEXT: {text}"]
        until = f"until[suffix={json.dumps(form.trigger)}]: {text}"
        return [f"free: TEXT | until rest{bare}", until, f"TEXT: {text}{without(form.trigger)}"]

    def _call(self, form: CallFormat, arguments: str, name: str) -> list[str]:
        if isinstance(form, XmlFormat):
            named = f"{json.dumps(name + form.tags.end_name)} {form.tags.gap}"
            return [named, arguments, self._texts(form, form.end)]
        if isinstance(form, GemmaFormat):
            return [json.dumps(name), arguments, self._texts(form, form.end)]
        if form.arguments_key is None:
            return [json.dumps(name), self._literal("[ARGS]"), arguments]
        head = json.dumps(f'{{"name": {json.dumps(name)}, "{form.arguments_key}": ')
        return [head, arguments, '"}"', "" if form.is_list else self._texts(form, form.end)]

    def _texts(self, form: CallFormat, text: str) -> str:
        """Return a text in which markers may be special tokens."""
        parts = re.split(f"({'|'.join(map(re.escape, form.markers))})", text)
        return row(
            self._literal(part) if part in form.markers else json.dumps(part) for part in parts if part
        )

    def _arguments(self, form: CallFormat, rule: str, schema: Mapping[str, Any] | None) -> list[str]:
        if isinstance(form, XmlFormat):
            return parameter_rules(rule, schema, form.tags)
        if isinstance(form, GemmaFormat):
            return gemma_rules(rule, schema, self._literal(QUOTE))
        return json_arguments(rule, schema)

    def _literal(self, marker: str) -> str:
        """Return a marker, which may be a special token, or begin with one."""
        head, end, tail = marker.partition(">")
        for part, rest in ((marker, ""), (head + end, tail)):
            if (special := self.special_id(part)) is not None:
                return row([f"<[{special}]>", json.dumps(rest) if rest else ""])
        return json.dumps(marker)


def content_rule(content: StructuredOutput) -> str:
    """Return a rule of content of a form; not of a Lark grammar."""
    if content.json_object:
        return json_rule(ANY_OBJECT)
    if content.json_schema is not None:
        schema = json.loads(str(content.json_schema))
        return json_rule(schema if isinstance(schema, dict) else {})
    if content.choice is not None:
        return f"/{choice_regex(content.choice)}/"
    assert content.regex is not None
    return pattern_terminal(content.regex)


def json_arguments(rule: str, schema: Mapping[str, Any] | None) -> list[str]:
    """Return rules of a call's arguments in JSON."""
    of_text = lark_rules(rule, schema, None)
    return of_text or [f"{rule}: {json_rule(ANY_OBJECT if schema is None else schema)}"]


def harmony_grammar(
    harmony: Harmony,
    functions: Sequence[ConstrainedFunction],
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
        channel: that of the message the prompt left open, if any.

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


def _call_rules(token: Mapping[str, str], functions: Sequence[ConstrainedFunction]) -> list[str]:
    rules = []
    for number, (name, schema) in enumerate(functions):
        to = json.dumps(f"commentary to=functions.{name} ")
        header = f'{token[CHANNEL]} {to} {token[CONSTRAIN]} "json" {token[MESSAGE]}'
        rules += [f"call_{number}: {header} arguments_{number}"]
        rules += json_arguments(f"arguments_{number}", schema)
    return rules
