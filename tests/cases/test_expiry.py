"""Failures of what ends leases and holds, as reported from the field: sweeps, renewals, clocks."""

import asyncio
import dataclasses
from collections.abc import Callable, Iterator

import httpx
import pytest
from demo.servers import stop_all, wait_for
from e2e.waiting import eventually
from kvplane.api.lease.v1 import lease_pb2 as lease
from kvplane.client import KvplaneClient
from kvplane.db.database import Database, Tx
from kvplane.kernel.clock import SystemClock
from kvplane.lease.sql import tables
from kvplane.worker.agent import AgentConfig, Permit, WorkerAgent
from lease.harness import to_seconds
from sqlalchemy import text
from worker.support import TOKENS, identity, settled, until
from worker.support import held as holding

from cases.processes import CLOCK, MODEL, Dev, Engine, client, registered
from cases.talk import Talk, held, session_of, words
from cases.wire import grant, renew, report

pytestmark = pytest.mark.processes

SWEEP = 0.5
# What a busy machine may be late by.
LATE = 1.0
EXPIRED, LEASED = lease.OWNERSHIP_STATE_EXPIRED, lease.OWNERSHIP_STATE_LEASED


@pytest.fixture(scope="module")
def dev(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Dev]:
    """One `kvplane dev` whose times are short."""
    short = {"SWEEP_INTERVAL_S": str(SWEEP), "MIN_TTL_S": "0.2", "MARGIN_S": "0.5"}
    settings = {f"LEASE_{name}": value for name, value in short.items()}
    plane = Dev(tmp_path_factory.mktemp("expiry"), LEASE_RESTART_GRACE_S="0", **settings)
    plane.start()
    try:
        wait_for([plane], 60)
        yield plane
    finally:
        stop_all([plane])


async def states(kv: KvplaneClient, *names: str) -> list[int]:
    """Return the states of what is held for sessions."""
    found = []
    for name in names:
        request = lease.ListOwnershipsRequest(session_id=name)
        (owned,) = (await kv.leases.ListOwnerships(request)).ownerships
        found.append(int(owned.state))
    return found


async def test_what_is_renewed_hides_nothing_behind_it(dev: Dev) -> None:
    """L-02, vllm#58222: the reaper stops at the first that has not expired, but renewals move
    deadlines in place, and two times to live share one map. All times are a tenth.
    """
    async with client(dev) as kv:
        await report(kv, "l02", ["l02-a"], hold=48)
        began = CLOCK.monotonic()
        await report(kv, "l02", ["l02-b", "l02-c"], hold=3)
        first = await grant(kv, "l02-a", 0, 1)
        while CLOCK.monotonic() - began < 2.9:
            (renewed,) = await renew(kv, [first], 1)
            assert renewed.renewed
            assert EXPIRED not in await states(kv, "l02-b", "l02-c")
            await CLOCK.sleep(0.4)

        async def over() -> list[int]:
            await renew(kv, [first], 1)
            now = await states(kv, "l02-a", "l02-b", "l02-c")
            return now if EXPIRED in now else []

        # One sweep for both; and it comes in time.
        assert await eventually(over) == [LEASED, EXPIRED, EXPIRED]
        assert CLOCK.monotonic() - began < 3.1 + SWEEP + LATE


def crowd(tx: Tx) -> None:
    """Put 10,000 copies of the one lease of `crowd` before it, by age and by id."""
    for table, key in ((tables.ownerships, "ownership_id"), (tables.leases, "lease_id")):
        one = table.select().where(table.c.session_id == "crowd")
        row = dict(tx.connection.execute(one).mappings().one())
        copies = [
            row | {key: f"a{n:05}", "ownership_id": f"a{n:05}", "session_id": "crowd-behind"}
            for n in range(10_000)
        ]
        tx.connection.execute(table.insert(), copies)


async def test_ten_thousand_live_leases_do_not_hide_one_that_is_over(dev: Dev) -> None:
    """L-02: the one is behind them, by age and by id."""
    database = Database(dev.database, CLOCK)
    async with client(dev) as kv:
        await report(kv, "l02", ["crowd"])
        await grant(kv, "crowd", 0, 60)
        await database.run(crowd)
        await report(kv, "l02", ["late"])
        over = await grant(kv, "late", 0, 2)
        ends = CLOCK.monotonic() + to_seconds(over.ttl)
        await CLOCK.sleep(ends - CLOCK.monotonic())

        async def ended() -> bool:
            request = lease.GetLeaseRequest(lease_id=over.lease_id)
            return (await kv.leases.GetLease(request)).lease.state == lease.LEASE_STATE_EXPIRED

        await eventually(ended)
        assert CLOCK.monotonic() - ends < SWEEP + LATE
        live = text("SELECT count(*) FROM leases WHERE session_id = 'crowd-behind' AND state = 1")
        assert await database.read(lambda tx: tx.connection.scalar(live)) == 10_000
    await database.close()


