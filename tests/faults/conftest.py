"""One plane for all fault tests; each finds it mended."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator

import psutil
import pytest
from db.postgres import Postgres

from faults.plane import Plane


class Database(Postgres):
    """A PostgreSQL server that can be killed, too."""

    def kill(self) -> None:
        """End its main process with SIGKILL, and wait until its children have noticed."""
        main = psutil.Process(self._server.get_pid())
        processes = [main, *main.children(recursive=True)]
        main.kill()
        _, left = psutil.wait_procs(processes, 10)
        for one in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                one.kill()


@pytest.fixture(scope="package")
def database() -> Iterator[Database]:
    """A server of these tests' own."""
    server = Database()
    yield server
    server.close()


@pytest.fixture(scope="package")
def whole(database: Database) -> Iterator[Plane]:
    """Everything, started."""
    plane = Plane(asyncio.run(database.new_database()))
    try:
        plane.start()
        yield plane
    finally:
        plane.stop()


@pytest.fixture
async def plane(whole: Plane) -> AsyncIterator[Plane]:
    """The plane, all well before and after."""
    await whole.mend()
    yield whole
    await whole.mend()
