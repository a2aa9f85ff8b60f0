"""Tables `workers` and `routes`, on SQLite and PostgreSQL."""

import asyncio
import dataclasses
import json
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    Float,
    Index,
    Integer,
    LargeBinary,
    String,
    Table,
    bindparam,
    delete,
    select,
    tuple_,
    update,
)
from sqlalchemy.dialects import postgresql, sqlite

from kvplane.db.database import MAX_BATCH, Database, Tx
from kvplane.db.metadata import metadata
from kvplane.kernel.errors import NotFound
from kvplane.kernel.gathering import gathered
from kvplane.routing import domain
from kvplane.routing.domain import Compatibility, Load, Profile, Role, State, Worker
from kvplane.routing.store import Beat, BeatAnswer, Live, RouteKey, Seen, Sweep, WorkerFilter

_PENDING_AT_ONCE = 100
_PURGED_AT_ONCE = 10_000

workers = Table(
    "workers",
    metadata,
    Column("worker_id", String(128), primary_key=True),
    Column("instance_id", String(128), nullable=False),
    Column("epoch", BigInteger, nullable=False),
    Column("state", Integer, nullable=False),
    Column("role", Integer, nullable=False),
    Column("url", String(512), nullable=False),
    Column("kv_host", String(256), nullable=False),
    Column("kv_port", Integer, nullable=False),
    Column("engine_id", String(256), nullable=False),
    Column("data_parallel_rank", Integer, nullable=True),
    Column("model", String(256), nullable=False),
    Column("revision", String(256), nullable=False),
    Column("block_size", Integer, nullable=False),
    Column("kv_layout", String(256), nullable=False),
    Column("kv_dtype", String(256), nullable=False),
    Column("engine_version", String(256), nullable=False),
    Column("bidirectional", Boolean, nullable=False),
    Column("managed", Boolean, nullable=False),
    Column("max_model_len", BigInteger, nullable=False),
    Column("recompute_threshold", Integer, nullable=False),
    # A JSON list.
    Column("served_models", String, nullable=False),
    Column("running", Integer, nullable=False),
    Column("waiting", Integer, nullable=False),
    Column("kv_usage", Float, nullable=False),
    Column("held", Integer, nullable=False),
    Column("last_beat_us", BigInteger, nullable=False),
    Column("void_below", BigInteger, nullable=False),
    Column("voided_below", BigInteger, nullable=False),
    # Lost workers stay (their epochs must never begin again at 1) and may become many.
    Index(None, "state", "last_beat_us"),
)

routes = Table(
    "routes",
    metadata,
    Column("tenant_id", String(64), primary_key=True),
    Column("request_id", String(128), primary_key=True),
    Column("attempt", String(32), primary_key=True),
    # A serialised RouteResponse.
    Column("answer", LargeBinary, nullable=False),
    Column("created_us", BigInteger, nullable=False),
    Index(None, "created_us"),
)


