"""From tokens to text: pieces, stop strings, and what an answer ends with."""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass

from kvplane.engine.core import Engine
from kvplane.engine.openai import Call
from kvplane.engine.reuse import Params
from kvplane.engine.tokenizer import decode


@dataclass(frozen=True, slots=True)
class Piece:
    """One token and the text that it lets out; the last piece has a finish_reason."""

    token: int
    text: str
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    params: Params | None = None


async def pieces(engine: Engine, call: Call) -> AsyncGenerator[Piece, None]:
    """Yield an answer piece by piece.

    A stop string ends it as in vLLM: the request is aborted, so nothing is held and no
    kv_transfer_params come back.
    """
    request, keep = call.request, max((len(stop) for stop in call.stop), default=1) - 1
    text, sent = "", 0
    async with aclosing(engine.generate(request)) as tokens:
        async for token in tokens:
            text += decode((token,))
            hit = _first_stop(text, call.stop)
            if hit is not None:
                at, stop = hit
                yield Piece(token, text[sent:at], "stop", stop)
                return
            finished = request.finish_reason is not None
            end = len(text) if finished else max(len(text) - keep, sent)
            yield Piece(
                token,
                text[sent:end],
                request.finish_reason,
                request.stop_reason,
                request.returned,
            )
            sent = end


def _first_stop(text: str, stops: tuple[str, ...]) -> tuple[int, str] | None:
    found = [(text.find(stop), stop) for stop in stops if stop in text]
    return min(found) if found else None
