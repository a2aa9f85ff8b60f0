"""One deployment with two replicas of everything, for the tests that do it no lasting harm."""

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from db.postgres import Postgres, postgres, url
from demo.servers import Server, stop_all, wait_for

from cases.processes import CLOCK, Engine, Services, registered

__all__ = ["postgres", "url"]


@pytest.fixture
def start() -> Iterator[Callable[..., None]]:
    """Starts servers, waits until they are ready, and stops them with the test."""
    running: list[Server] = []

    def go(*servers: Server) -> None:
        running.extend(servers)
        for server in servers:
            server.start()
        wait_for(servers, 60)

    yield go
    stop_all(running)


class Deployment(Services):
    """Two replicas of each service over PostgreSQL, a prefill and two decodes.

    `since` is when all engines had registered.
    """

    def __init__(self, folder: Path, database: str) -> None:
        # L-01 names this margin.
        super().__init__(folder, database, replicas=2, LEASE_MARGIN_S="1")
        self.folder = folder
        self.prefill = self.engine("prefill", "prefill")
        # Nobody ever talks to this one.
        self.idle = self.engine("idle", "both", model="idle")
        self.since = 0.0
        self.decodes = [self.engine(f"decode-{n}", "decode") for n in (1, 2)]

    def engine(self, worker_id: str, role: str, *arguments: str, **more: str) -> Engine:
        """Return another engine, which is not started."""
        return Engine(worker_id, role, self.folder, self.control_plane, *arguments, **more)


@pytest.fixture(scope="package")
def deployment(
    postgres: Postgres, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Deployment]:
    """All of it, ready."""
    database = asyncio.run(postgres.new_database())
    whole = Deployment(tmp_path_factory.mktemp("cases"), database)
    engines = [whole.prefill, whole.idle, *whole.decodes]
    servers = [*whole.servers.values(), *engines]
    try:
        for engine in engines:
            engine.start()
        whole.start()
        wait_for(servers, 120)
        asyncio.run(registered(whole, *(engine.name for engine in engines)))
        whole.since = CLOCK.monotonic()
        yield whole
    finally:
        stop_all(servers)
