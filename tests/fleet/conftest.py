"""One fleet for all of these tests; after each of them nothing may be left of it."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator

import aiohttp
import pytest
from kvplane.api.tenant.v1 import tenant_pb2 as tenant
from kvplane.client import Channels, tenant_api
from kvplane.db.database import postgres_engine
from sqlalchemy import make_url, text

from fleet.books import LOG_OF_ORDERS, Books, eventually, nothing_of
from fleet.client import Client
from fleet.cluster import TOKEN, Fleet

TENANTS = ("red", "green", "blue")


async def _execute(url: str, *statements: str) -> None:
    engine = postgres_engine(make_url(url), isolation_level="AUTOCOMMIT")
    async with engine.connect() as connection:
        for statement in statements:
            await connection.execute(text(statement))
    await engine.dispose()


async def _keys(address: str) -> dict[str, str]:
    """Make the tenants and return a key of each."""
    channels = Channels()
    api = tenant_api(address, token=TOKEN, timeout=15, channels=channels)
    keys = {}
    for name in TENANTS:
        await api.CreateTenant(tenant.CreateTenantRequest(tenant_id=name))
        keys[name] = (await api.CreateApiKey(tenant.CreateApiKeyRequest(tenant_id=name))).secret
    await channels.close()
    return keys


async def _connected(fleet: Fleet) -> None:
    """Wait until both gateways know all engines and all of ours have their streams."""
    async with aiohttp.ClientSession() as http:
        books = Books(fleet, [], http)

        async def known() -> bool:
            for number in (1, 2):
                async with http.get(f"{fleet.gateway(number)}/readyz") as answer:
                    if (await answer.json()).get("workers") != len(fleet.names()):
                        return False
            query = "SELECT worker_id FROM worker_epochs WHERE stream_id <> ''"
            return len(await books.rows(query)) == len(fleet.names(managed=True))

        await eventually(known, 60)
        await books.close()


@pytest.fixture(scope="package")
def fleet(postgres_url: str) -> Iterator[Fleet]:
    """Everything, started."""
    asyncio.run(_execute(postgres_url, "CREATE DATABASE fleet"))
    whole = Fleet(str(make_url(postgres_url).set(database="fleet")))
    try:
        whole.start()
        asyncio.run(_execute(whole.database_url, *LOG_OF_ORDERS))
        whole.keys = asyncio.run(_keys(whole.addresses("session")))
        asyncio.run(_connected(whole))
        yield whole
    finally:
        whole.stop()


@pytest.fixture
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    """Connections of a test's own."""
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=100)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
        yield session


@pytest.fixture
def client_of(fleet: Fleet, http: aiohttp.ClientSession) -> Callable[[str], Client]:
    """Makes a tenant's client."""
    gateways = [fleet.gateway(1), fleet.gateway(2)]
    return lambda name: Client(http, fleet.keys[name], gateways)


@pytest.fixture
def client(client_of: Callable[[str], Client]) -> Client:
    """The client of a test that needs but one tenant."""
    return client_of("red")


@pytest.fixture
async def books(fleet: Fleet, http: aiohttp.ClientSession) -> AsyncIterator[Books]:
    """Looks behind the gateway; in the end everything must be back where it was.

    Nothing that ended by an order or a read may have had to wait for its hold's end, and
    nobody may have read what was no longer held, unless the test says that it would.
    """
    one = Books(fleet, list(TENANTS), http)
    before = await one.states(fleet.names(managed=True))
    yield one
    try:
        await one.mend()
        await nothing_of(one.unfinished, 30)
        await one.end_sessions()
        await nothing_of(one.unreturned, 30)
        assert await one.done_twice() == []
        after = await one.states(fleet.names(managed=True))
        grown = {
            (name, counter): grew
            for name, state in after.items()
            for counter in ("kv_expired", "late_notifications")
            if (grew := state["stats"][counter] - before[name]["stats"][counter])
        }
        assert set(grown) <= one.allowed, grown
    finally:
        await one.close()
