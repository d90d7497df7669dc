"""What a model wrote, taken apart: thoughts, tool calls and the answer."""

from .outputs import Outputs, Prepared
from .parts import CallPart, Part, TextPart, ThoughtPart
from .splitter import Splitter

__all__ = ["CallPart", "Outputs", "Part", "Prepared", "Splitter", "TextPart", "ThoughtPart"]
