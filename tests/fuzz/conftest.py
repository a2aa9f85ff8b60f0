import asyncio
from collections.abc import Iterator

import pytest

from fuzz.databases import Sqlite
from fuzz.search import RpcSearch
from fuzz.world import quiet


@pytest.fixture(scope="package")
def runner() -> Iterator[asyncio.Runner]:
    """The event loop of all searches."""
    with asyncio.Runner() as runner, quiet():
        yield runner


@pytest.fixture(scope="package")
def calls(runner: asyncio.Runner, tmp_path_factory: pytest.TempPathFactory) -> RpcSearch:
    """Calls of RPCs, over SQLite."""
    return RpcSearch(runner, Sqlite(tmp_path_factory.mktemp("fuzz")))


@pytest.fixture
def all_calls(calls: RpcSearch) -> Iterator[RpcSearch]:
    """The same, for a test that chooses RPCs."""
    yield calls
    calls.methods = None
