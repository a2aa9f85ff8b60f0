"""Replicas of the control plane: the product's parts, put together over the simulated network."""

from typing import Any

from kvplane.api.lease.v1 import lease_pb2
from kvplane.api.session.v1 import session_pb2
from kvplane.client.quotas import NoQuotas
from kvplane.kernel.errors import Unavailable
from kvplane.kernel.limits import Quotas
from kvplane.lease import main as lease_main
from kvplane.lease.domain import LeaseConfig
from kvplane.lease.keeping import Amount, bound_of
from kvplane.routing import main as routing_main
from kvplane.routing.domain import RoutingConfig
from kvplane.session import main as session_main
from kvplane.session.domain import SessionConfig

from simulation.database import SimDatabase, Store
from simulation.loop import Process, SimClock, VirtualLoop
from simulation.network import Network, Server

_PEER_TIMEOUT_S = 2.0


class SimIds:
    """New ids that are the same in each run of a seed."""

    def __init__(self, name: str) -> None:
        self._name, self._number = name, 0

    def new(self, prefix: str) -> str:
        """Return the next one."""
        self._number += 1
        return f"{prefix}-{self._name}-{self._number}"


class _Quotas:
    """What tenants may use, known at once."""

    def __init__(self, quotas: dict[str, Quotas]) -> None:
        self._quotas = quotas

    async def of(self, tenant_id: str) -> Quotas:
        """Return a tenant's."""
        return self._quotas[tenant_id]


class Replica:
    """One process with all services; it may die and come back."""

    def __init__(
        self,
        loop: VirtualLoop,
        network: Network,
        store: Store,
        index: int,
        lease: LeaseConfig,
        routing: RoutingConfig,
        session: SessionConfig,
        quotas: dict[str, Quotas],
    ) -> None:
        self._loop, self._network, self._store = loop, network, store
        self.index, self._lease, self._routing, self._session = index, lease, routing, session
        self._quotas = quotas
        self._lives = self.freed = 0
        self.clock = SimClock(loop, 0.0)
        self.process = Process("none")
        self.server: Server | None = None

    def start(self, clock: SimClock) -> None:
        """Begin a life: a new process over what is durable."""
        self._lives += 1
        self.clock = clock
        name = f"replica{self.index}.{self._lives}"
        self.process = process = Process(name)
        if self.server is not None:
            self._network.servers.remove(self.server)
        self.server = Server(process, {})
        self._network.servers.append(self.server)
        self._network.servers.sort(key=lambda server: server.process.name)
        self._loop.spawn(process, self._main(self.server, name))

    async def _main(self, server: Server, name: str) -> None:
        database, ids = SimDatabase(self._store), SimIds(name)
        net, clock, process = self._network, self.clock, server.process
        leases = net.client(process, clock, lease_pb2, "LeaseService", _PEER_TIMEOUT_S)
        sessions = net.client(process, clock, session_pb2, "SessionService", _PEER_TIMEOUT_S)
        quotas = _Quotas(self._quotas) if self._quotas else NoQuotas()
        lease = lease_main.build(database, clock, self._lease, ids, quotas)
        session = session_main.build(database, clock, leases, self._session, ids)
        routing = routing_main.build(database, clock, leases, sessions, self._routing, ids)
        self._skip_idle_sweeps(lease, session, routing)
        server.services.update(
            LeaseService=lease.servicer,
            SessionService=session.servicer,
            RoutingService=routing.routing_servicer,
            WorkerService=routing.worker_servicer,
        )
        await lease.start()
        await session.start()
        await routing.start()

    def kill(self) -> None:
        """End it at whatever it awaits. Its connections break."""
        self._loop.kill(self.process)
        assert self.server is not None
        for stream in list(self.server.inside):
            stream.cut()

    def cut_streams(self) -> None:
        """Break its streams."""
        assert self.server is not None
        for stream in sorted(self.server.inside, key=lambda s: s._method.process.name):
            stream.cut()

    def _skip_idle_sweeps(self, lease: Any, session: Any, routing: Any) -> None:
        """Most sweeps find nothing, and cost more than all the rest: look first.

        What is due is asked in plain SQL; with anything due the product's own sweep runs.
        """
        store = self._store
        service, sessions, registry = lease.service, session.service, routing.registry
        sweep, purge, keep = service.sweep, service.purge, lease.keeper.keep
        session_sweep, registry_sweep = sessions.sweep, registry.sweep
        retention_us = round(self._lease.retention_s * 1e6)

        async def due(query: str, *args: Any) -> bool:
            if store.slow_s:
                await store.pause(0.002)
            if store.away:
                raise Unavailable("the database is away")
            return bool(store.select(query, *args))

        async def lease_sweep() -> tuple[int, int]:
            now = store.clock.now_us()
            return await sweep() if await due(_LEASES_DUE, now, now) else (0, 0)

        async def lease_purge() -> int:
            now = store.clock.now_us()
            old = now - retention_us
            return await purge() if await due(_PURGE_DUE, now, old, old) else 0

        async def lease_keep() -> int:
            freed = await keep() if await due(_KEEPING_DUE) or self._beyond_quotas() else 0
            self.freed += freed
            return freed

        async def sweep_sessions() -> None:
            now = store.clock.now_us()
            if await due(_SESSIONS_DUE, now, now):
                await session_sweep()

        async def sweep_workers() -> None:
            silent = store.clock.now_us() - round(self._routing.worker_timeout_s * 1e6)
            if store.away or await due(_WORKERS_DUE, silent):
                await registry_sweep()

        service.sweep, service.purge = lease_sweep, lease_purge
        lease.keeper.keep = lease_keep
        sessions.sweep = sweep_sessions
        registry.sweep = sweep_workers

    def _beyond_quotas(self) -> bool:
        """Tell whether more is held for a tenant than it may."""
        return bool(self._quotas) and any(
            bound_of(tenant_id, self._quotas[tenant_id].hard).excess(Amount(tokens, blocks)).some
            for tenant_id, tokens, blocks in self._store.select(_HELD)
        )


_LEASES_DUE = (
    "SELECT 1 FROM leases WHERE (state <= 2 OR draining) AND deadline_us <= ?"
    " UNION ALL SELECT 1 FROM ownerships WHERE state = 1 AND hold_deadline_us <= ? LIMIT 1"
)
_PURGE_DUE = (
    "SELECT 1 FROM lease_commands WHERE expire_us <= ?"
    " UNION ALL SELECT 1 FROM leases WHERE ended_us BETWEEN 1 AND ?"
    " UNION ALL SELECT 1 FROM ownerships WHERE ended_us BETWEEN 1 AND ? LIMIT 1"
)
_KEEPING_DUE = (
    "SELECT 1 FROM worker_epochs e WHERE hold_limit_blocks > 0 AND hold_limit_blocks <"
    " (SELECT sum(blocks) FROM ownerships o WHERE state <= 2 AND o.worker_id = e.worker_id) LIMIT 1"
)
_HELD = (
    "SELECT tenant_id, sum(num_tokens), sum(blocks) FROM ownerships WHERE state <= 2"
    " GROUP BY tenant_id"
)
_SESSIONS_DUE = (
    "SELECT 1 FROM sessions WHERE free_due_us <= ? UNION ALL"
    " SELECT 1 FROM sessions WHERE due_us <= ? LIMIT 1"
)
_WORKERS_DUE = (
    "SELECT 1 FROM workers WHERE (state <> 3 AND last_beat_us <= ?) OR voided_below < void_below"
    " LIMIT 1"
)
