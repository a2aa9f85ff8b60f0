"""Failures over databases that several processes share, as reported from the field."""

import asyncio
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import httpx
import pytest
from db.postgres import Postgres
from demo.servers import Server, stop_all, wait_for
from e2e.waiting import eventually
from kvplane.api.lease.v1 import lease_pb2 as lease
from kvplane.api.routing.v1 import routing_pb2 as routing
from kvplane.api.session.v1 import session_pb2 as sessions
from kvplane.client import KvplaneClient
from kvplane.db.database import Database
from sqlalchemy import text

from cases.processes import CLOCK, KINDS, Dev, Services, client, kvplane
from cases.wire import grant, holder, renew, report

pytestmark = pytest.mark.processes

Start = Callable[..., None]


def failures(servers: Sequence[Server]) -> list[str]:
    """Return the calls that were not answered with OK, which a client may have sent again."""
    lines = [
        json.loads(line)
        for server in servers
        for line in server.log_path.read_text().splitlines()
        if line.startswith("{")
    ]
    assert sum(line["message"] == "call" for line in lines) > 500
    return [line for line in lines if line.get("code", "OK") != "OK" or line["level"] == "error"]


async def test_three_processes_on_one_sqlite_file_lose_nothing(
    tmp_path_factory: pytest.TempPathFactory, start: Start
) -> None:
    """S-01, python/cpython#124510: "database is locked" at once, in spite of WAL and a busy
    timeout, when a transaction reads first and writes later.
    """
    folder, times = tmp_path_factory.mktemp("s01"), 200
    database = f"sqlite:///{folder}/shared.db"
    sweeping = {"LEASE_SWEEP_INTERVAL_S": "0.05", "LEASE_RESTART_GRACE_S": "0"}
    planes = [Dev(folder, database, f"dev-{n}", **sweeping) for n in range(3)]
    await asyncio.to_thread(start, *planes)

    async def lease_of_all(kv: KvplaneClient, shared: lease.Lease) -> None:
        for _ in range(times):
            (renewed,) = await renew(kv, [shared], 60)
            assert renewed.renewed

    async def leases_of_one(kv: KvplaneClient, who: int) -> None:
        await report(kv, f"owner-{who}", [f"own-{who}"])
        for n in range(times):
            granted = await grant(kv, f"own-{who}", n)
            assert granted.fencing_token == n + 1
            back = lease.LeaseRelease(
                lease_id=granted.lease_id,
                fencing_token=granted.fencing_token,
                outcome=lease.READ_OUTCOME_UNUSED,
            )
            request = lease.ReleaseLeasesRequest(holder=holder("reader"), releases=[back])
            await kv.leases.ReleaseLeases(request)

    async def turns_of_all(kv: KvplaneClient, who: int) -> None:
        for n in range(times):
            begin = sessions.BeginTurnRequest(
                request_id=f"{who}-{n}", key=sessions.SessionKey(name="everybody"), model="m"
            )
            turn = await kv.sessions.BeginTurn(begin)
            done = sessions.CompleteTurnRequest(
                session_id=turn.session.session_id,
                turn=turn.turn,
                outcome=sessions.TURN_OUTCOME_OK,
                prompt_tokens=1,
            )
            await kv.sessions.CompleteTurn(done)

    async with client(planes[0]) as one, client(planes[1]) as two, client(planes[2]) as three:
        await report(one, "owner", ["shared"])
        shared = await grant(one, "shared", 0)
        # Something for the sweepers all the while.
        await report(one, "owner", [f"short-{n}" for n in range(100)], hold=2)
        await asyncio.gather(
            *(
                work
                for who, kv in enumerate((one, two, three))
                for work in (
                    lease_of_all(kv, shared),
                    leases_of_one(kv, who),
                    turns_of_all(kv, who),
                )
            )
        )
        kept = (await one.sessions.GetSession(sessions.GetSessionRequest(name="everybody"))).session
        assert (kept.turns, kept.tokens_recomputed) == (3 * times, 3 * times)
        for who in range(3):
            assert (await grant(three, f"own-{who}", times)).fencing_token == times + 1
        gone = lease.ListOwnershipsRequest(states=[lease.OWNERSHIP_STATE_EXPIRED], page_size=1000)

        async def swept() -> bool:
            return len((await two.leases.ListOwnerships(gone)).ownerships) == 100

        await eventually(swept)
    assert failures(planes) == []
    assert not any("locked" in plane.log_path.read_text() for plane in planes)


