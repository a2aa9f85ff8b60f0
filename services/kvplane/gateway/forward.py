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
from kvplane.gateway.failures import error_of_stream, unavailable, upstream_failed
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
# A client that does not read cannot keep a broken stream for ever.
_LAST_WORDS_S: Final = 5.0
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
        self._any = re.compile(b'"(?:%b)"' % b"|".join(sorted(top)))
        self._choices = _NEVER | _TOKEN_IDS if turn.asks_token_ids else _NEVER

    def json(self, data: bytes) -> bytes:
        """Return an answer as the client gets it."""
        if self._any.search(data) is None:
            return data
        return without(data, self._top, self._choices)

    def event(self, event: bytes, data: bytes, chunk: Any) -> bytes:
        """Return an event as the client gets it; empty for one that only we asked for."""
        if self._usage and _only_usage(chunk):
            return b""
        edited = self.json(data)
        return event if edited is data else with_data(event, edited)


def _only_usage(chunk: Any) -> bool:
    if not isinstance(chunk, dict) or chunk.get("choices") != []:
        return False
    return chunk.get("usage") is not None and "error" not in chunk


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
                "Content-Type": self._answer.content_type,
                "Cache-Control": "no-cache",
                "X-Accel-Buffering": "no",
                **headers,
            }
        )
        await response.prepare(self._http)
        failure = None
        try:
            await self._pump()
        except Interrupted:
            failure = unavailable("The worker was lost in the middle of the answer.")
        except (TimeoutError, _Broken, InvalidField) as error:
            log.warning("a stream broke", error=repr(error))
            failure = upstream_failed("The worker broke off in the middle of the answer.")
        if failure is not None:
            await _complete(self._turn, session.TURN_OUTCOME_FAILED, self._reply)
        elif not self._ended:
            await _complete(self._turn, _outcome(self._reply), self._reply)
        seconds = self._turn.parts.config.write_timeout_s
        if failure is not None:
            seconds = min(seconds, _LAST_WORDS_S)
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
            events = answer.events
            while True:
                await self._send(events)
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
                events = answer.splitter.feed(chunk)
        await self._send_rest(answer.splitter.rest)

    async def _send(self, events: list[bytes]) -> None:
        """Forward whole events in one piece, but for the end: Complete goes before it."""
        out: list[bytes] = []
        for event in events:
            data = event_data(event)
            if data is None:
                out.append(event)
            elif data.strip() == DONE:
                await self._write(out)
                out = [event]
                if not self._ended:
                    self._ended = True
                    await _complete(self._turn, _outcome(self._reply), self._reply)
            else:
                out.append(self._take(event, data))
        await self._write(out)

    async def _send_rest(self, rest: bytes) -> None:
        """Forward what came after the last empty line, if it is whole; tell a break."""
        if rest.strip():
            data = event_data(rest)
            if data is None or (data.strip() != DONE and not _is_json(data)):
                rest = b""
            else:
                await self._send([rest])
        if not self._ended and not self._reply.finish_reason and self._reply.error is None:
            raise _Broken("the stream ended without an end")

    def _take(self, event: bytes, data: bytes) -> bytes:
        try:
            chunk = _parsed(data)
        except ValueError:
            # Nobody can read it; but it must not carry what is not the client's either.
            return b"" if any(name in data for name in _NEVER) else event
        self._reply.add(chunk)
        if isinstance(chunk, dict) and chunk.get("error"):
            return with_data(event, orjson.dumps({"error": error_of_stream(chunk["error"])}))
        return self._edit.event(event, data, chunk)

    async def _write(self, parts: list[bytes]) -> None:
        data = parts[0] if len(parts) == 1 else b"".join(parts)
        if data:
            seconds = self._turn.parts.config.write_timeout_s
            await bounded(self._http, self._response.write(data), seconds)


def _parsed(data: bytes) -> Any:
    """Parse JSON, and what Python writes for JSON: NaN and Infinity. Raises ValueError."""
    try:
        return orjson.loads(data)
    except orjson.JSONDecodeError:
        pass
    try:
        return json.loads(data)
    except RecursionError as error:
        raise ValueError("nested too deep") from error


def _is_json(data: bytes) -> bool:
    try:
        _parsed(data)
    except ValueError:
        return False
    return True
