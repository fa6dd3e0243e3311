"""Structured output: grammars say which tokens may come next. Needs llguidance (`octavo[structured]`)."""

from octavo.engine.structured.grammar import Grammar, Matcher
from octavo.engine.structured.grammars import Grammars

__all__ = ["Grammar", "Grammars", "Matcher"]
