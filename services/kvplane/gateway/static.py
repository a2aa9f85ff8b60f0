"""Workers that the gateway registers, since they run without our connector."""

import asyncio
import contextlib
import dataclasses
from typing import Final

import aiohttp
import structlog

from kvplane.api.routing.v1 import routing_pb2 as routing
from kvplane.client.api import WorkerApi
from kvplane.gateway.config import GatewayConfig, StaticWorker
from kvplane.gateway.upstream import Upstream
from kvplane.kernel.clock import Clock
from kvplane.kernel.errors import KvplaneError, NotFound

log = structlog.get_logger(__name__)

_PROBE_S: Final = 2.0
_ROLES: Final = {
    "prefill": routing.WORKER_ROLE_PREFILL,
    "decode": routing.WORKER_ROLE_DECODE,
    "both": routing.WORKER_ROLE_BOTH,
}


class StaticWorkers:
    """Registers engines when they answer /health, and beats for them while they do."""

    def __init__(
        self, api: WorkerApi, upstream: Upstream, clock: Clock, config: GatewayConfig
    ) -> None:
        self._api, self._upstream = api, upstream
        self._clock, self._config = clock, config
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Begin; engines may come later."""
        self._tasks = [
            asyncio.create_task(self._keep(worker), name=f"static worker {worker.worker_id}")
            for worker in self._config.static_workers
        ]

    async def stop(self) -> None:
        """Stop beating; the registry will notice."""
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    async def _keep(self, worker: StaticWorker) -> None:
        epoch: int | None = None
        while True:
            try:
                if not await self._healthy(worker):
                    # It may come back as another process: register again then.
                    epoch = None
                elif epoch is None:
                    epoch = await self._register(worker)
                elif not await self._beat(worker, epoch):
                    epoch = await self._newer(worker, epoch) or await self._register(worker)
            except (KvplaneError, aiohttp.ClientError, TimeoutError, OSError) as error:
                log.info("a static worker is not up", worker=worker.worker_id, error=str(error))
            await self._clock.sleep(self._config.health_interval_s)

    async def _healthy(self, worker: StaticWorker) -> bool:
        try:
            status, _ = await self._upstream.get(f"{worker.url.rstrip('/')}/health", _PROBE_S)
        except (aiohttp.ClientError, TimeoutError, OSError):
            return False
        return status == 200

    async def _beat(self, worker: StaticWorker, epoch: int) -> bool:
        answer = await self._api.Heartbeat(
            routing.HeartbeatRequest(
                beats=[routing.WorkerBeat(worker_id=worker.worker_id, epoch=epoch)]
            )
        )
        return bool(answer.results) and answer.results[0].known

    async def _newer(self, worker: StaticWorker, epoch: int) -> int | None:
        """Return the epoch that another gateway has begun for the same engine since.

        Both would else begin one after the other for ever, each ending the other's leases.
        """
        try:
            answer = await self._api.GetWorker(routing.GetWorkerRequest(worker_id=worker.worker_id))
        except NotFound:
            return None
        known = answer.worker
        lost = known.state == routing.WORKER_STATE_LOST
        same = (known.url, known.kv_host, known.kv_port) == (
            worker.url.rstrip("/"),
            worker.kv_host,
            worker.kv_port,
        )
        return known.epoch if known.epoch > epoch and same and not lost else None

    async def _register(self, worker: StaticWorker) -> int:
        instance_id = await self._instance(worker)
        worker = await self._ask_missing(worker)
        message = routing.Worker(
            worker_id=worker.worker_id,
            role=_ROLES[worker.role],
            url=worker.url.rstrip("/"),
            kv_host=worker.kv_host,
            kv_port=worker.kv_port,
            compatibility=routing.Compatibility(
                model=worker.model,
                revision=worker.revision,
                block_size=worker.block_size,
                kv_layout=worker.kv_layout,
                kv_dtype=worker.kv_dtype,
                engine_version=worker.engine_version,
            ),
            bidirectional=worker.bidirectional,
            managed=False,
            max_model_len=worker.max_model_len,
            recompute_threshold=worker.recompute_threshold,
            served_models=worker.served_models or (worker.model,),
        )
        if worker.data_parallel_rank is not None:
            message.data_parallel_rank = worker.data_parallel_rank
        answer = await self._api.RegisterWorker(
            routing.RegisterWorkerRequest(worker=message, instance_id=instance_id)
        )
        log.info("static worker registered", worker=worker.worker_id, epoch=answer.worker.epoch)
        return answer.worker.epoch

    async def _instance(self, worker: StaticWorker) -> str:
        """Return the same name for the same process, whichever gateway asks."""
        try:
            _, raw = await self._upstream.get(f"{worker.url.rstrip('/')}/metrics", _PROBE_S)
        except (aiohttp.ClientError, TimeoutError, OSError):
            raw = b""
        for line in raw.splitlines():
            if line.startswith(b"process_start_time_seconds"):
                # In milliseconds: as written (1.79e+09) it is no identifier.
                with contextlib.suppress(ValueError, OverflowError):
                    return f"started-{round(float(line.rpartition(b' ')[2]) * 1000)}"
        # Not known: every outage counts as a restart, so that no old handle is believed.
        return f"seen-{self._clock.now_us()}"

    async def _ask_missing(self, worker: StaticWorker) -> StaticWorker:
        """Fill in what the settings leave to the engine."""
        base = worker.url.rstrip("/")
        if not worker.served_models or not worker.max_model_len:
            answer = await self._upstream.get_json(f"{base}/v1/models", _PROBE_S)
            data = answer.get("data") if isinstance(answer, dict) else None
            cards = [card for card in data or () if isinstance(card, dict)]
            names = tuple(str(card["id"]) for card in cards if card.get("id"))
            lengths = [
                card["max_model_len"]
                for card in cards
                if isinstance(card.get("max_model_len"), int)
            ]
            worker = dataclasses.replace(
                worker,
                served_models=worker.served_models or names,
                max_model_len=worker.max_model_len or (min(lengths) if lengths else 0),
            )
        if not worker.engine_version:
            try:
                answer = await self._upstream.get_json(f"{base}/version", _PROBE_S)
            except aiohttp.ClientError:
                answer = None
            version = answer.get("version") if isinstance(answer, dict) else None
            worker = dataclasses.replace(worker, engine_version=str(version or ""))
        return worker
