"""One engine process: side channel, HTTP face, agent, and an orderly end."""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from aiohttp import web

from kvplane.engine import sidechannel
from kvplane.engine.config import ENGINE_VERSION, KV_DTYPE, KV_LAYOUT, EngineConfig
from kvplane.engine.core import Engine
from kvplane.engine.http import Face
from kvplane.engine.reuse import Unmanaged
from kvplane.kernel.clock import Clock, SystemClock

if TYPE_CHECKING:
    from kvplane.client.tls import TlsFiles
    from kvplane.worker.agent import WorkerAgent

_log = logging.getLogger("kvplane.engine")
_SHUTDOWN_S = 2.0


@dataclass(frozen=True, slots=True)
class ControlPlane:
    """Where the control plane is, and what this worker calls itself."""

    routing: str
    lease: str
    token: str | None = None
    tls: "TlsFiles | None" = None
    # Empty: made of the role and the HTTP address.
    worker_id: str = ""
    url: str = ""
    # A read that takes longer is given up and computed.
    read_limit_s: float = 5.0
    # How long a request waits for leave to read: under the router's lease, or for one.
    begin_wait_s: float = 0.3
    grant_wait_s: float = 0.5
    # Of its blocks that may be held after requests; beyond that the cheapest are freed.
    max_held_share: float = 0.75


async def run(
    config: EngineConfig,
    control_plane: ControlPlane | None,
    ready: Callable[[dict[str, object]], None],
    stop: asyncio.Event,
    clock: Clock | None = None,
) -> None:
    """Serve until `stop`. `ready` is told where, once all is up."""
    clock = clock or SystemClock()
    engine = Engine(config, clock)
    channel = await sidechannel.serve(config.kv_host, config.kv_port, engine.transfer.introduction)
    engine.kv_port = channel.sockets[0].getsockname()[1]
    runner = web.AppRunner(
        Face(engine, stop.set).app(),
        handler_cancellation=True,
        access_log=None,
        shutdown_timeout=_SHUTDOWN_S,
    )
    await runner.setup()
    await web.TCPSite(runner, config.host, config.port).start()
    url = f"http://{config.host}:{runner.addresses[0][1]}"
    agent = None
    if control_plane is None:
        engine.attach(Unmanaged())
    else:
        from kvplane.engine.managed import Managed  # noqa: PLC0415  brings gRPC along

        agent = _agent(engine, control_plane, url, clock)
        engine.attach(Managed(agent, clock))
        agent.start()
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
    if agent is not None:
        await asyncio.to_thread(agent.close)
    await runner.cleanup()
    channel.close()
    serving.cancel()
    for result in await asyncio.gather(serving, return_exceptions=True):
        if isinstance(result, Exception):
            raise result


def _agent(engine: Engine, control_plane: ControlPlane, url: str, clock: Clock) -> "WorkerAgent":
    from kvplane.worker.agent import AgentConfig, WorkerAgent, WorkerIdentity  # noqa: PLC0415

    config = engine.config
    identity = WorkerIdentity(
        worker_id=control_plane.worker_id or f"{config.role}-{url.removeprefix('http://')}",
        role=config.role,
        url=control_plane.url or url,
        kv_host=config.kv_host,
        kv_port=engine.kv_port,
        engine_id=engine.engine_id,
        model=config.model,
        block_size=config.block_size,
        revision=config.revision,
        kv_layout=KV_LAYOUT,
        kv_dtype=KV_DTYPE,
        engine_version=ENGINE_VERSION,
        bidirectional=config.bidirectional,
        max_model_len=config.max_model_len,
        recompute_threshold=config.kv_recompute_threshold,
        num_blocks=config.num_blocks,
    )
    return WorkerAgent(
        identity,
        AgentConfig(
            routing=control_plane.routing,
            lease=control_plane.lease,
            token=control_plane.token,
            tls=control_plane.tls,
            begin_wait_seconds=control_plane.begin_wait_s,
            grant_wait_seconds=control_plane.grant_wait_s,
            read_limit_seconds=control_plane.read_limit_s,
            max_held_share=control_plane.max_held_share,
        ),
        clock,
    )
