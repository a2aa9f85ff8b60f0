"""The registry over each database, and the other services that it talks to."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import pytest
from kvplane.api.lease.v1 import lease_pb2
from kvplane.db.database import Database
from kvplane.kernel.clock import Clock, FakeClock, SystemClock
from kvplane.kernel.context import caller
from kvplane.kernel.errors import Unavailable
from kvplane.kernel.limits import NO_QUOTAS, Quotas
from kvplane.session.domain import SessionConfig
from kvplane.session.main import SessionPart, build
from kvplane.session.tables import (
    session_history,
    sessions,
    tenant_rates,
    tenant_usage,
    turns,
    unheld_turns,
)
from session.databases import create_tables
from sqlalchemy import text

TABLES = [sessions, turns, session_history, tenant_rates, tenant_usage, unheld_turns]


class FakeLeases:
    """Remembers what was asked of the lease service; can be away or never answer."""

    def __init__(self) -> None:
        self.freed: list[tuple[str, str]] = []
        self.held: dict[tuple[str, str], list[str]] = {}
        self.away = False
        self.silent = False

    async def FreeSession(self, request, /):
        await self._answer()
        self.freed.append((caller().tenant_id, request.session_id))
        return lease_pb2.FreeSessionResponse(freed=1)

    async def ListOwnerships(self, request, /):
        await self._answer()
        held = self.held.get((caller().tenant_id, request.session_id), [])
        return lease_pb2.ListOwnershipsResponse(
            ownerships=[lease_pb2.Ownership(ownership_id=i) for i in held]
        )

    async def _answer(self) -> None:
        if self.silent:
            await asyncio.Event().wait()
        if self.away:
            raise Unavailable("the lease service is away")


@dataclass
class Registry:
    """Makes replicas of the registry over one database."""

    url: str
    clock: Clock
    leases: FakeLeases = field(default_factory=FakeLeases)
    databases: list[Database] = field(default_factory=list)
    # What tenants may use: theirs by name, everyone's under "".
    quotas: dict[str, Quotas] = field(default_factory=dict)

    async def of(self, tenant_id: str) -> Quotas:
        return self.quotas.get(tenant_id) or self.quotas.get("", NO_QUOTAS)

    def replica(self, config: SessionConfig | None = None) -> SessionPart:
        database = Database(self.url, self.clock)
        self.databases.append(database)
        return build(database, self.clock, self.leases, config or SessionConfig(), quotas=self)

    def tick(self) -> None:
        """Let time pass where it does not by itself."""
        if isinstance(self.clock, FakeClock):
            self.clock.advance(0.001)

    async def execute(self, statement: str, **parameters: object) -> list[tuple]:
        database = self.databases[0]

        def operation(tx):
            result = tx.connection.execute(text(statement), parameters)
            return [tuple(row) for row in result] if result.returns_rows else []

        return await database.run(operation)


@pytest.fixture
async def sqlite(tmp_path) -> AsyncIterator[Registry]:
    """Over SQLite, with a clock that only the test moves."""
    url = f"sqlite:///{tmp_path}/kvplane.db"
    await create_tables(url, TABLES)
    registry = Registry(url, FakeClock())
    yield registry
    for database in registry.databases:
        await database.close()


@pytest.fixture
async def postgres(postgres_database: str) -> AsyncIterator[Registry]:
    """Over a real PostgreSQL server, in real time."""
    await create_tables(postgres_database, TABLES)
    registry = Registry(postgres_database, SystemClock())
    yield registry
    for database in registry.databases:
        await database.close()


@pytest.fixture(params=["sqlite", "postgres"])
def registry(request: pytest.FixtureRequest) -> Registry:
    return request.getfixturevalue(request.param)
