"""Audit events over SQLite and PostgreSQL."""

from dataclasses import asdict
from typing import Any

from sqlalchemy import Row, delete, insert, select, tuple_, update

from kvplane.audit.domain import Ending, Entry, Event, Filter, Outcome, Place
from kvplane.audit.tables import audit_events
from kvplane.db.database import Database, Tx

_place = tuple_(audit_events.c.time_us, audit_events.c.event_id)


class SqlAuditStore:
    """AuditStore over `Database`; the table is made by the migrations."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def add(self, event_id: str, entry: Entry) -> None:
        """See AuditStore."""

        def operation(tx: Tx) -> None:
            tx.connection.execute(
                insert(audit_events).values(
                    event_id=event_id,
                    time_us=tx.now_us(),
                    **asdict(entry),
                    outcome=int(Outcome.STARTED),
                    reason="",
                )
            )

        await self._database.run(operation)

    async def finish(self, event_id: str, ending: Ending) -> None:
        """See AuditStore."""
        values: dict[str, Any] = {"outcome": int(ending.outcome), "reason": ending.reason}
        if ending.tenant_id:
            values["tenant_id"] = ending.tenant_id
        if ending.target:
            values["target"] = ending.target
        statement = update(audit_events).where(_started(event_id)).values(values)
        await self._database.run(lambda tx: _execute(tx, statement))

    async def drop(self, event_id: str) -> None:
        """See AuditStore."""
        statement = delete(audit_events).where(_started(event_id))
        await self._database.run(lambda tx: _execute(tx, statement))

    async def list_events(self, wanted: Filter, after: Place | None, limit: int) -> list[Event]:
        """See AuditStore."""
        table = audit_events.c
        statement = select(audit_events).order_by(table.time_us.desc(), table.event_id.desc())
        for name in ("tenant_id", "actor", "action"):
            value = getattr(wanted, name)
            if value:
                statement = statement.where(table[name] == value)
        if wanted.since_us is not None:
            statement = statement.where(table.time_us >= wanted.since_us)
        if wanted.until_us is not None:
            statement = statement.where(table.time_us < wanted.until_us)
        if after is not None:
            statement = statement.where(_place < (after.time_us, after.event_id))
        statement = statement.limit(limit)
        return await self._database.read(
            lambda tx: [_event_of(row) for row in tx.connection.execute(statement)]
        )

    async def purge(self, kept_us: int, limit: int) -> int:
        """See AuditStore."""
        table = audit_events.c

        def operation(tx: Tx) -> int:
            old = (
                select(table.event_id)
                .where(table.time_us < tx.now_us() - kept_us)
                .order_by(table.time_us)
                .limit(limit)
            )
            return _execute(tx, delete(audit_events).where(table.event_id.in_(old)))

        return await self._database.run(operation)


def _started(event_id: str) -> Any:
    # Never changed afterwards.
    return (audit_events.c.event_id == event_id) & (audit_events.c.outcome == int(Outcome.STARTED))


def _execute(tx: Tx, statement: Any) -> int:
    return int(tx.connection.execute(statement).rowcount)


def _event_of(row: Row[Any]) -> Event:
    entry = Entry(
        actor=row.actor,
        tenant_id=row.tenant_id,
        action=row.action,
        target=row.target,
        detail=row.detail,
        request_id=row.request_id,
    )
    return Event(row.event_id, row.time_us, entry, Outcome(row.outcome), row.reason)
