"""API keys at the gateway: whatever the header holds, it is 401 and nobody's business."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from kvplane.api.tenant.v1 import tenant_pb2 as tenant
from wire.plane import Plane, running
from wire.seed import sow

pytestmark = pytest.mark.asyncio(loop_scope="module")

KEYS = [
    b"", b"Bearer", b"Bearer ", b"Basic dXNlcjpwYXNz", b"Bearer kvp_", b"Bearer kvp_wrong",
    b"Bearer \xff\xfe", b"Bearer \xed\xa0\x80", b"bearer  kvp_\xc3\xa9", b"Bearer " + b"x" * 5000,
    b"\xff", b"Bearer kvp_a kvp_b", b"kvp_wrong",
]  # fmt: skip
CALLS = [
    b"POST /v1/chat/completions", b"POST /v1/completions", b"GET /v1/models",
    b"GET /v1/models/tiny", b"DELETE /v1/sessions/held-one",
]  # fmt: skip


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def guarded(migrated: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Plane]:
    """A plane whose gateway asks for keys."""
    folder = tmp_path_factory.mktemp("guarded")
    async with running(migrated, folder, gateway_auth="api_key") as plane:
        await sow(plane, "one")
        yield plane


async def ask(plane: Plane, call: bytes, authorization: bytes | None) -> tuple[int, bytes]:
    body = b'{"model":"unknown","messages":[{"role":"user","content":"x"}],"prompt":"x"}'
    line = b"" if authorization is None else b"Authorization: " + authorization + b"\r\n"
    port = int(plane.gateway_url.rpartition(":")[2])
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(
        b"%s HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: %d\r\n%s\r\n%s"
        % (call, len(body), line, body)
    )
    async with asyncio.timeout(10):
        head, _, said = (await reader.read()).partition(b"\r\n\r\n")
    writer.close()
    if head.startswith(b"HTTP/1.1 401"):
        assert b"WWW-Authenticate: Bearer" in head
    return int(head.split(b" ")[1]), said


@pytest.mark.parametrize("key", [None, *KEYS], ids=lambda key: ascii(key)[:24])
async def test_a_key_that_is_nobodys(guarded: Plane, key: bytes | None) -> None:
    before = guarded.dump()
    for call in CALLS:
        status, said = await ask(guarded, call, key)
        assert status == 401, (call, said)
        error = json.loads(said)["error"]
        assert (error["type"], error["code"]) == ("invalid_request_error", "invalid_api_key")
        assert "Traceback" not in error["message"]
    assert guarded.dump() == before


async def test_a_key_opens_its_own_tenant_only(guarded: Plane) -> None:
    theirs = await sow(guarded, "two", "other")
    status, _ = await ask(guarded, b"DELETE /v1/sessions/held-one", _bearer(theirs.secret))
    assert status == 404
    status, _ = await ask(guarded, b"DELETE /v1/sessions/held-two", _bearer(theirs.secret))
    assert status == 200


async def test_a_revoked_key_is_nobodys(guarded: Plane) -> None:
    seed = await sow(guarded, "three")
    await guarded.call("TenantService/RevokeApiKey", tenant.RevokeApiKeyRequest(key_id=seed.key_id))
    status, said = await ask(guarded, b"GET /v1/models", _bearer(seed.secret))
    assert status == 401, said


def _bearer(secret: str) -> bytes:
    return b"Bearer " + secret.encode()
