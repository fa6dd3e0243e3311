"""Holds an answer to the tools that must be called, to strict ones, and to its form after the reasoning."""

from dataclasses import replace
from typing import TYPE_CHECKING

from octavo.errors import StructuredOutputError
from octavo.sampling_params import SamplingParams, StructuredOutput
from octavo.server.errors import ApiError, refused
from octavo.server.parsing.answer_grammars import GrammarWriter, HeldFunction, content_rule, harmony_grammar
from octavo.tokenizer import Tokenizer

if TYPE_CHECKING:
    from octavo.server.api.tools.toolbox import Toolbox


def held_params(box: "Toolbox", params: SamplingParams, tokenizer: Tokenizer) -> SamplingParams:
    """Return parameters whose grammar says what a chat's tools and its form of content ask for.

    Raises:
        ApiError: the schemas are too large, or the model's format cannot express one.
    """
    formats, writer = box.formats, GrammarWriter(tokenizer)
    markers = [
        *(formats.reasoning or ()),
        *(formats.calls.markers if box.functions and formats.calls else ()),
    ]
    if formats.harmony is not None or any(writer.special_id(marker) is not None for marker in markers):
        params = replace(params, skip_special_tokens=False)
    content = params.structured
    is_held = content is not None and content.grammar is None and content.json_schema != "false"
    functions = _held_functions(box, is_held=is_held)
    has_reasoning = formats.reasoning is not None or formats.harmony is not None
    if not functions and not (is_held and has_reasoning):
        return params
    if is_held and content is not None:
        _check_content(content)
    try:
        return replace(params, structured=_grammar(box, writer, functions, content))
    except StructuredOutputError as error:
        raise refused("tools", f"cannot be held to their schemas: {error}") from error


def _check_content(content: StructuredOutput) -> None:
    """Check the form alone, so that an error of it does not blame the tools."""
    try:
        content_rule(content)
    except StructuredOutputError as error:
        raise ApiError(400, f"{content.kind} cannot be used: {error}", param=content.kind) from error


def _held_functions(box: "Toolbox", *, is_held: bool) -> list[HeldFunction]:
    """Return the functions that a grammar must know; none: no grammar constrains calls."""
    if box.must_call or is_held:
        return list(box.functions)
    held = [(name, schema if name in box.strict else None) for name, schema in box.functions]
    return held if any(schema is not None for _, schema in held) else []


def _grammar(
    box: "Toolbox", writer: GrammarWriter, functions: list[HeldFunction], content: StructuredOutput | None
) -> StructuredOutput:
    formats = box.formats
    if formats.harmony is not None:
        return harmony_grammar(
            formats.harmony.harmony,
            functions,
            must_call=box.must_call,
            content=content,
            channel=box.channel,
        )
    calls = free = None
    if functions and formats.calls is not None:
        calls = writer.calls(formats.calls, functions, parallel=box.parallel)
        free = formats.calls if not box.must_call and content is None else None
    return writer.write(
        calls=calls,
        content=content,
        reasoning=formats.reasoning,
        has_begun=box.has_begun_reasoning,
        free=free,
    )
