"""What several areas share: a real PostgreSQL server, started once a run."""

import asyncio
import itertools
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from kvplane.db.database import postgres_engine
from postgresql import new_server
from sqlalchemy import make_url, text
from xdist.scheduler import LoadScopeScheduling

_numbers = itertools.count()


# Folders whose tests start many processes: they run one after the other, from the
# beginning, beside all others.
_CROWDS = ("fleet", "faults", "cases", "compose", "demo", "fuzz")


class _ByFolder(LoadScopeScheduling):
    """Tests of a folder stay together where two run side by side: they share servers and logs."""

    def _split_scope(self, nodeid: str) -> str:
        folder = nodeid.split("/")[1]
        return "crowds" if folder in _CROWDS else folder


def _place(item: pytest.Item) -> int:
    """Return 0 for what is to begin first."""
    folder = item.path.relative_to(Path(__file__).parent).parts[0]
    return 0 if folder in _CROWDS else 1


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadScopeScheduling:
    """Say how tests are shared out."""
    return _ByFolder(config, log)


def pytest_make_parametrize_id(val: object, argname: str) -> str | None:
    """Name bytes by their place: packed ones tell the time, and workers must agree on names."""
    return argname if isinstance(val, bytes) else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the tests on real vLLM last: the others say sooner what is wrong."""
    items.sort(key=lambda item: (item.get_closest_marker("vllm") is not None, _place(item)))
    for item in items:
        if item.get_closest_marker("vllm") is not None:
            # The first start of two vLLMs after an installation takes minutes.
            item.add_marker(pytest.mark.timeout(600))


async def _administer(url: str, *statements: str) -> None:
    engine = postgres_engine(make_url(url), isolation_level="AUTOCOMMIT")
    async with engine.connect() as connection:
        for statement in statements:
            await connection.execute(text(statement))
    await engine.dispose()


@pytest.fixture(scope="session")
def postgres_url() -> Iterator[str]:
    """The maintenance database of a server of our own."""
    # Not below pytest's own directory, which every pytest closes to the server's user.
    directory = tempfile.mkdtemp(prefix="kvplane-postgres-")
    server = new_server(directory)
    url = server.get_uri("postgres")
    # Nothing here outlives the machine.
    asyncio.run(
        _administer(
            url,
            "ALTER SYSTEM SET fsync = off",
            "ALTER SYSTEM SET full_page_writes = off",
            "SELECT pg_reload_conf()",
        )
    )
    yield url
    server.cleanup()


@pytest.fixture
async def postgres_database(postgres_url: str) -> AsyncIterator[str]:
    """The URL of a fresh, empty database."""
    name = f"fresh{next(_numbers)}"
    await _administer(postgres_url, f"CREATE DATABASE {name}")
    yield str(make_url(postgres_url).set(database=name))
    await _administer(postgres_url, f"DROP DATABASE {name} WITH (FORCE)")
