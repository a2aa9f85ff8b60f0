"""A PostgreSQL server of the tests' own, and an empty database for each that asks."""

import contextlib
import itertools
import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from kvplane.db.database import postgres_engine
from postgresql import begin, new_server
from sqlalchemy import make_url, text

_numbers = itertools.count()


class Postgres:
    """One server; it can be stopped, started, frozen and thawed."""

    def __init__(self) -> None:
        # Not below pytest's own folder, which every pytest closes to the server's user.
        folder = tempfile.mkdtemp(prefix="kvplane-postgres-")
        self._server = new_server(folder)

    async def new_database(self) -> str:
        """Return the URL of an empty database."""
        name = f"test{next(_numbers)}"
        engine = postgres_engine(make_url(self._server.get_uri()), isolation_level="AUTOCOMMIT")
        async with engine.connect() as connection:
            await connection.execute(text(f"CREATE DATABASE {name}"))
        await engine.dispose()
        return self._server.get_uri(name)

    def stop(self) -> None:
        self._server.stop()

    def start(self) -> None:
        begin(self._server)

    def close(self) -> None:
        main = psutil.Process(self._server.get_pid())
        main.send_signal(signal.SIGQUIT)  # without a checkpoint: nobody needs the data
        with contextlib.suppress(psutil.TimeoutExpired):
            main.wait(10)
        self._server.cleanup()

    @contextlib.contextmanager
    def frozen(self) -> Iterator[None]:
        """Stop all its processes from running, without ending them."""
        main = psutil.Process(self._server.get_pid())
        pids = [main.pid, *(child.pid for child in main.children(recursive=True))]
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        try:
            yield
        finally:
            for pid in pids:
                os.kill(pid, signal.SIGCONT)


@pytest.fixture(scope="session")
def postgres() -> Iterator[Postgres]:
    """A server that a test may stop or freeze."""
    server = Postgres()
    yield server
    server.close()


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """An empty database of either kind."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/test.db"
    found: str = request.getfixturevalue("postgres_database")
    return found
