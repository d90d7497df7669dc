"""Structured output: grammars from requests to constraints that mask a row's tokens (llguidance)."""

from .service import GrammarService
from .spec import Grammar, GrammarFailed
from .thought import ThoughtPlan

__all__ = ["Grammar", "GrammarFailed", "GrammarService", "ThoughtPlan"]
