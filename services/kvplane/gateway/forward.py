"""The decode's answer on its way to the client: at once, without what is not the client's."""

import asyncio
import json
import re
from collections.abc import Mapping
from typing import Any, Final

import aiohttp
import orjson
import structlog
from aiohttp import web

from kvplane.api.session.v1 import session_pb2 as session
from kvplane.gateway.edge import bounded
from kvplane.gateway.failures import Failure, error_inside, unavailable, upstream_failed
from kvplane.gateway.jsonedit import without
from kvplane.gateway.legs import Answer
from kvplane.gateway.reply import Reply
from kvplane.gateway.stream import DONE, event_data, with_data
from kvplane.gateway.turn import Turn
from kvplane.gateway.workers import Interrupted
from kvplane.kernel.errors import InvalidField

log = structlog.get_logger(__name__)

# Never a client's business, whoever asked for it.
_NEVER: Final = frozenset({b"kv_transfer_params", b"ec_transfer_params"})
_NAMED: Final = re.compile(b"|".join(sorted(_NEVER)))
# Bytes of a whole answer in one write.
_PIECE: Final = 64 * 1024
_TOKEN_IDS: Final = frozenset({b"prompt_token_ids", b"token_ids"})


class Edit:
    """Takes out of answers what the client did not ask for."""

    def __init__(self, turn: Turn) -> None:
        self._usage = turn.asks_usage
        top = set(_NEVER)
        if turn.asks_usage:
            top.add(b"usage")
        if turn.asks_token_ids:
            top |= _TOKEN_IDS
        self._top = frozenset(top)
        # A letter of a name can be written as \u and four digits.
        self._any = re.compile(rb'"(?:%b)"|\\u' % b"|".join(sorted(top)))
        self._choices = _TOKEN_IDS if turn.asks_token_ids else frozenset()

    def json(self, data: bytes) -> bytes:
        """Return an answer as the client gets it."""
        if self._any.search(data) is None:
            return data
        return without(data, self._top, self._choices, _NEVER)

    def event(self, event: bytes, data: bytes, chunk: Mapping[str, Any]) -> bytes:
        """Return an event as the client gets it; empty for one that only we asked for."""
        if chunk.get("error"):
            said = orjson.dumps({"error": error_inside(chunk["error"]).error})
            return with_data(event, said, _NAMED)
        if self._usage and _only_usage(chunk):
            return b""
        edited = self.json(data)
        if edited is data and _NAMED.search(event) is None:
            return event
        return with_data(event, edited, _NAMED)


def _only_usage(chunk: Mapping[str, Any]) -> bool:
    return chunk.get("choices") == [] and chunk.get("usage") is not None


async def forward(
    turn: Turn, answer: Answer, http: web.Request, headers: Mapping[str, str]
) -> web.StreamResponse:
    """Send the answer to the client and complete the turn."""
    if answer.events is None:
        return await _whole(turn, answer, http, headers)
    stream = _Stream(turn, answer, http)
    return await stream.run(headers)


async def _whole(
    turn: Turn, answer: Answer, http: web.Request, headers: Mapping[str, str]
) -> web.StreamResponse:
    reply = Reply()
    try:
        reply.add(_parsed(answer.body))
    except ValueError as error:
        raise upstream_failed("The worker's answer cannot be read.") from error
    if reply.error is not None:
        raise error_inside(reply.error)
    body = Edit(turn).json(answer.body)
    await _complete(turn, _outcome(reply), reply)
    headers = {"Content-Type": "application/json", **headers}
    if len(body) <= _PIECE:
        return web.Response(body=body, headers=headers)
    response = web.StreamResponse(headers=headers)
    response.content_length = len(body)
    seconds = turn.parts.config.write_timeout_s
    await response.prepare(http)
    for start in range(0, len(body), _PIECE):
        await bounded(http, response.write(body[start : start + _PIECE]), seconds)
    await bounded(http, response.write_eof(), seconds)
    return response


async def _complete(turn: Turn, outcome: session.TurnOutcome, reply: Reply) -> None:
    """Tell the control plane before the client can send its next turn, if that is quick."""
    task = turn.complete(outcome, reply)
    if task is not None:
        await asyncio.wait([task], timeout=turn.parts.config.complete_wait_s)


def _outcome(reply: Reply) -> session.TurnOutcome:
    if reply.error is not None or reply.finish_reason in ("", "abort", "error"):
        return session.TURN_OUTCOME_FAILED
    return session.TURN_OUTCOME_OK


class _Broken(Exception):
    """The engine did not end its stream."""


