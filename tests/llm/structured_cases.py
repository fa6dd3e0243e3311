"""Structured outputs, and checks that a text is what was asked for."""

import json
import math
import re

from octavo import LLM, SamplingParams, StructuredOutput

PROMPTS = [[7, 3, 900, 1, 4], [7, 3, 900, 1, 4, 11, 12], [5, 8]]
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "é", None, 3]}, "maxItems": 3},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
ARITHMETIC = r"""
start: sum
sum: product (("+" | "-") product){0,3}
product: NUMBER | "(" NUMBER "*" NUMBER ")"
NUMBER: /[0-9]{1,3}/
"""
DATE = r"[0-9]{4}-(0[1-9]|1[0-2])-[0-3][0-9]"
CHOICES = ["yes", "no", "naïve 😀", "no more"]
KINDS = {
    "json_schema": StructuredOutput(json_schema=SCHEMA),
    "regex": StructuredOutput(regex=DATE),
    "choice": StructuredOutput(choice=CHOICES),
    "grammar": StructuredOutput(grammar=ARITHMETIC),
}


def is_valid(value: object, schema: dict) -> bool:
    """JSON Schema as far as these tests use it."""
    if "enum" in schema:
        return any(value == item and type(value) is type(item) for item in schema["enum"])
    if "anyOf" in schema:
        return any(is_valid(value, one) for one in schema["anyOf"])
    match schema["type"], value:
        case "object", dict():
            properties = schema["properties"]
            return set(schema["required"]) <= set(value) <= set(properties) and all(
                is_valid(item, properties[name]) for name, item in value.items()
            )
        case "array", list():
            is_long_enough = schema.get("minItems", 0) <= len(value) <= schema["maxItems"]
            return is_long_enough and all(is_valid(item, schema["items"]) for item in value)
        case "string", str():
            return schema.get("minLength", 0) <= len(value) <= schema["maxLength"]
        case "integer" | "number" as kind, int() | float() if not isinstance(value, bool):
            is_whole = isinstance(value, int) or value == math.floor(value)
            is_in_range = schema.get("minimum", -math.inf) <= value <= schema.get("maximum", math.inf)
            return is_in_range and (kind == "number" or is_whole)
        case "boolean", bool():
            return True
        case "null", None:
            return True
    return False


def fits(structured: StructuredOutput, text: str) -> bool:
    """Whether a text is what was asked for, judged by other means than llguidance."""
    if structured.kind == "json_schema":
        return is_valid(json.loads(text), json.loads(str(structured.json_schema)))
    if structured.kind == "regex":
        return re.fullmatch(str(structured.regex), text) is not None
    if structured.kind == "choice":
        return text in CHOICES
    number = r"[0-9]{1,3}"
    product = rf"({number}|\({number}\*{number}\))"
    return re.fullmatch(rf"{product}([+-]{product}){{0,3}}", text) is not None


def params_of(kind: str, **fields: object) -> SamplingParams:
    return SamplingParams.from_dict({"max_tokens": 200, "seed": 1, "structured": KINDS[kind], **fields})


def all_tokens(llm: LLM, params: list[SamplingParams]) -> list[list[list[int]]]:
    outputs = llm.generate(PROMPTS[: len(params)], params)
    return [[completion.token_ids for completion in output.outputs] for output in outputs]
