"""Nothing stays behind when traffic has ended: no lease, no hold, no request."""

import asyncio
import re
from pathlib import Path

from e2e.chat import control
from e2e.cluster import Cluster
from e2e.engines import figures
from kvplane.api.lease.v1 import lease_pb2 as lease
from kvplane.api.routing.v1 import routing_pb2 as routing
from kvplane.api.session.v1 import session_pb2 as session
from kvplane.client import KvplaneClient

_MANY = 1000
_ERROR = re.compile(r"\bERROR\b|Traceback")
_LIVE = (lease.LEASE_STATE_GRANTED, lease.LEASE_STATE_READING)
_DRAINING = (lease.LEASE_STATE_REVOKED, lease.LEASE_STATE_LOST)
_HELD = (lease.OWNERSHIP_STATE_HELD, lease.OWNERSHIP_STATE_LEASED)


async def end_sessions(cluster: Cluster) -> None:
    """End all that are active."""
    async with control(cluster) as client:
        request = session.ListSessionsRequest(
            states=[session.SESSION_STATE_ACTIVE], page_size=_MANY
        )
        for one in (await client.sessions.ListSessions(request)).sessions:
            await client.sessions.EndSession(session.EndSessionRequest(session_id=one.session_id))


async def leftovers(cluster: Cluster) -> list[str]:
    """Say what engines, connectors and the lease service still have, each in its own words."""
    found = []
    for engine in (cluster.prefill, cluster.decode):
        now = await figures(engine.url)
        if not now.at_rest:
            found.append(f"{engine.name} has {now}")
    async with control(cluster) as client:
        workers = await client.workers.ListWorkers(routing.ListWorkersRequest(page_size=_MANY))
        for worker in workers.workers:
            load = worker.load
            if load.held or load.running or load.waiting:
                found.append(
                    f"the connector of {worker.worker_id} holds {load.held} and has"
                    f" {load.running} running, {load.waiting} waiting"
                )
        found += await _leases(client)
    return found


async def _leases(client: KvplaneClient) -> list[str]:
    leases = await client.leases.ListLeases(
        lease.ListLeasesRequest(states=[*_LIVE, *_DRAINING], page_size=_MANY)
    )
    owned = await client.leases.ListOwnerships(
        lease.ListOwnershipsRequest(states=_HELD, page_size=_MANY)
    )
    return [
        f"lease {one.lease_id} of {one.holder.worker_id} is {lease.LeaseState.Name(one.state)}"
        for one in leases.leases
        if one.state in _LIVE or one.draining
    ] + [
        f"{one.worker_id} owns {one.num_tokens} tokens of turn {one.turn} of {one.session_id}"
        f"{' for the decode' if one.for_decode else ''} for {one.hold.ToTimedelta()}"
        for one in owned.ownerships
    ]


async def nothing_is_left(cluster: Cluster, seconds: float) -> None:
    """Wait for it; fail with what there is after `seconds`."""
    loop = asyncio.get_running_loop()
    end = loop.time() + seconds
    while found := await leftovers(cluster):
        if loop.time() > end:
            raise AssertionError(f"after {seconds} s there is still: " + "; ".join(found))
        await asyncio.sleep(0.2)


def errors(log: Path, begin: int) -> list[str]:
    """Return the errors that an engine has logged after so many bytes."""
    with log.open("rb") as file:
        file.seek(begin)
        text = file.read().decode(errors="replace")
    return [line for line in text.splitlines() if _ERROR.search(line)]
