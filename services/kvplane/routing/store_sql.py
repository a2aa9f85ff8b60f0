"""The registry's and the routes' storage over SQLite and PostgreSQL."""

import asyncio
import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from sqlalchemy import (
    String,
    Table,
    and_,
    bindparam,
    delete,
    literal_column,
    or_,
    select,
    text,
    tuple_,
    update,
)
from sqlalchemy.dialects import postgresql, sqlite

from kvplane.db.database import MAX_BATCH, Database, Tx
from kvplane.db.prepared import Prepared, id_list, is_listed, prepared
from kvplane.kernel.errors import AlreadyExists, NotFound
from kvplane.kernel.gathering import gathered
from kvplane.routing import domain
from kvplane.routing.domain import Load, Profile, State, Worker
from kvplane.routing.store import Beat, BeatAnswer, Live, RouteKey, Seen, Sweep, WorkerFilter
from kvplane.routing.tables import WORKER_COLUMNS, routes, worker_of, worker_values, workers

_PENDING_AT_ONCE = 100
_PURGED_AT_ONCE = 10_000

__all__ = ["SqlRouteStore", "SqlWorkerStore", "routes", "workers"]

_ALIVE = (int(State.READY), int(State.DRAINING))
_W, _R = workers.c, routes.c


def _insert(is_postgres: bool, table: Table) -> Any:
    return (postgresql if is_postgres else sqlite).insert(table).on_conflict_do_nothing()


_FIND = prepared(select(workers).where(_W.worker_id == bindparam("id")))
_LOCK = prepared(select(workers).where(_W.worker_id == bindparam("id")).with_for_update())
_NEW = Prepared(lambda is_postgres: _insert(is_postgres, workers).returning(_W.epoch))
_SAVE = prepared(
    update(workers)
    .where(_W.worker_id == bindparam("id"))
    .values({name: bindparam(name) for name in WORKER_COLUMNS if name != "worker_id"})
)
_LOCK_BEATING = Prepared(
    lambda is_postgres: (
        select(_W.worker_id, _W.epoch, _W.state)
        .where(is_listed(_W.worker_id, is_postgres))
        .order_by(_W.worker_id)
        .with_for_update()
    )
)
_BEAT = prepared(
    update(workers)
    .where(_W.worker_id == bindparam("id"))
    .values({name: bindparam(name) for name in ("last_beat_us", *Load.__dataclass_fields__)})
)
_IS_ALIVE = _W.state.in_([literal_column(str(state)) for state in _ALIVE])
_LIVE = prepared(select(workers).where(_IS_ALIVE).order_by(_W.worker_id))
_OWED = prepared(
    select(_W.worker_id, _W.void_below)
    .where(_W.voided_below < _W.void_below)
    .order_by(_W.worker_id)
    .limit(_PENDING_AT_ONCE)
)
_TAKEN = prepared(
    select(_W.worker_id).where(
        _IS_ALIVE,
        _W.worker_id != bindparam("id"),
        or_(
            _W.engine_id == bindparam("engine_id"),
            and_(
                _W.engine_id == literal_column("''"),
                _W.kv_host == bindparam("kv_host"),
                _W.kv_port == bindparam("kv_port"),
            ),
        ),
    )
)
# Two that register at once do not see one another's row.
_LOCK_ENGINE = prepared(
    text("SELECT pg_advisory_xact_lock(hashtextextended(:key, 2))").bindparams(
        bindparam("key", type_=String)
    )
)
_SETTLE = Prepared(
    lambda is_postgres: _insert(is_postgres, routes).returning(
        _R.tenant_id, _R.request_id, _R.attempt
    )
)


class SqlWorkerStore:
    """A WorkerStore over `Database`."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def register(self, profile: Profile, instance_id: str, seen: int) -> Worker:
        """See WorkerStore."""

        def op(tx: Tx) -> Worker:
            if profile.engine_id:
                _refuse_taken(tx, profile)
            new = domain.register(None, profile, instance_id, tx.now_us(), seen)
            if _NEW.one(tx, **worker_values(new)).first() is not None:
                return new
            known = _locked(tx, profile.worker_id)
            again = domain.register(known, profile, instance_id, tx.now_us(), seen)
            return _save(tx, again)

        return await self._database.run(op)

    async def beat(self, beats: Sequence[Beat]) -> list[BeatAnswer]:
        """See WorkerStore."""
        ids = sorted({beat.worker_id for beat in beats})

        def op(tx: Tx) -> list[BeatAnswer]:
            rows = {row[0]: row for row in _LOCK_BEATING.one(tx, ids=id_list(tx, ids))}
            answers = []
            alive: dict[str, Load] = {}
            for beat in beats:
                _, epoch, number = rows.get(beat.worker_id, (beat.worker_id, 0, None))
                state = None if number is None else State(number)
                known = state not in (None, State.LOST) and epoch == beat.epoch
                answers.append(BeatAnswer(known, state))
                if known:
                    alive[beat.worker_id] = beat.load
            if alive:
                now = tx.now_us()
                rows_to_beat = [
                    {"id": ident, "last_beat_us": now, **dataclasses.asdict(load)}
                    for ident, load in sorted(alive.items())
                ]
                _BEAT.many(tx, rows_to_beat)
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
            worker = _existing(tx, _FIND, worker_id)
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
                page = [worker_of(row) for row in rows]
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
            return Live(tuple(map(worker_of, _LIVE.one(tx))), now)

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
            owed = tuple((worker_id, void_below) for worker_id, void_below in _OWED.one(tx))
            return Sweep(lost, owed)

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
    if len(rows) == 1:  # as a rule
        inserted = _SETTLE.one(tx, **rows[0])
    else:
        insert = _insert(tx.is_postgres, routes).returning(c.tenant_id, c.request_id, c.attempt)
        inserted = tx.connection.execute(insert, rows)
    new = {RouteKey(*row) for row in inserted}
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


def _refuse_taken(tx: Tx, profile: Profile) -> None:
    if tx.is_postgres:
        _LOCK_ENGINE.one(tx, key=profile.engine_id)
    taken = _TAKEN.one(
        tx,
        id=profile.worker_id,
        engine_id=profile.engine_id,
        kv_host=profile.kv_host,
        kv_port=profile.kv_port,
    )
    if taken.first() is not None:
        raise AlreadyExists("engine", profile.engine_id)


def _existing(tx: Tx, query: Prepared, worker_id: str) -> Worker:
    row = query.one(tx, id=worker_id).first()
    if row is None:
        raise NotFound("worker", worker_id)
    return worker_of(row)


def _locked(tx: Tx, worker_id: str) -> Worker:
    return _existing(tx, _LOCK, worker_id)


def _save(tx: Tx, worker: Worker) -> Worker:
    _SAVE.many(tx, [worker_values(worker) | {"id": worker.profile.worker_id}])
    return worker
