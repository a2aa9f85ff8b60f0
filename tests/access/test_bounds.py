"""What one caller can take of a server: streams, and memory before anybody knows who it is."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import grpc
import pytest
from access.plane import TOKEN, Credentials, Guarded
from grpc_health.v1 import health_pb2, health_pb2_grpc
from kvplane.api.session.v1 import session_pb2 as session
from kvplane.api.session.v1.session_pb2_grpc import SessionServiceStub
from kvplane.api.tenant.v1 import tenant_pb2 as tenant
from kvplane.runtime import interceptors, places
from wire.plane import refusal_of

pytestmark = pytest.mark.asyncio(loop_scope="module")


@asynccontextmanager
async def opened(answers: Any) -> AsyncIterator[None]:
    """A stream that has begun to answer."""
    try:
        assert await answers.read() is not grpc.aio.EOF
        yield
    finally:
        answers.cancel()


def watch(plane: Guarded, credential: str, tenant_id: str) -> Any:
    metadata = (("authorization", f"Bearer {credential}"), ("x-kvplane-tenant", tenant_id))
    stub = SessionServiceStub(plane.channel)
    return stub.WatchSessions(session.WatchSessionsRequest(), metadata=metadata)


async def a_tenant_with_a_session(plane: Guarded, name: str) -> str:
    await plane.call("TenantService/CreateTenant", tenant.CreateTenantRequest(tenant_id=name))
    request = session.CreateSessionRequest(name="s", model="m")
    await plane.call("SessionService/CreateSession", request, tenant=name)
    return (await plane.key(tenant.ROLE_TENANT, tenant_id=name)).secret


async def refused(answers: Any) -> Any:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await answers.read()
    return refusal_of(caught.value)


async def test_a_tenant_opens_so_many_streams_with_all_its_keys(
    plane: Guarded, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(places, "MAX_OF_TENANT", 3)
    keys = [await a_tenant_with_a_session(plane, "many")]
    keys.append((await plane.key(tenant.ROLE_TENANT, tenant_id="many")).secret)
    other = await a_tenant_with_a_session(plane, "other")
    async with AsyncExitStack() as streams:
        for n in range(3):
            last = watch(plane, keys[n % 2], "many")
            await streams.enter_async_context(opened(last))
        said = await refused(watch(plane, keys[0], "many"))
        assert (said.code, said.metadata["quota"]) == ("RESOURCE_EXHAUSTED", "streams")
        # Neither others nor our own services are kept out.
        for credential, whose in ((other, "other"), (TOKEN, "many")):
            await streams.enter_async_context(opened(watch(plane, credential, whose)))
    async with opened(watch(plane, keys[0], "many")):
        pass


async def test_streams_without_a_credential_are_bounded(
    plane: Guarded, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(places, "MAX_OF_OTHERS", 2)
    health = health_pb2_grpc.HealthStub(plane.channel)
    async with AsyncExitStack() as streams:
        for _ in range(2):
            answers = health.Watch(health_pb2.HealthCheckRequest())
            await streams.enter_async_context(opened(answers))
        said = await refused(health.Watch(health_pb2.HealthCheckRequest()))
        assert said.code == "RESOURCE_EXHAUSTED"


async def test_what_strangers_send_is_not_even_read(
    plane: Guarded, credentials: Credentials, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Millions of empty messages fit into a few bytes."""
    read: list[str] = []

    def noted(parse: Any, raw: bytes, method: str) -> Any:
        read.append(method)
        return parse(raw)

    monkeypatch.setattr(interceptors, "read", noted)
    for credential in ("", "kvp_guessed", credentials.revoked, credentials.stranger):
        with pytest.raises(grpc.aio.AioRpcError):
            await plane.call("WorkerService/Heartbeat", b"\x0a\x00" * 10, credential=credential)
    assert read == []
    await plane.call("WorkerService/Heartbeat", b"", credential=credentials.another_worker)
    assert len(read) == 1
