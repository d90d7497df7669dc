"""What one sampled token does to its row: text, stop, length, and the events that say so."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..runtime.events import TextDelta

if TYPE_CHECKING:
    from ..runtime.events import PositionLogprobs
    from ..runtime.request import Request


def accept(request: Request, token: int, logprobs: PositionLogprobs | None, now_s: float) -> bool:
    """Add one token to a running row and tell its listener; True when that ended the row.

    A stop token counts as output and is in the last delta's `tokens`, but not in its text. Text still held back
    is released when the row ends by a stop token or by its length; a stop string in it wins.
    """
    output = request.output
    output.append(token)
    if request.last_token_s is None:
        request.first_token_s = now_s
    elif request.gaps is not None:
        request.gaps.observe(now_s - request.last_token_s)
    request.last_token_s = now_s
    text = request.text
    position = None if logprobs is None else (logprobs,)
    stop: str | int | None = None
    if token in request.stop_tokens:
        stop = token
        piece = text.finish()
    else:
        piece = text.add(token)
        if text.stopped is None:
            if len(output) < request.max_tokens:
                request.events.push(TextDelta(piece, (token,), position, request.index))
                return False
            piece += text.finish()
    if text.stopped is not None:
        stop = text.stopped
    request.events.push(TextDelta(piece, (token,), position, request.index))
    return request.finish("length" if stop is None else "stop", now_s, stop=stop)
