"""Fault injection and a look inside, under /debug. Only with --debug."""

import os
import signal
import subprocess
from dataclasses import asdict
from typing import Any

from aiohttp import web

from kvplane.engine.core import Engine
from kvplane.kernel.errors import InvalidField

_MAX_FREEZE_S = 600.0


def add_routes(app: web.Application, engine: Engine) -> None:
    """Add the routes; every answer is the state after the call."""

    async def state(_: web.Request) -> web.Response:
        return web.json_response(snapshot(engine))

    async def faults(http: web.Request) -> web.Response:
        engine.faults.update(await _object(http))
        return web.json_response(snapshot(engine))

    async def freeze(http: web.Request) -> web.Response:
        seconds = (await _object(http)).get("seconds")
        if isinstance(seconds, bool) or not isinstance(seconds, int | float):
            raise InvalidField("seconds", "must be a number")
        if not 0 < seconds <= _MAX_FREEZE_S:
            raise InvalidField("seconds", f"must be above 0 and at most {_MAX_FREEZE_S:g}")
        answer = web.json_response(snapshot(engine))
        await answer.prepare(http)
        await answer.write_eof()
        _stop_for(seconds)
        return answer

    app.router.add_get("/debug/state", state)
    app.router.add_post("/debug/faults", faults)
    app.router.add_post("/debug/freeze", freeze)


def snapshot(engine: Engine) -> dict[str, Any]:
    """Return blocks, holds, faults and counters."""
    now = engine.clock.monotonic()
    return {
        "engine_id": engine.engine_id,
        "managed": engine.reuse.managed,
        "dead": engine.dead,
        "blocks": {
            "total": engine.config.num_blocks,
            "in_use": engine.blocks.pool.in_use,
            "held": sum(len(pin.blocks) for pin in engine.blocks.pins.held()),
            "quarantined": engine.reader.parked_blocks,
        },
        "held": [
            {
                "request_id": pin.request_id,
                "blocks": pin.blocks,
                "left_s": round(pin.deadline - now, 3),
                "by_decode": pin.by_decode,
            }
            for pin in engine.blocks.pins.held()
        ],
        "faults": asdict(engine.faults),
        "stats": asdict(engine.stats),
    }


async def _object(http: web.Request) -> dict[str, Any]:
    try:
        body = await http.json()
    except ValueError as error:
        raise InvalidField("body", f"is not JSON: {error}") from error
    if not isinstance(body, dict):
        raise InvalidField("body", "must be a JSON object")
    return body


def _stop_for(seconds: float) -> None:
    """Stop this whole process, as a hung machine would, and have it woken again."""
    me = os.getpid()
    subprocess.Popen(  # noqa: S603  only numbers go in
        ["/bin/sh", "-c", f"sleep {seconds:f}; kill -CONT {me}"],
        start_new_session=True,
    )
    os.kill(me, signal.SIGSTOP)
