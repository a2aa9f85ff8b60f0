"""The registry's storage over SQLite and PostgreSQL."""

from collections.abc import Sequence

from sqlalchemy import Select, delete, select, tuple_, update
from sqlalchemy.exc import IntegrityError

from kvplane.db.database import Database, Tx
from kvplane.kernel.errors import KvplaneError, NotFound, Unavailable
from kvplane.kernel.limits import Quotas
from kvplane.session import domain, sql_rows
from kvplane.session.domain import (
    Begun,
    CompleteTurn,
    Session,
    SessionConfig,
    SessionFilter,
    SessionRef,
    SessionState,
)
from kvplane.session.quota import OverQuota, concerns_turns
from kvplane.session.sql_begin import begin_turns
from kvplane.session.sql_complete import complete_turns
from kvplane.session.sql_limits import forget_unheld, open_gate
from kvplane.session.sql_usage import count_active, read_usage
from kvplane.session.store import FreeTask, NewTurn
from kvplane.session.tables import (
    SESSION_COLUMNS,
    session_history,
    session_of,
    session_values,
    sessions,
    turns,
)
from kvplane.session.usage import Completed, Usage

__all__ = ["SqlSessionStore", "session_history", "sessions", "turns"]

_TRIES = 4


class SqlSessionStore:
    """SessionStore over `Database`; the tables are made by the migrations."""

    def __init__(self, database: Database, config: SessionConfig) -> None:
        self._database = database
        self._config = config

    async def begin_turns(
        self, tenant_id: str, turns: Sequence[NewTurn], quotas: Quotas
    ) -> list[Begun | OverQuota | KvplaneError]:
        """See SessionStore."""
        config = self._config
        order = _begins(tenant_id) if concerns_turns(quotas) else ""

        def operation(tx: Tx) -> list[Begun | OverQuota | KvplaneError]:
            return begin_turns(tx, tenant_id, turns, config, quotas)

        try:
            return await self._database.run(operation, order=order)
        except IntegrityError:
            # Another replica used a request_id for something else at the same moment. Its
            # turn is visible now.
            return await self._database.run(operation, order=order)

    async def complete_turns(
        self, tenant_id: str, reports: Sequence[CompleteTurn], quotas: Quotas
    ) -> list[Completed | KvplaneError]:
        """See SessionStore."""
        config = self._config
        return await self._database.run(
            lambda tx: complete_turns(tx, tenant_id, reports, config, quotas),
            # After its begins: they lock the tenant's row first, then sessions.
            order=f"{tenant_id}:complete",
        )

    async def usage(self, tenant_id: str) -> tuple[Usage, int]:
        """See SessionStore."""
        return await self._database.read(
            lambda tx: (read_usage(tx, tenant_id), count_active(tx, tenant_id))
        )

    async def create(
        self, tenant_id: str, name: str, model: str, session_id: str, quotas: Quotas
    ) -> tuple[Session, bool]:
        """See SessionStore."""

        def operation(tx: Tx) -> tuple[Session, bool] | None:
            ref = SessionRef(name=name)
            gate = open_gate(tx, tenant_id, quotas)
            for _ in range(_TRIES):
                found = _find(tx, tenant_id, ref)
                if found is not None and found.state is SessionState.ACTIVE:
                    return found, found.session_id == session_id
                if gate is not None:
                    gate.create()
                made = domain.new_session(
                    tenant_id, session_id, name, model, tx.now_us(), self._config
                )
                sql_rows.NEW_SESSIONS.many(tx, [session_values(made)])
            return None

        order = _begins(tenant_id) if concerns_turns(quotas) else ""
        answer = await self._database.run(operation, order=order)
        if answer is None:
            raise Unavailable("the session is changing too fast", retry_after=0.1)
        return answer

    async def get(self, tenant_id: str, ref: SessionRef) -> Session:
        """See SessionStore."""
        return await self._database.read(lambda tx: _existing(tx, tenant_id, ref))

    async def end(self, tenant_id: str, ref: SessionRef) -> tuple[Session, bool]:
        """See SessionStore."""

        def operation(tx: Tx) -> tuple[Session, bool]:
            session_id = _existing(tx, tenant_id, ref).session_id
            locked = sql_rows.locked_sessions(tx, tenant_id, [session_id])
            if session_id not in locked:  # forgotten meanwhile
                raise NotFound("session", ref.session_id or ref.name)
            session = locked[session_id]
            if session.state is not SessionState.ACTIVE:
                return session, False
            ended = domain.end(session, SessionState.ENDED, tx.now_us(), self._config)
            _save_ended(tx, [ended])
            return ended, True

        return await self._database.run(operation)

    async def freed(self, task: FreeTask) -> None:
        """See SessionStore."""
        statement = (
            update(sessions)
            .where(
                sessions.c.tenant_id == task.tenant_id,
                sessions.c.session_id == task.session_id,
                sessions.c.free_due_us == task.due_us,
            )
            .values(free_due_us=None)
        )

        def operation(tx: Tx) -> None:
            tx.connection.execute(statement)

        await self._database.run(operation)

    async def list_sessions(
        self,
        tenant_id: str,
        which: SessionFilter,
        after: tuple[int, str] | None,
        limit: int,
    ) -> list[Session]:
        """See SessionStore."""
        statement = select(*SESSION_COLUMNS).where(sessions.c.tenant_id == tenant_id)
        if which.states:
            statement = statement.where(sessions.c.state.in_([int(s) for s in which.states]))
        if which.model:
            statement = statement.where(sessions.c.model == which.model)
        if which.worker_id:
            statement = statement.where(sessions.c.last_decode_worker_id == which.worker_id)
        # Neither ever changes, so pages stay put while sessions come, go and move.
        key = tuple_(sessions.c.create_us, sessions.c.session_id)
        if after is not None:
            statement = statement.where(key < after)
        statement = statement.order_by(
            sessions.c.create_us.desc(), sessions.c.session_id.desc()
        ).limit(limit)
        return await self._select(statement)

    async def changes(self, tenant_id: str, after: tuple[int, str], limit: int) -> list[Session]:
        """See SessionStore."""
        statement = (
            select(*SESSION_COLUMNS)
            .where(
                sessions.c.tenant_id == tenant_id,
                tuple_(sessions.c.version, sessions.c.session_id) > after,
            )
            .order_by(sessions.c.version, sessions.c.session_id)
            .limit(limit)
        )
        return await self._select(statement)

    async def now_us(self) -> int:
        """See SessionStore."""
        return await self._database.read(lambda tx: tx.now_us())

    async def expire_idle(self, limit: int) -> list[Session]:
        """See SessionStore."""

        def operation(tx: Tx) -> list[Session]:
            idle = _due(tx, sessions.c.state == int(SessionState.ACTIVE), limit)
            now_us = tx.now_us()
            expired = [domain.end(s, SessionState.EXPIRED, now_us, self._config) for s in idle]
            _save_ended(tx, expired)
            return expired

        return await self._database.run(operation)

    async def claim_frees(self, limit: int) -> list[FreeTask]:
        """See SessionStore."""

        def operation(tx: Tx) -> list[FreeTask]:
            statement = (
                select(*SESSION_COLUMNS)
                .where(sessions.c.free_due_us <= tx.now_us())
                .order_by(sessions.c.free_due_us)
                .limit(limit)
                .with_for_update(skip_locked=True)
            )
            rows = tx.connection.execute(statement).all()
            due_us = tx.now_us() + domain.us(self._config.free_retry_s)
            for row in rows:
                tx.connection.execute(
                    update(sessions)
                    .where(
                        sessions.c.tenant_id == row.tenant_id,
                        sessions.c.session_id == row.session_id,
                    )
                    .values(free_due_us=due_us)
                )
            return [FreeTask(row.tenant_id, row.session_id, due_us) for row in rows]

        return await self._database.run(operation)

    async def forget_ended(self, limit: int) -> int:
        """See SessionStore."""

        def operation(tx: Tx) -> int:
            ended = sessions.c.state != int(SessionState.ACTIVE)
            old = _due(tx, ended & sessions.c.free_due_us.is_(None), limit)
            for session in old:
                for table in (turns, sessions):
                    tx.connection.execute(
                        delete(table).where(
                            table.c.tenant_id == session.tenant_id,
                            table.c.session_id == session.session_id,
                        )
                    )
            forget_unheld(tx, tx.now_us() - domain.us(self._config.abandoned_after_s), limit)
            return len(old)

        return await self._database.run(operation)

    async def _select(self, statement: Select[tuple[object, ...]]) -> list[Session]:
        return await self._database.read(
            lambda tx: [session_of(row) for row in tx.connection.execute(statement)]
        )


