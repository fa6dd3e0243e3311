"""Structured output: grammars say which tokens may come next. Needs llguidance (`octavo[structured]`)."""

from octavo.engine.structured.compiler import Grammars
from octavo.engine.structured.matcher import Grammar, Matcher

__all__ = ["Grammar", "Grammars", "Matcher"]