async def test_two_replicas_that_flush_the_same_rows_at_once_do_not_deadlock(
    postgres: Postgres, tmp_path_factory: pytest.TempPathFactory, start: Start
) -> None:
    """S-02, openobserve PR#13480: batches of the same rows in another order, all on one tick."""
    folder, database = tmp_path_factory.mktemp("s02"), await postgres.new_database()
    settings = {"LEASE_MAX_TTL_S": "600", "ROUTING_WORKER_TIMEOUT_S": "600"}
    planes = [Dev(folder, database, f"dev-{n}", **settings) for n in range(2)]
    await asyncio.to_thread(start, *planes)
    names = [f"s{n:03}" for n in range(200)]
    beats = [routing.WorkerBeat(worker_id=name, epoch=1) for name in names]

    async def beat(kv: KvplaneClient, order: int, running: int) -> None:
        for one in beats:
            one.load.running = running
        request = routing.HeartbeatRequest(beats=[*beats[::order], beats[0]])
        answer = await kv.workers.Heartbeat(request)
        assert all(result.known for result in answer.results)
        assert len(answer.results) == 201

    async with client(planes[0]) as up, client(planes[1]) as down:
        await report(up, "owner", names)
        await asyncio.gather(*(register(up, name) for name in names))
        leases = await asyncio.gather(*(grant(up, name, 0, 100) for name in names))
        for n in range(1, 51):
            ttl = 100 + 4.0 * n
            first, second, *_ = await asyncio.gather(
                # One id twice in each batch.
                renew(up, [*leases, leases[0]], ttl),
                renew(down, [*leases[::-1], leases[0]], ttl),
                report(up, "owner", [*names[::9], names[0]]),
                report(down, "owner", [*names[::-9], names[-1]]),
                beat(up, 1, n),
                beat(down, -1, n),
            )
            assert len(first) == len(second) == 201
            assert all(result.renewed for result in first + second)
        last_sent = CLOCK.monotonic()
        for one in leases:
            found = await down.leases.GetLease(lease.GetLeaseRequest(lease_id=one.lease_id))
            left = found.lease.ttl.ToMicroseconds() / 1e6 + CLOCK.monotonic() - last_sent
            assert 295 < left <= 301, "the newest deadline"
        listed = await down.workers.ListWorkers(routing.ListWorkersRequest(page_size=1000))
        assert {worker.load.running for worker in listed.workers} == {50}
    assert failures(planes) == []
    assert not any("40P01" in plane.log_path.read_text() for plane in planes)
    assert await deadlocks(database) == 0


async def register(kv: KvplaneClient, worker_id: str) -> None:
    worker = routing.Worker(
        worker_id=worker_id,
        role=routing.WORKER_ROLE_DECODE,
        url="http://127.0.0.1:9",
        kv_host="127.0.0.1",
        kv_port=5600,
        engine_id=f"engine-{worker_id}",
        compatibility=routing.Compatibility(
            model="m", block_size=16, kv_layout="x", kv_dtype="x", engine_version="1"
        ),
        managed=True,
    )
    request = routing.RegisterWorkerRequest(worker=worker, instance_id="i")
    await kv.workers.RegisterWorker(request)


async def deadlocks(url: str) -> int:
    database = Database(url, CLOCK)
    count = "SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()"
    try:
        return int(await database.read(lambda tx: tx.connection.scalar(text(count))))
    finally:
        await database.close()


async def test_replicas_that_start_on_an_empty_database_migrate_it_once(
    url: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """S-03: each replica migrates at its start; the losers die of duplicates, or of one that
    died half-way; and an old build on a newer schema says something else.
    """
    folder = tmp_path_factory.mktemp("s03")
    mark = folder / "migrated"
    script = str(Path(__file__).with_name("slow_migration.py"))

    def migration(name: str, seconds: int) -> Server:
        arguments = (str(mark), str(seconds), "migrate", "up", "--database", url)
        command = [sys.executable, script, *arguments]
        return Server(name, command, url="http://127.0.0.1:9", logs=folder)

    services = Services(folder, url, replicas=2)
    first = migration("migrate-first", 120)
    others = [migration(f"migrate-{kind}", 0) for kind in KINDS[:3]]
    everything = [*services.servers.values(), first, *others]
    try:
        for server in everything:
            server.start()
            if server is first:
                await eventually(lambda: begun(mark), 60)
        # Half-way. Nobody is ready, and nobody has given up.
        assert not any(server.healthy() for server in services.kind("lease"))
        assert all(server.alive() for server in everything)
        first.kill()
        await asyncio.to_thread(wait_for, list(services.servers.values()), 60)
        for other in others:
            assert other.process is not None
            assert await asyncio.to_thread(other.process.wait, 30) == 0
        # The one that died, and one that did it all.
        assert len(mark.read_text().split()) == 2

        await set_revision(url, "9999")
        for kind in KINDS[:3]:
            for server in services.kind(kind):
                said = await eventually(lambda server=server: not_ready(server), 10)
                assert "the database's schema is ahead (9999 is newer than" in said
                assert "update this build" in said
        for command in (("migrate", "up"), ("dev",)):
            done = await asyncio.to_thread(kvplane, *command, "--database", url)
            assert done.returncode == 1
            assert "schema is ahead (9999 is newer than" in done.stderr
    finally:
        stop_all(everything)


async def begun(mark: Path) -> bool:
    return await asyncio.to_thread(mark.exists)


async def not_ready(server: Server) -> str:
    async with httpx.AsyncClient(timeout=5) as http:
        answer = await http.get(server.health_url)
    return answer.text if answer.status_code == 503 else ""


async def set_revision(url: str, revision: str) -> None:
    database = Database(url, CLOCK)
    change = text("UPDATE alembic_version SET version_num = :to")
    await database.run(lambda tx: tx.connection.execute(change, {"to": revision}))
    await database.close()
