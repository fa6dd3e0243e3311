"""Grammars of whole answers: perhaps reasoning, then tool calls, or content of a form, or either.

All in llguidance's dialect of Lark. Names and schemas come from strangers: they go in as JSON text, whose
end no JSON value can fake.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from octavo.engine.structured.compiling import choice_regex
from octavo.sampling_params import StructuredOutput
from octavo.server.parsing.formats import CallFormat, Markers
from octavo.tokenizer import Tokenizer

Function = tuple[str, Mapping[str, Any]]
"""A function's name and the schema of its arguments."""

_JSON_OPTIONS = {"whitespace_pattern": r"[ \t\r\n]{1,40}"}
_SLASH = re.compile(r"\\.|/|\n", re.DOTALL)
_SLASHES = {"/": r"\/", "\n": r"\n"}


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
    ) -> StructuredOutput:
        """Return the grammar of an answer.

        Args:
            calls: rules of tool calls, from `calls`.
            content: a form that content may have; not a Lark grammar.
            reasoning: markers of reasoning that may come first.
            has_begun: the prompt opened the reasoning, so it must come first.
        """
        rules, bodies = [], []
        if calls is not None:
            rules.append(calls)
            bodies.append("calls")
        if content is not None:
            rules.append(f"content: {_content_rule(content)}")
            bodies.append("content")
        body = f"({' | '.join(bodies)})"
        if reasoning is None:
            return StructuredOutput(grammar="\n".join([f"start: {body}", *rules]))
        begin, end = reasoning
        start = f"start: thought {body}" if has_begun else f"start: ({self._literal(begin)} thought)? {body}"
        special = self.special_id(end)
        if special is None:
            thought = f"thought: thinking space\nthinking[suffix={json.dumps(end)}]: /(?s:.*)/"
        else:
            thought = f"thought: /(?s:.*)/ <[{special}]> space"
        return StructuredOutput(grammar="\n".join([start, thought, r"space: /\n{0,2}/", *rules]))

    def calls(self, form: CallFormat, functions: Sequence[Function], *, parallel: bool) -> str:
        """Return rules for one call or more of these functions, in a model's own format."""
        rules = []
        for number, (name, schema) in enumerate(functions):
            rules += [self._call(form, number, name), f"arguments_{number}: {_json_rule(schema)}"]
        names = " | ".join(f"call_{number}" for number in range(len(functions)))
        one = f"({names})"
        several = f"{one} ({json.dumps(form.separator)} {one})*" if form.separator else f"{one} {one}*"
        body = several if parallel else one
        if form.is_list:
            body = f'{self._texts(form.begin)} "[" {body} "]"'
        return "\n".join([f"calls: {body}", *rules])

    def _call(self, form: CallFormat, number: int, name: str) -> str:
        arguments = f"arguments_{number}"
        if form.arguments_key is None:
            parts = [self._texts(form.begin), json.dumps(name), self._literal("[ARGS]"), arguments]
        else:
            head = f'{{"name": {json.dumps(name)}, "{form.arguments_key}": '
            parts = [json.dumps(head), arguments, '"}"']
            if not form.is_list:
                parts = [self._texts(form.begin), *parts, self._texts(form.end)]
        return f"call_{number}: {' '.join(part for part in parts if part)}"

    def _texts(self, text: str) -> str:
        """Return a marker with white space around it."""
        marker = text.strip()
        if not marker:
            return ""
        before, _, after = text.partition(marker)
        spaces = [json.dumps(space) if space else "" for space in (before, after)]
        return f"{spaces[0]} {self._literal(marker)} {spaces[1]}".strip()

    def _literal(self, marker: str) -> str:
        special = self.special_id(marker)
        return json.dumps(marker) if special is None else f"<[{special}]>"


def _content_rule(content: StructuredOutput) -> str:
    if content.json_object:
        return _json_rule({"type": "object"})
    if content.json_schema is not None:
        schema = json.loads(str(content.json_schema))
        return _json_rule(schema if isinstance(schema, dict) else {})
    if content.choice is not None:
        return f"/{choice_regex(content.choice)}/"
    assert content.regex is not None
    pattern = _SLASH.sub(lambda found: _SLASHES.get(found[0], found[0]), content.regex)
    return f"/{pattern}/"


def _json_rule(schema: Mapping[str, Any]) -> str:
    return f"%json {json.dumps({**schema, 'x-guidance': _JSON_OPTIONS}, ensure_ascii=False)}"
