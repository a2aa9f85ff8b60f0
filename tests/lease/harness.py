"""The lease manager over a database, with short names for what tests do all the time."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field, replace

from google.protobuf.duration_pb2 import Duration
from kvplane.api.lease.v1 import lease_pb2 as pb
from kvplane.client.quotas import NoQuotas, QuotaSource
from kvplane.db.database import Database
from kvplane.kernel.clock import Clock, FakeClock, SystemClock
from kvplane.kernel.context import Caller, set_caller
from kvplane.lease.domain import LeaseConfig
from kvplane.lease.main import LeasePart, build
from sqlalchemy import text

COMPATIBILITY = '{"model":"m"}'
BLOCK = 16


def seconds(value: float) -> Duration:
    whole = int(value)
    return Duration(seconds=whole, nanos=round((value - whole) * 1e9))


def to_seconds(value: Duration) -> float:
    return value.seconds + value.nanos / 1e9


async def until(condition, turns: int = 2000) -> None:
    """Let other tasks run until that is so, for 10 s at least."""
    for _ in range(turns):
        if await condition():
            return
        await asyncio.sleep(0.005)
    raise AssertionError("it did not come to pass")


def install_clock(tx, start_us: int) -> None:
    """Give a PostgreSQL database a clock that tests move, in place of its own."""
    name = tx.connection.scalar(text("SELECT current_database()"))
    for statement in (
        "CREATE TABLE moved_clock (at_us bigint)",
        f"INSERT INTO moved_clock VALUES ({start_us})",
        "CREATE FUNCTION clock_timestamp() RETURNS timestamptz LANGUAGE sql VOLATILE AS"
        " 'SELECT to_timestamp(at_us / 1000000.0) FROM public.moved_clock'",
        f"ALTER DATABASE {name} SET search_path = public, pg_catalog",
    ):
        tx.connection.execute(text(statement))


def move_clock(tx, seconds: float) -> None:
    moved = text("UPDATE moved_clock SET at_us = at_us + :by")
    tx.connection.execute(moved, {"by": round(seconds * 1e6)})


class SkewedClock(SystemClock):
    """A machine whose clock is wrong by so many seconds."""

    def __init__(self, offset_s: float) -> None:
        super().__init__()
        self._offset_us += round(offset_s * 1e6)


@dataclass
class Plane:
    """Replicas over one database, whose clock the test moves, unless it is a real one.

    Times in tests are in units: a second of the fake clock, or `unit` real seconds.
    """

    url: str
    clock: Clock
    unit: float
    databases: list[Database] = field(default_factory=list)
    parts: list[LeasePart] = field(default_factory=list)

    def config(self, **units: float) -> LeaseConfig:
        """The defaults, with their times in units."""
        plain = LeaseConfig(report_poll_interval_s=0.02, poll_interval_s=0.05)
        times = {
            name: getattr(plain, name) * self.unit
            for name in ("ttl_s", "min_ttl_s", "max_ttl_s", "margin_s", "restart_grace_s",
                         "retention_s", "sweep_interval_s", "tick_interval_s", "sweep_slack_s",
                         "handover_s", "return_half_life_s")
        }  # fmt: skip
        own = {n: v * self.unit if n.endswith("_s") else v for n, v in units.items()}
        return replace(plain, **(times | own))

    def replica(
        self, clock: Clock | None = None, quotas: QuotaSource | None = None, **units: float
    ) -> Replica:
        database = Database(self.url, clock or self.clock)
        self.databases.append(database)
        part = build(
            database, clock or self.clock, self.config(**units), quotas=quotas or NoQuotas()
        )
        self.parts.append(part)
        return Replica(self, part, database)

    async def sleep(self, units: float) -> None:
        if isinstance(self.clock, FakeClock):
            self.clock.advance(units)
            if self.url.startswith("postgresql"):
                await self.parts[0].service._store._run(lambda tx: move_clock(tx, units))
        else:
            await self.clock.sleep(units * self.unit)

    async def close(self) -> None:
        for part in self.parts:
            await part.stop()
        for database in self.databases:
            await database.close()


@dataclass
class Replica:
    """One instance of the lease manager."""

    plane: Plane
    part: LeasePart
    database: Database

    @property
    def rpc(self):
        return self.part.servicer

    async def anchor(self, worker: str, epoch: int = 1) -> int:
        request = pb.ReportOwnershipRequest(worker_id=worker, epoch=epoch)
        return (await self.rpc.ReportOwnership(request)).anchor

    def ownership(
        self, request: str, session: str = "s1", turn: int = 1, *, hold: float | None = 480,
        tokens: int = 40, tenant: str = "default", engine: str = "engine-d1", **fields,
    ) -> pb.Ownership:  # fmt: skip
        blocks = -(-tokens // BLOCK)
        return pb.Ownership(
            tenant_id=tenant,
            session_id=session,
            turn=turn if session else 0,
            params=pb.KvTransferParams(
                remote_engine_id=engine,
                remote_request_id=request,
                remote_host="10.0.0.1",
                remote_port=5600,
                remote_num_tokens=tokens,
                remote_block_ids=[pb.BlockGroup(ids=range(blocks))],
            ),
            num_tokens=tokens,
            block_size=BLOCK,
            digests=bytes(range(16)) * blocks,
            compatibility=COMPATIBILITY,
            cuttable=True,
            hold=None if hold is None else seconds(hold * self.plane.unit),
            **fields,
        )

    async def report(
        self, *ownerships: pb.Ownership, worker: str = "d1", epoch: int = 1, anchor: int = 0,
        elapsed: float = 0,
    ) -> list[pb.Ownership]:  # fmt: skip
        """Report as just sent, unless an anchor says otherwise."""
        at = pb.TimeAnchor(anchor=anchor or 1 << 61, elapsed=seconds(elapsed * self.plane.unit))
        request = pb.ReportOwnershipRequest(
            worker_id=worker, epoch=epoch, time_anchor=at, ownerships=ownerships
        )
        return list((await self.rpc.ReportOwnership(request)).ownerships)

    async def held(self, request: str = "r1", session: str = "s1", **fields) -> pb.Ownership:
        return (await self.report(self.ownership(request, session, **fields)))[0]

    async def grant(
        self, request_id: str, *, worker: str = "p1", epoch: int = 1, ttl: float = 0,
        wait: float = 0, compatibility: str = COMPATIBILITY, **target,
    ) -> pb.GrantLeaseResponse:  # fmt: skip
        target = target or {"session_id": "s1"}
        holder = pb.Holder(worker_id=worker, epoch=epoch, compatibility=compatibility)
        return await self.rpc.GrantLease(
            pb.GrantLeaseRequest(
                request_id=request_id,
                holder=holder,
                ttl=seconds(ttl * self.plane.unit),
                wait=seconds(wait),
                **target,
            )
        )

    async def begin(
        self, lease: pb.Lease, *, worker: str = "p1", epoch: int = 1, token: int | None = None,
        compatibility: str = COMPATIBILITY, ttl: float = 0,
    ) -> pb.BeginReadResponse:  # fmt: skip
        return await self.rpc.BeginRead(
            pb.BeginReadRequest(
                lease_id=lease.lease_id,
                fencing_token=lease.fencing_token if token is None else token,
                holder=pb.Holder(worker_id=worker, epoch=epoch, compatibility=compatibility),
                ttl=seconds(ttl * self.plane.unit),
            )
        )

    async def reading(self, request_id: str = "q1", **fields) -> pb.Lease:
        """Grant and begin."""
        lease = (await self.grant(request_id, **fields)).lease
        return (await self.begin(lease)).lease

    async def renew(
        self, *leases: pb.Lease, ttl: float = 0, worker: str = "p1", epoch: int = 1
    ) -> list[pb.RenewResult]:
        request = pb.RenewLeasesRequest(
            holder=pb.Holder(worker_id=worker, epoch=epoch),
            leases=[
                pb.LeaseRef(lease_id=lease.lease_id, fencing_token=lease.fencing_token)
                for lease in leases
            ],
            ttl=seconds(ttl * self.plane.unit),
        )
        return list((await self.rpc.RenewLeases(request)).results)

    async def release(
        self, *leases: pb.Lease, outcome: int = pb.READ_OUTCOME_CONSUMED, worker: str = "p1",
        epoch: int = 1,
    ) -> list[int]:  # fmt: skip
        request = pb.ReleaseLeasesRequest(
            holder=pb.Holder(worker_id=worker, epoch=epoch),
            releases=[
                pb.LeaseRelease(
                    lease_id=lease.lease_id, fencing_token=lease.fencing_token, outcome=outcome
                )
                for lease in leases
            ],
        )
        return [result.state for result in (await self.rpc.ReleaseLeases(request)).results]

    async def withdraw(
        self, *requests: str, worker: str = "d1", epoch: int = 1, engine: str = "engine-d1"
    ) -> list[int]:
        request = pb.WithdrawOwnershipRequest(
            worker_id=worker,
            epoch=epoch,
            handles=[pb.OwnedHandle(engine_id=engine, request_id=r) for r in requests],
        )
        return list((await self.rpc.WithdrawOwnership(request)).states)

    async def end_epoch(self, worker: str, current: int) -> pb.EndWorkerEpochResponse:
        request = pb.EndWorkerEpochRequest(worker_id=worker, current_epoch=current)
        return await self.rpc.EndWorkerEpoch(request)

    async def owned(self, own: pb.Ownership) -> pb.Ownership:
        set_caller(Caller(own.tenant_id))
        request = pb.GetOwnershipRequest(ownership_id=own.ownership_id)
        try:
            return (await self.rpc.GetOwnership(request)).ownership
        finally:
            set_caller(Caller())

    async def lease(self, lease: pb.Lease) -> pb.Lease:
        request = pb.GetLeaseRequest(lease_id=lease.lease_id)
        return (await self.rpc.GetLease(request)).lease

    async def sweep(self) -> tuple[int, int]:
        return await self.part.service.sweep()

    async def commands(self, worker: str = "d1") -> list[tuple[str, str, str]]:
        """What that owner is to be told: (order, request id, command id)."""
        rows = await self.execute(
            "SELECT hold_until_us, request_id, command_id FROM lease_commands"
            " WHERE worker_id = :worker ORDER BY created_us, command_id",
            worker=worker,
        )
        return [("hold" if row[0] else "free", row[1], row[2]) for row in rows]

    async def execute(self, statement: str, **parameters: object) -> list[tuple]:
        def operation(tx):
            result = tx.connection.execute(text(statement), parameters)
            return [tuple(row) for row in result] if result.returns_rows else []

        return await self.database.run(operation)