async def test_an_engines_own_holds_do_not_hide_one_another(
    dev: Dev, start: Callable[..., None]
) -> None:
    """L-02: the same in the map of an engine, where an order to hold longer renews the first."""
    folder = dev.log_path.parent
    hold = ("--kv-lease-duration", "3", "--decoder-kv-blocks-ttl", "48")
    prefill = Engine("l02-p", "prefill", folder, dev.control_plane)
    decode = Engine("l02-d", "decode", folder, dev.control_plane, *hold)
    await asyncio.to_thread(start, prefill, decode)
    await registered(dev, "l02-p", "l02-d")
    talk = Talk(dev, prefill, "l02-engine", MODEL)
    await talk.say(words(11))
    async with client(dev) as kv, httpx.AsyncClient(timeout=30) as http:
        await eventually(lambda: held(kv, talk.session))
        session_id = (await session_of(kv, talk.session)).session_id
        for n in range(2):  # and nobody comes for these
            body = {"model": MODEL, "prompt": words(20 + n), "max_tokens": 1}
            params = {"do_remote_decode": True, "do_remote_prefill": False}
            url = f"{decode.url}/v1/completions"
            assert (await http.post(url, json={**body, "kv_transfer_params": params})).is_success
        assert [pin["by_decode"] for pin in decode.held()] == [True, False, False]
        end = CLOCK.monotonic() + 4
        while len(decode.held()) > 1:
            longer = lease.ExtendHoldRequest(session_id=session_id)
            longer.hold.FromSeconds(48)
            assert (await kv.leases.ExtendHold(longer)).asked == 1
            assert CLOCK.monotonic() < end
            await CLOCK.sleep(0.4)
        (kept,) = decode.held()
        assert kept["by_decode"]
        assert kept["left_s"] > 45


class Stepped(SystemClock):
    """A clock whose wall time can be set."""

    def step(self, seconds: float) -> None:
        self._offset_us += round(seconds * 1e6)


@pytest.fixture
def agents(dev: Dev) -> Iterator[tuple[WorkerAgent, WorkerAgent, list[Stepped]]]:
    """An owner and a reader as engines have them, and their clocks."""
    clocks = [Stepped(), Stepped()]
    config = AgentConfig(
        dev.address,
        dev.address,
        begin_wait_seconds=5,
        grant_wait_seconds=5,
        lease_ttl_seconds=3,
    )
    owner, reader = (
        WorkerAgent(identity(name, role=role), config, clock)
        for name, role, clock in zip(("l03-d", "l03-p"), ("decode", "prefill"), clocks, strict=True)
    )
    for agent in (owner, reader):
        agent.start()
    for agent in (owner, reader):
        until(lambda agent=agent: agent.away is None, 20)
    yield owner, reader, clocks
    for agent in (owner, reader):
        agent.close()


def begin_three(owner: WorkerAgent, reader: WorkerAgent, kind: str) -> list[str]:
    """Have three reads run."""
    names = [f"{kind}-{n}" for n in range(3)]
    for name in names:
        owner.report_held(holding("l03-d", name, session_id=name))
    for name in names:
        reader.begin_read(name, TOKENS, handle=("engine-l03-d", name), tenant_id="acme")
    for name in names:
        assert isinstance(settled(reader, name), Permit)
        assert reader.read_started(name)
    return names


async def renewals(dev: Dev, result: str) -> float:
    async with httpx.AsyncClient(timeout=10) as http:
        text = (await http.get(f"{dev.status}/metrics")).text
    name = f'kvplane_lease_renewals_total{{result="{result}"}} '
    return sum(float(line[len(name) :]) for line in text.splitlines() if line.startswith(name))


async def test_an_unknown_id_in_a_renewal_is_told_to_its_holder(
    dev: Dev, agents: tuple[WorkerAgent, WorkerAgent, list[Stepped]]
) -> None:
    """L-03, vllm PR#53244: heartbeats carry another id than the owner has filed, unknown ids
    are dropped without a word, and leases expire though they are renewed.
    """
    # As its message: one answer for each, not one for all.
    async with client(dev) as kv:
        await report(kv, "l03", ["l03-one", "l03-two"])
        one, two = [await grant(kv, name, 0, 2) for name in ("l03-one", "l03-two")]
        wrong = lease.Lease(lease_id="chatcmpl-of-the-client", fencing_token=1)
        before = await renewals(dev, "unknown")
        answers = await renew(kv, [one, wrong, two], 9)
    assert [answer.renewed for answer in answers] == [True, False, True]
    assert answers[1].state == lease.LEASE_STATE_UNSPECIFIED, "not found"
    assert all(to_seconds(answers[n].ttl) > 8 for n in (0, 2))
    assert await renewals(dev, "unknown") == before + 1

    # And what a holder makes of it.
    owner, reader, _ = agents
    names = await asyncio.to_thread(begin_three, owner, reader, "l03")
    entry = reader._reading._entries[names[2]]
    entry.read = dataclasses.replace(entry.read, lease_id="chatcmpl-of-the-client")
    await asyncio.to_thread(until, lambda: not reader.still_valid(names[2]), 3)
    assert await renewals(dev, "unknown") > before + 1
    # The other two go on past the time that they were given first.
    await CLOCK.sleep(4)
    assert [reader.still_valid(name) for name in names] == [True, True, False]
    for name in names:
        reader.read_finished(name, sent=True)


async def test_a_holder_whose_wall_clock_is_set_reads_on(
    dev: Dev, agents: tuple[WorkerAgent, WorkerAgent, list[Stepped]]
) -> None:
    """L-12, mlflow PR#25199: what remains of a lease is told as a duration, so an hour forward
    or back at the holder, or at the owner, changes nothing.
    """
    owner, reader, clocks = agents
    names = await asyncio.to_thread(begin_three, owner, reader, "l12")
    async with client(dev, tenant="acme") as kv:
        for step in (3600.0, -7200.0):
            for clock in clocks:
                clock.step(step)
            end = CLOCK.monotonic() + 3.5  # more than the lease would last without renewals
            while CLOCK.monotonic() < end:
                assert all(reader.still_valid(name) for name in names)
                assert await states(kv, *names) == [LEASED] * 3
                await CLOCK.sleep(0.2)
    for name in names:
        reader.read_finished(name, sent=True)
    assert not any(isinstance(reader.poll_read(name), Permit) for name in names)
