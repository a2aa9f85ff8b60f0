"""Wall clocks that are off, and that jump. Durations travel, so nothing of it matters."""

import asyncio
import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from demo.servers import Server, free_port, stop_all, wait_for
from e2e.waiting import eventually
from kvplane.api.lease.v1 import lease_pb2 as lease
from kvplane.client import LeaseApi, lease_api
from kvplane.db import migrate
from runtime.processes import environment

from faults.conftest import Database
from faults.plane import BOUND, DECODE_HOLD, ENGINES, GATEWAYS, SERVICES, SETTINGS, TTL, Plane
from faults.shifted import WallClock
from faults.talk import talking

pytestmark = [pytest.mark.processes, pytest.mark.timeout(240)]

HOUR = 3600.0
SWEEP = 0.5
SLACK = 0.5  # lease.sweep_slack_s: of a read that may go on
LATE = 1.5  # what a busy machine takes beyond that
_numbers = itertools.count()


@asynccontextmanager
async def two_replicas(database: Database, plane: Plane) -> AsyncIterator[tuple[LeaseApi, ...]]:
    """Lease services of one database; the second one's clock is 10 s ahead of the first's."""
    url = await database.new_database()
    await migrate.upgrade(url)
    servers = []
    addresses = []
    for off in (-5.0, 5.0):
        clock = WallClock(plane.folder / f"replica{off:+g}.clock")
        clock.set(off)
        port, status = free_port(), free_port()
        env = environment(
            **{**SETTINGS, "KVPLANE_LEASE_RESTART_GRACE_S": "0"},
            KVPLANE_DATABASE_URL=url,
            KVPLANE_GRPC_PORT=str(port),
            KVPLANE_GRPC_STATUS_PORT=str(status),
        )
        servers.append(
            Server(
                f"replica{off:+g}",
                clock.command("kvplane.cli", "serve", "lease"),
                url=f"http://127.0.0.1:{status}",
                health="/readyz",
                env=env,
                logs=plane.folder,
            ).start()
        )
        addresses.append(f"127.0.0.1:{port}")
    try:
        await asyncio.to_thread(wait_for, servers, 60)
        yield tuple(lease_api(address, tenant="acme") for address in addresses)
    finally:
        stop_all(servers)


async def owned(at: LeaseApi, session: str) -> lease.Ownership:
    """Report something that is held for a minute."""
    first = await at.ReportOwnership(lease.ReportOwnershipRequest(worker_id="d", epoch=1))
    number = next(_numbers)
    report = lease.Ownership(
        tenant_id="acme",
        session_id=session,
        turn=1,
        worker_id="d",
        epoch=1,
        params=lease.KvTransferParams(
            remote_engine_id="engine-d",
            remote_request_id=f"request-{number}",
            remote_host="127.0.0.1",
            remote_port=5600,
            remote_num_tokens=16,
        ),
        num_tokens=16,
        block_size=16,
        digests=bytes(16),
        compatibility="c",
        cuttable=True,
        hold={"seconds": 60},
    )
    answer = await at.ReportOwnership(
        lease.ReportOwnershipRequest(
            worker_id="d", epoch=1, time_anchor={"anchor": first.anchor}, ownerships=[report]
        )
    )
    return answer.ownerships[0]


def grant(own: lease.Ownership, *, read: bool) -> lease.GrantLeaseRequest:
    return lease.GrantLeaseRequest(
        request_id=f"grant-{next(_numbers)}",
        holder={"worker_id": "p", "epoch": 1, "compatibility": "c"},
        ownership_id=own.ownership_id,
        begin_read=read,
    )


async def lease_ends_on_time(here: LeaseApi, there: LeaseApi, session: str, *, read: bool) -> None:
    """A dead holder's lease of one replica, as the other one sees it."""
    loop = asyncio.get_running_loop()
    own = await owned(here, session)
    sent = loop.time()
    given = (await here.GrantLease(grant(own, read=read))).lease
    granted = loop.time()
    assert TTL - 0.5 <= given.ttl.ToMilliseconds() / 1000 <= TTL, "what is left, as a duration"

    async def state() -> lease.OwnershipState:
        asked = lease.GetOwnershipRequest(ownership_id=own.ownership_id)
        return (await there.GetOwnership(asked)).ownership.state

    async def over() -> bool:
        if not read:
            # Who would take it over is refused for as long as it lasts.
            return (await there.GrantLease(grant(own, read=False))).HasField("lease")
        return await state() != lease.OWNERSHIP_STATE_LEASED

    await eventually(over, TTL + SLACK + SWEEP + LATE)
    ended = loop.time()
    assert ended - sent >= TTL, "taken over before its time"
    assert ended - granted <= TTL + SWEEP + LATE + (SLACK if read else 0)
    if read:
        assert await state() == lease.OWNERSHIP_STATE_RELEASED


async def test_replicas_whose_clocks_differ_agree_on_when_a_lease_ends(
    database: Database, plane: Plane
) -> None:
    """Neither the fast nor the slow one takes it over early, or leaves it for longer."""
    async with two_replicas(database, plane) as (slow, fast):
        ways = itertools.product((slow, fast), (slow, fast), (False, True))
        async with asyncio.TaskGroup() as group:
            for number, (here, there, read) in enumerate(ways):
                session = f"session-{number}"
                group.create_task(lease_ends_on_time(here, there, session, read=read))


async def test_a_step_of_any_wall_clock_changes_nothing(plane: Plane) -> None:
    """Holders, owners, services and gateways: by an hour, forth and back, while all run."""
    async with talking(plane, bound=BOUND) as running:
        for step in (HOUR, -HOUR):
            for number, name in enumerate((*SERVICES, *GATEWAYS, *ENGINES)):
                plane.clocks[name].set(step if number % 2 else -step)
            await running.reuse_is_back()


async def test_services_come_back_with_clocks_that_are_off(plane: Plane) -> None:
    """The database's clock decides, whatever a restarted process believes."""
    async with talking(plane, bound=BOUND) as running:
        for name, off in zip(SERVICES, (5.0, -5.0, HOUR), strict=True):
            plane.servers[name].kill()
            plane.clocks[name].set(off)
            plane.servers[name].start()
        await asyncio.to_thread(wait_for, [plane.servers[n] for n in SERVICES], 60)
        await running.reuse_is_back()


async def test_a_clock_that_jumps_over_a_restart_on_sqlite(tmp_path: Path) -> None:
    """One replica, whose own clock decides: it costs what was held, no more."""
    plane = Plane(f"sqlite:///{tmp_path}/plane.db", "faults-sqlite")
    try:
        await asyncio.to_thread(plane.start)
        async with talking(plane, bound=BOUND, held=DECODE_HOLD + 5) as running:
            for jump in (HOUR, -HOUR):
                for name in SERVICES:
                    plane.clocks[name].set(jump)
                await running.reuse_is_back()
                for name in SERVICES:
                    plane.servers[name].kill()
                    plane.servers[name].start()
                await asyncio.to_thread(wait_for, [plane.servers[n] for n in SERVICES], 60)
                await running.reuse_is_back()
    finally:
        await asyncio.to_thread(plane.stop)
