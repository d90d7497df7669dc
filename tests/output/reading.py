"""Parts put together again."""

import json

from mlx_troupe.runtime.output import CallPart, TextPart, ThoughtPart
from mlx_troupe.runtime.output.parts import Tools
from mlx_troupe.runtime.output.splitter import TaggedSplitter

from .samples import TOOLS, dialect


def splitter(parser="json_tools", *, in_thought=False, eager=False, tools=TOOLS, thinks=True):
    return TaggedSplitter(
        dialect(parser, thinks=thinks), Tools(tools) if tools else None, in_thought=in_thought, eager=eager
    )


class Read:
    """What a splitter made of some text."""

    def __init__(self, made, pieces) -> None:
        parts = [part for piece in pieces for part in made.feed(piece)] + made.finish()
        self.text = "".join(part.text for part in parts if isinstance(part, TextPart))
        self.thought = "".join(part.text for part in parts if isinstance(part, ThoughtPart))
        self.raw_calls: dict[int, list] = {}
        self.ids = []
        for part in parts:
            if isinstance(part, CallPart):
                if part.id:
                    self.ids.append(part.id)
                    assert part.call == len(self.raw_calls)
                    self.raw_calls[part.call] = [part.name, ""]
                else:
                    assert not part.name
                self.raw_calls[part.call][1] += part.arguments
        assert made.calls == len(self.raw_calls)
        self.parts = parts
        self.made = made

    @property
    def calls(self):
        return [(name, json.loads(arguments)) for name, arguments in self.raw_calls.values()]

    @property
    def all(self):
        return self.text, self.thought, list(self.raw_calls.values())


def read(text, cut=None, **options) -> Read:
    pieces = [text] if cut is None else [text[at : at + cut] for at in range(0, len(text), cut)]
    return Read(splitter(**options), pieces)