class _Stream:
    """One stream of events."""

    def __init__(self, turn: Turn, answer: Answer, http: web.Request) -> None:
        self._turn, self._answer, self._http = turn, answer, http
        self._edit = Edit(turn)
        self._reply = Reply()
        self._ended = False
        self._response = web.StreamResponse()

    async def run(self, headers: Mapping[str, str]) -> web.StreamResponse:
        response = self._response
        response.headers.update(
            {
                "Content-Type": "text/event-stream; charset=utf-8",
                "Cache-Control": "no-cache",
                "X-Accel-Buffering": "no",
                **headers,
            }
        )
        await response.prepare(self._http)
        failure = None
        try:
            async with asyncio.timeout(self._turn.parts.config.stream_timeout_s):
                await self._pump()
        except Interrupted:
            failure = unavailable("The worker was lost in the middle of the answer.")
        except ConnectionResetError:
            raise
        except (TimeoutError, _Broken, InvalidField) as error:
            log.warning("a stream broke", error=repr(error))
            failure = upstream_failed("The worker broke off in the middle of the answer.")
        except Exception:  # another answer in the middle of this one would be no HTTP
            log.exception("a stream failed")
            failure = Failure(500, "Something went wrong.", kind="server_error")
        if failure is not None:
            await _complete(self._turn, session.TURN_OUTCOME_FAILED, self._reply)
        elif not self._ended:
            await _complete(self._turn, _outcome(self._reply), self._reply)
        seconds = self._turn.parts.config.write_timeout_s
        if failure is not None:
            await bounded(self._http, response.write(failure.event()), seconds)
        await bounded(self._http, response.write_eof(), seconds)
        return response

    async def _pump(self) -> None:
        config, answer = self._turn.parts.config, self._answer
        assert answer.events is not None
        assert answer.splitter is not None
        assert self._turn.plan is not None
        target = self._turn.plan.decode
        async with self._turn.parts.watch.guard(
            config.idle_timeout_s, target, patience=config.lost_idle_timeout_s
        ) as guard:
            events, size = answer.events, 0
            while True:
                if await self._send(events):  # comments alone are no sign of life
                    lost = guard.interrupted is not None
                    guard.extend(config.lost_idle_timeout_s if lost else config.idle_timeout_s)
                try:
                    chunk = await answer.response.content.readany()
                except (aiohttp.ClientError, OSError) as error:
                    if self._ended:
                        return
                    raise _Broken(repr(error)) from error
                if not chunk:
                    break
                size += len(chunk)
                if size > config.max_stream_bytes:
                    raise _Broken(f"the stream is longer than {config.max_stream_bytes} bytes")
                events = answer.splitter.feed(chunk)
        await self._send_rest(answer.splitter.rest)

    async def _send(self, events: list[bytes]) -> bool:
        """Forward whole events in one piece, but for the end: Complete goes before it.

        Returns whether one of them said something.
        """
        out: list[bytes] = []
        said = False
        for event in events:
            data = event_data(event)
            if data is None:
                out.append(with_data(event, b"", _NAMED) if _NAMED.search(event) else event)
            elif data.strip() == DONE:
                await self._write(out)
                out = [event]
                if not self._ended:
                    self._ended = True
                    await _complete(self._turn, _outcome(self._reply), self._reply)
            elif (chunk := _chunk(data)) is not None:  # nobody could read the others
                said = True
                self._reply.add(chunk)
                out.append(self._edit.event(event, data, chunk))
        await self._write(out)
        return said

    async def _send_rest(self, rest: bytes) -> None:
        """Forward what came after the last empty line, if it is whole; tell a break."""
        if rest.strip():
            data = event_data(rest)
            if data is None or (data.strip() != DONE and _chunk(data) is None):
                rest = b""
            else:
                await self._send([rest])
        if not self._ended and not self._reply.finish_reason and self._reply.error is None:
            raise _Broken("the stream ended without an end")

    async def _write(self, parts: list[bytes]) -> None:
        data = parts[0] if len(parts) == 1 else b"".join(parts)
        if data:
            seconds = self._turn.parts.config.write_timeout_s
            await bounded(self._http, self._response.write(data), seconds)


def _parsed(data: bytes) -> dict[str, Any]:
    """Parse a JSON object, and what Python writes for JSON: NaN and Infinity.

    Raises ValueError, also for what is no object.
    """
    try:
        parsed = orjson.loads(data)
    except orjson.JSONDecodeError:
        try:
            parsed = json.loads(data.decode("utf-8-sig"))
        except RecursionError as error:
            raise ValueError("nested too deep") from error
    if not isinstance(parsed, dict):
        raise ValueError("not an object")  # noqa: TRY004 - as the parsers do
    return parsed


def _chunk(data: bytes) -> dict[str, Any] | None:
    """Return the chunk of a stream in an event's data, None for what is none."""
    try:
        return _parsed(data)
    except ValueError:
        return None
