"""L-12, mlflow PR#25199: an expiry that is written with one host's clock and judged with
another's gives two owners at once, or keeps a dead one.

Two lease managers over one PostgreSQL, in real time; the clock of B is wrong.
"""

import asyncio
from collections.abc import AsyncIterator

import pytest
from db.postgres import Postgres
from kvplane.api.lease.v1 import lease_pb2 as lease
from kvplane.db import migrate
from kvplane.kernel.clock import SystemClock
from lease.harness import Plane, Replica, SkewedClock, to_seconds

TTL, SWEEP = 4.0, 0.5
# A busy machine is late by less than the clocks are wrong.
LATE = 2.0
ALREADY_LEASED = lease.REFUSAL_REASON_ALREADY_LEASED


@pytest.fixture
async def planes(postgres: Postgres) -> AsyncIterator[dict[float, Plane]]:
    """A database for each skew."""
    made: dict[float, Plane] = {}
    for skew in (5.0, -5.0):
        url = await postgres.new_database()
        await migrate.upgrade(url)
        made[skew] = Plane(url, SystemClock(), 1.0)
    yield made
    for plane in made.values():
        await plane.close()


async def lives(a: Replica, skew: float) -> None:
    """Follow two leases that A gave to readers that die, while B alone sweeps."""
    plane = a.plane
    b = plane.replica(SkewedClock(skew), sweep_interval_s=SWEEP, restart_grace_s=0)
    await b.part.start()
    for name in ("read", "unread"):
        await a.held(name, name)
    begun = plane.clock.monotonic()
    unread = (await a.grant("q1", session_id="unread", ttl=TTL)).lease
    granted = (await a.grant("q2", session_id="read", ttl=TTL)).lease
    read = (await a.begin(granted, ttl=TTL)).lease
    # The holder hears how long, not until when.
    assert to_seconds(unread.ttl) == pytest.approx(TTL, abs=0.01)
    given = plane.clock.monotonic()

    while plane.clock.monotonic() - begun < TTL - 0.2:
        number = f"q{plane.clock.monotonic()}"
        for name in ("read", "unread"):
            taken = await b.grant(f"{name}-{number}", session_id=name, worker="p2")
            assert taken.refusal_reason == ALREADY_LEASED
        states = [(await b.lease(one)).state for one in (unread, read)]
        assert states == [lease.LEASE_STATE_GRANTED, lease.LEASE_STATE_READING]
        await asyncio.sleep(0.1)

    # A read may have gone on for a moment after its end: the slack is for that.
    slack = plane.config().sweep_slack_s
    for one, late in ((unread, 0.0), (read, slack)):
        while (await a.lease(one)).state != lease.LEASE_STATE_EXPIRED:
            assert plane.clock.monotonic() - given < TTL + late + SWEEP + LATE
            await asyncio.sleep(0.02)
        assert plane.clock.monotonic() - begun >= TTL
    again = await b.grant("after", session_id="unread", worker="p2")
    assert again.lease.fencing_token == unread.fencing_token + 1


async def test_two_managers_whose_clocks_differ_end_a_lease_at_its_time(
    planes: dict[float, Plane],
) -> None:
    """L-12: nobody is robbed 5 s early, nobody dead is kept for 5 s more."""
    await asyncio.gather(*(lives(plane.replica(), skew) for skew, plane in planes.items()))
