"""One engine process: side channel, HTTP face, agent, and an orderly end."""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass

from aiohttp import web

from kvplane.engine import sidechannel
from kvplane.engine.config import EngineConfig
from kvplane.engine.core import Engine
from kvplane.engine.http import Face
from kvplane.engine.reuse import Unmanaged
from kvplane.kernel.clock import Clock, SystemClock

_log = logging.getLogger("kvplane.engine")
_SHUTDOWN_S = 2.0


@dataclass(frozen=True, slots=True)
class ControlPlane:
    """Where the control plane is, and what this worker calls itself."""

    routing: str
    lease: str
    token: str | None = None
    # Empty: made of the role and the HTTP address.
    worker_id: str = ""
    url: str = ""


async def run(
    config: EngineConfig,
    control_plane: ControlPlane | None,
    ready: Callable[[dict[str, object]], None],
    stop: asyncio.Event,
    clock: Clock | None = None,
) -> None:
    """Serve until `stop`. `ready` is told where, once all is up."""
    engine = Engine(config, clock or SystemClock())
    channel = await sidechannel.serve(config.kv_host, config.kv_port, engine.transfer.introduction)
    engine.kv_port = channel.sockets[0].getsockname()[1]
    engine.attach(Unmanaged())
    runner = web.AppRunner(
        Face(engine, stop.set).app(),
        handler_cancellation=True,
        access_log=None,
        shutdown_timeout=_SHUTDOWN_S,
    )
    await runner.setup()
    site = web.TCPSite(runner, config.host, config.port)
    await site.start()
    port = runner.addresses[0][1]
    url = f"http://{config.host}:{port}"
    serving = asyncio.create_task(engine.run())
    serving.add_done_callback(lambda _: stop.set())
    ready(
        {
            "url": url,
            "kv_host": config.kv_host,
            "kv_port": engine.kv_port,
            "engine_id": engine.engine_id,
            "role": config.role,
        }
    )
    _log.info("engine %s serves on %s", engine.engine_id, url)
    await stop.wait()
    _log.info("engine %s stops", engine.engine_id)
    await runner.cleanup()
    channel.close()
    serving.cancel()
    await asyncio.gather(serving, return_exceptions=True)