class SqlWorkerStore:
    """A WorkerStore over `Database`."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def register(self, profile: Profile, instance_id: str, seen: int) -> Worker:
        """See WorkerStore."""

        def op(tx: Tx) -> Worker:
            new = domain.register(None, profile, instance_id, tx.now_us(), seen)
            row = _insert(tx, workers).values(_row(new))
            fresh = row.on_conflict_do_nothing().returning(workers.c.epoch)
            if tx.connection.execute(fresh).first() is not None:
                return new
            known = _locked(tx, profile.worker_id)
            again = domain.register(known, profile, instance_id, tx.now_us(), seen)
            return _save(tx, again)

        return await self._database.run(op)

    async def beat(self, beats: Sequence[Beat]) -> list[BeatAnswer]:
        """See WorkerStore."""
        ids = sorted({beat.worker_id for beat in beats})
        c = workers.c

        def op(tx: Tx) -> list[BeatAnswer]:
            query = select(c.worker_id, c.epoch, c.state).where(c.worker_id.in_(ids))
            query = query.order_by(c.worker_id).with_for_update()
            rows = {row.worker_id: row for row in tx.connection.execute(query)}
            answers = []
            alive: dict[str, Load] = {}
            for beat in beats:
                row = rows.get(beat.worker_id)
                state = None if row is None else State(row.state)
                known = row is not None and row.epoch == beat.epoch and state is not State.LOST
                answers.append(BeatAnswer(known, state))
                if known:
                    alive[beat.worker_id] = beat.load
            if alive:
                now = tx.now_us()
                tx.connection.execute(
                    _BEAT,
                    [
                        {"beating": ident, "last_beat_us": now, **dataclasses.asdict(load)}
                        for ident, load in sorted(alive.items())
                    ],
                )
            return answers

        return await self._database.run(op)

    async def drain(self, worker_id: str, *, undo: bool) -> Seen:
        """See WorkerStore."""

        def op(tx: Tx) -> Seen:
            drained = domain.drain(_locked(tx, worker_id), undo=undo)
            return Seen(_save(tx, drained), tx.now_us() - drained.last_beat_us)

        return await self._database.run(op)

    async def deregister(self, worker_id: str, epoch: int) -> Worker:
        """See WorkerStore."""

        def op(tx: Tx) -> Worker:
            return _save(tx, domain.deregister(_locked(tx, worker_id), epoch))

        return await self._database.run(op)

    async def get(self, worker_id: str) -> Seen:
        """See WorkerStore."""

        def op(tx: Tx) -> Seen:
            query = select(workers).where(workers.c.worker_id == worker_id)
            row = tx.connection.execute(query).first()
            if row is None:
                raise NotFound("worker", worker_id)
            worker = _worker(row)
            return Seen(worker, tx.now_us() - worker.last_beat_us)

        return await self._database.read(op)

    async def page(self, wanted: WorkerFilter, after: str, limit: int) -> list[Seen]:
        """See WorkerStore."""
        c = workers.c
        base = select(workers).order_by(c.worker_id).limit(limit)
        if wanted.role is not None:
            base = base.where(c.role == int(wanted.role))
        if wanted.states:
            base = base.where(c.state.in_([int(state) for state in wanted.states]))

        def op(tx: Tx) -> list[Seen]:
            now = tx.now_us()
            found: list[Seen] = []
            last = after
            while len(found) < limit:
                rows = tx.connection.execute(base.where(c.worker_id > last)).all()
                page = [_worker(row) for row in rows]
                found += [
                    Seen(worker, now - worker.last_beat_us)
                    for worker in page
                    if not wanted.model or wanted.model in worker.profile.served_models
                ]
                if len(page) < limit:
                    break
                last = page[-1].worker_id
            return found[:limit]

        return await self._database.read(op)

    async def live(self) -> Live:
        """See WorkerStore."""

        def op(tx: Tx) -> Live:
            now = tx.now_us()
            return Live(tuple(_worker(row) for row in tx.connection.execute(_LIVE)), now)

        return await self._database.read(op)

    async def sweep(self, silent_us: int | None, in_time: Callable[[], bool]) -> Sweep:
        """See WorkerStore."""
        c = workers.c

        def op(tx: Tx) -> Sweep:
            lost: tuple[str, ...] = ()
            if silent_us is not None:
                # The clock is read before the lock here: a beat that comes in between
                # is seen by the condition, which PostgreSQL checks again on the new row.
                query = (
                    select(c.worker_id)
                    .where(c.state.in_(_ALIVE), c.last_beat_us < tx.now_us() - silent_us)
                    .order_by(c.worker_id)
                    .with_for_update()
                )
                lost = tuple(tx.connection.scalars(query))
                if not in_time():
                    lost = ()
                if lost:
                    tx.connection.execute(
                        update(workers)
                        .where(c.worker_id.in_(lost))
                        .values(state=int(State.LOST), void_below=c.epoch + 1)
                    )
            owed = select(c.worker_id, c.void_below).where(c.voided_below < c.void_below)
            rows = tx.connection.execute(owed.order_by(c.worker_id).limit(_PENDING_AT_ONCE))
            return Sweep(lost, tuple((row.worker_id, row.void_below) for row in rows))

        return await self._database.run(op)

    async def voided(self, worker_id: str, current_epoch: int) -> None:
        """See WorkerStore."""
        c = workers.c
        statement = (
            update(workers)
            .where(c.worker_id == worker_id, c.voided_below < current_epoch)
            .values(voided_below=current_epoch)
        )
        await self._database.run(lambda tx: tx.connection.execute(statement).rowcount)


class SqlRouteStore:
    """A RouteStore over `Database`. Answers that arrive together share one statement."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._waiting: list[tuple[RouteKey, bytes, asyncio.Future[tuple[bytes, int]]]] = []
        self._flusher: asyncio.Task[None] | None = None

    async def settle(self, key: RouteKey, answer: bytes) -> tuple[bytes, int]:
        """See RouteStore."""
        done: asyncio.Future[tuple[bytes, int]] = asyncio.get_running_loop().create_future()
        self._waiting.append((key, answer, done))
        if self._flusher is None:
            self._flusher = asyncio.create_task(self._flush())
        return await done

    async def purge(self, kept_us: int) -> int:
        """See RouteStore."""
        c = routes.c

        def op(tx: Tx) -> int:
            before = tx.now_us() - kept_us
            oldest = select(c.created_us).where(c.created_us < before).order_by(c.created_us)
            limit = tx.connection.scalar(oldest.offset(_PURGED_AT_ONCE).limit(1))
            gone = delete(routes).where(c.created_us < (before if limit is None else limit))
            return tx.connection.execute(gone).rowcount

        return await self._database.run(op)

    async def _flush(self) -> None:
        try:
            while self._waiting:
                await gathered(self._waiting, MAX_BATCH)
                batch, self._waiting = self._waiting, []
                # The first of two with the same key counts.
                answers = {key: answer for key, answer, _ in reversed(batch)}
                try:
                    counted = await self._database.run(partial(_settle, answers=answers))
                except Exception as error:  # noqa: BLE001 - everyone who waits must hear of it
                    for _, _, done in batch:
                        if not done.done():
                            done.set_exception(error)
                    continue
                for key, _, done in batch:
                    if not done.done():
                        done.set_result(counted.get(key) or (answers[key], 0))
        finally:
            self._flusher = None


