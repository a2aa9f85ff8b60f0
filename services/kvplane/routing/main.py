"""Puts routing and the worker registry together."""

from dataclasses import dataclass

from kvplane.client.api import LeaseApi, SessionApi
from kvplane.db.database import Database
from kvplane.kernel.clock import Clock
from kvplane.kernel.ids import Ids, RandomIds
from kvplane.routing.domain import RoutingConfig
from kvplane.routing.peers import LeasePeer, SessionPeer
from kvplane.routing.registry import Registry
from kvplane.routing.service import Router
from kvplane.routing.servicer import RoutingServicer, WorkerServicer
from kvplane.routing.snapshot import Snapshots
from kvplane.routing.store_sql import SqlRouteStore, SqlWorkerStore


@dataclass(frozen=True, slots=True)
class RoutingPart:
    """Both services, and the loop beside them."""

    routing_servicer: RoutingServicer
    worker_servicer: WorkerServicer
    registry: Registry
    leases: LeasePeer

    async def start(self) -> None:
        """Begin to notice silent workers."""
        self.registry.start()

    async def stop(self) -> None:
        """Stop that, and finish what is under way at the lease service."""
        await self.registry.stop()
        await self.leases.close()


def build(
    database: Database,
    clock: Clock,
    leases: LeaseApi,
    sessions: SessionApi,
    config: RoutingConfig | None = None,
    ids: Ids | None = None,
) -> RoutingPart:
    """Wire everything; nothing runs before `start`."""
    config = config or RoutingConfig()
    workers, routes = SqlWorkerStore(database), SqlRouteStore(database)
    lease_peer = LeasePeer(leases, config.lease_bound_s)
    snapshots = Snapshots(
        workers, clock, max_age_s=config.snapshot_age_s, bound_s=config.store_bound_s
    )
    registry = Registry(workers, routes, lease_peer, clock, config, snapshots.invalidate)
    router = Router(
        snapshots,
        routes,
        SessionPeer(sessions, config.session_bound_s),
        lease_peer,
        clock,
        config,
        ids or RandomIds(),
    )
    return RoutingPart(RoutingServicer(router), WorkerServicer(registry), registry, lease_peer)
