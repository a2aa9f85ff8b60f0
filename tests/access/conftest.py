import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from access.plane import Credentials, Guarded, guarded, issue
from kvplane.db import migrate
from wire.seed import sow


@pytest.fixture(scope="session")
def migrated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An empty database of the newest schema, to be copied."""
    file = tmp_path_factory.mktemp("access") / "template.db"
    asyncio.run(migrate.upgrade(f"sqlite:///{file}"))
    return file


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def plane(migrated: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Guarded]:
    """One for all tests of a file, in which somebody is at home."""
    async with guarded(migrated, tmp_path_factory.mktemp("plane")) as plane:
        await sow(plane, "bystander", "bystander")
        yield plane


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def credentials(plane: Guarded) -> Credentials:
    return await issue(plane)