def _settle(tx: Tx, answers: dict[RouteKey, bytes]) -> dict[RouteKey, tuple[bytes, int]]:
    """Insert what is new; return the older answers of the others."""
    c = routes.c
    now = tx.now_us()
    rows = [
        {
            "tenant_id": key.tenant_id,
            "request_id": key.request_id,
            "attempt": key.attempt,
            "answer": answer,
            "created_us": now,
        }
        for key, answer in answers.items()
    ]
    # Sorted, so that replicas that meet on the same keys wait for one another in order.
    rows.sort(key=lambda row: (row["tenant_id"], row["request_id"], row["attempt"]))
    insert = _insert(tx, routes).on_conflict_do_nothing()
    insert = insert.returning(c.tenant_id, c.request_id, c.attempt)
    new = {RouteKey(*row) for row in tx.connection.execute(insert, rows)}
    if len(new) == len(rows):
        return {}
    taken = [(key.tenant_id, key.request_id, key.attempt) for key in answers if key not in new]
    query = select(routes).where(tuple_(c.tenant_id, c.request_id, c.attempt).in_(taken))
    return {
        RouteKey(row.tenant_id, row.request_id, row.attempt): (
            row.answer,
            max(0, now - row.created_us),
        )
        for row in tx.connection.execute(query)
    }


_ALIVE = (int(State.READY), int(State.DRAINING))
_LIVE = select(workers).where(workers.c.state.in_(_ALIVE)).order_by(workers.c.worker_id)
_BEAT = (
    update(workers)
    .where(workers.c.worker_id == bindparam("beating"))
    .values({name: bindparam(name) for name in ("last_beat_us", *Load.__dataclass_fields__)})
)
_PROFILE_COLUMNS = tuple(
    name
    for name in Profile.__dataclass_fields__
    if name not in {"compatibility", "role", "served_models"}
)


def _insert(tx: Tx, table: Table) -> Any:
    return (postgresql if tx.is_postgres else sqlite).insert(table)


def _locked(tx: Tx, worker_id: str) -> Worker:
    query = select(workers).where(workers.c.worker_id == worker_id).with_for_update()
    row = tx.connection.execute(query).first()
    if row is None:
        raise NotFound("worker", worker_id)
    return _worker(row)


def _save(tx: Tx, worker: Worker) -> Worker:
    row = _row(worker)
    ident = row.pop("worker_id")
    tx.connection.execute(update(workers).where(workers.c.worker_id == ident).values(row))
    return worker


def _row(worker: Worker) -> dict[str, Any]:
    profile = worker.profile
    return {
        **{name: getattr(profile, name) for name in _PROFILE_COLUMNS},
        **dataclasses.asdict(profile.compatibility),
        **dataclasses.asdict(worker.load),
        "role": int(profile.role),
        "served_models": json.dumps(profile.served_models),
        "instance_id": worker.instance_id,
        "epoch": worker.epoch,
        "state": int(worker.state),
        "last_beat_us": worker.last_beat_us,
        "void_below": worker.void_below,
        "voided_below": worker.voided_below,
    }


def _worker(row: Any) -> Worker:
    profile = Profile(
        **{name: getattr(row, name) for name in _PROFILE_COLUMNS},
        role=Role(row.role),
        served_models=tuple(json.loads(row.served_models)),
        compatibility=Compatibility(
            **{name: getattr(row, name) for name in Compatibility.__dataclass_fields__}
        ),
    )
    return Worker(
        profile=profile,
        instance_id=row.instance_id,
        epoch=row.epoch,
        state=State(row.state),
        load=Load(row.running, row.waiting, row.kv_usage, row.held),
        last_beat_us=row.last_beat_us,
        void_below=row.void_below,
        voided_below=row.voided_below,
    )
