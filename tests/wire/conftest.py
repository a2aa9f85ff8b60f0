import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from kvplane.db import migrate
from wire.plane import Plane, running
from wire.seed import Seed, sow


@pytest.fixture(scope="session")
def migrated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An empty database of the newest schema, to be copied."""
    file = tmp_path_factory.mktemp("wire") / "template.db"
    asyncio.run(migrate.upgrade(f"sqlite:///{file}"))
    return file


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def plane(migrated: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Plane]:
    """One for all tests of a file."""
    async with running(migrated, tmp_path_factory.mktemp("plane")) as plane:
        yield plane


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def seed(plane: Plane) -> Seed:
    """Something of every kind, in the tenant "default"."""
    return await sow(plane, "one")
