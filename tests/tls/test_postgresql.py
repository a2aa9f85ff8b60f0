"""A database behind TLS, and what is said of one that cannot be used."""

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from kvplane.db import migrate
from kvplane.db.database import Database, postgres_engine
from kvplane.db.schema import schema_problem
from kvplane.kernel.clock import SystemClock
from kvplane.kernel.errors import Unavailable
from sqlalchemy import URL, make_url, text

from tls.authority import Authority, write

# What a client sends first, and the server's yes:
# https://www.postgresql.org/docs/current/protocol-message-formats.html
_SSL_REQUEST = bytes.fromhex("0000000804d2162f")


async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
    writer.close()


class Front:
    """Speaks TLS for a PostgreSQL server that was built without."""

    def __init__(self, url: URL, context: ssl.SSLContext) -> None:
        self._socket = f"{url.query['host']}/.s.PGSQL.5432"
        self._context = context
        self.encrypted = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            assert await reader.readexactly(8) == _SSL_REQUEST
            writer.write(b"S")
            await writer.start_tls(self._context)
        except (ssl.SSLError, OSError, asyncio.IncompleteReadError):
            writer.close()
            return
        self.encrypted += 1
        behind, to = await asyncio.open_unix_connection(self._socket)
        await asyncio.gather(pump(reader, to), pump(behind, writer))


@pytest.fixture
async def front(
    postgres_database: str, authority: Authority, tmp_path: Path
) -> AsyncIterator[tuple[Front, str]]:
    """The front, and its URL without parameters."""
    files = write(tmp_path / "server", authority.issue(hosts=("localhost",)))
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(files.cert_file, files.key_file)
    url = make_url(postgres_database)
    made = Front(url, context)
    server = await asyncio.start_server(made.serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    yield made, f"postgresql://postgres@localhost:{port}/{url.database}"
    server.close()


async def test_a_database_is_reached_over_tls_and_only_the_right_one(
    front: tuple[Front, str], stranger: Authority, authority: Authority, tmp_path: Path
) -> None:
    tls, url = front
    for name, ca in (("ours", authority), ("theirs", stranger)):
        (tmp_path / f"{name}.pem").write_bytes(ca.pem)
    verified = f"{url}?sslmode=verify-full&sslrootcert={tmp_path}"
    await migrate.upgrade(f"{verified}/ours.pem")
    assert tls.encrypted == 1
    database = Database(f"{verified}/ours.pem", SystemClock())
    assert await schema_problem(database) is None
    await database.close()
    assert tls.encrypted == 2

    by_address = verified.replace("localhost", "127.0.0.1")
    for wrong in (f"{verified}/theirs.pem", f"{by_address}/ours.pem"):
        with pytest.raises(Unavailable, match=r"cannot be used: .*certificate verify failed"):
            await migrate.state(wrong)
    assert tls.encrypted == 2


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"database": "nowhere"}, 'database "nowhere" does not exist'),
        ({"username": "nobody"}, 'role "nobody" does not exist'),
    ],
)
async def test_a_database_that_lets_us_not_in_is_named(
    postgres_database: str, change: dict[str, str], said: str
) -> None:
    url = make_url(postgres_database).set(**change)
    with pytest.raises(Unavailable, match=f"cannot be used: {said}"):
        await migrate.state(url.render_as_string(hide_password=False))
    database = Database(url.render_as_string(hide_password=False), SystemClock())
    with pytest.raises(Unavailable):
        await schema_problem(database)
    await database.close()


async def test_a_role_that_may_not_change_the_schema_is_told(postgres_database: str) -> None:
    url = make_url(postgres_database)
    engine = postgres_engine(url, isolation_level="AUTOCOMMIT")
    async with engine.connect() as connection:
        await connection.execute(text("CREATE ROLE reader LOGIN"))
        try:
            with pytest.raises(Unavailable, match="permission denied for schema public"):
                await migrate.upgrade(url.set(username="reader").render_as_string())
        finally:
            await connection.execute(text("DROP ROLE reader"))
    await engine.dispose()