def _begins(tenant_id: str) -> str:
    return f"{tenant_id}:begin"


def _find(tx: Tx, tenant_id: str, ref: SessionRef) -> Session | None:
    statement = select(*SESSION_COLUMNS).where(sessions.c.tenant_id == tenant_id)
    if ref.session_id:
        statement = statement.where(sessions.c.session_id == ref.session_id)
    else:
        statement = (
            statement.where(sessions.c.name == ref.name.encode())
            .order_by(
                (sessions.c.state == int(SessionState.ACTIVE)).desc(),
                # Ended sessions all stay equally long, so this is the order of ending.
                sessions.c.due_us.desc(),
            )
            .limit(1)
        )
    row = tx.connection.execute(statement).one_or_none()
    return None if row is None else session_of(row)


def _existing(tx: Tx, tenant_id: str, ref: SessionRef) -> Session:
    found = _find(tx, tenant_id, ref)
    if found is None:
        raise NotFound("session", ref.session_id or ref.name)
    return found


def _due(tx: Tx, condition: object, limit: int) -> list[Session]:
    """Lock sessions whose time has come, passing over those that somebody else has locked."""
    statement = (
        select(*SESSION_COLUMNS)
        .where(condition, sessions.c.due_us <= tx.now_us())  # type: ignore[arg-type]
        .order_by(sessions.c.due_us)
        .limit(limit)
        .with_for_update(skip_locked=True)
    )
    return [session_of(row) for row in tx.connection.execute(statement)]


def _save_ended(tx: Tx, ended: Sequence[Session]) -> None:
    sql_rows.save_sessions(tx, ended)
    for session in ended:
        tx.connection.execute(
            delete(session_history).where(
                session_history.c.tenant_id == session.tenant_id,
                session_history.c.session_id == session.session_id,
            )
        )
