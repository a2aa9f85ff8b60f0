"""Every call of the client library has a deadline, and holds it."""

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from kvplane import client
from kvplane.client.connect import DEFAULT_TIMEOUT
from kvplane.kernel.errors import Unavailable
from wire.methods import METHODS

UNARY = [method for method in METHODS.values() if not method.streams]
MAKE = {
    "LeaseService": client.lease_api,
    "RoutingService": client.routing_api,
    "WorkerService": client.worker_api,
    "SessionService": client.session_api,
    "TenantService": client.tenant_api,
    "AuditService": client.audit_api,
}


class Anything(grpc.GenericRpcHandler):
    """Takes every call, notes its deadline, and answers only if it is told to."""

    def __init__(self) -> None:
        self.deadlines: dict[str, float | None] = {}
        self.silent = False

    def service(self, details: Any) -> Any:
        async def answer(request: bytes, context: Any) -> bytes:
            self.deadlines[details.method] = context.time_remaining()
            if self.silent:
                await asyncio.Event().wait()
            return b""

        return grpc.unary_unary_rpc_method_handler(answer)


@pytest.fixture
async def anything() -> AsyncIterator[tuple[Anything, str, client.Channels]]:
    handler = Anything()
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((handler,))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    channels = client.Channels()
    yield handler, f"127.0.0.1:{port}", channels
    await channels.close()
    await server.stop(0)


async def test_every_call_has_one(anything: tuple[Anything, str, client.Channels]) -> None:
    handler, address, channels = anything
    for method in UNARY:
        api = MAKE[method.service](address, channels=channels)
        assert await getattr(api, method.name)(method.request()) == method.response()
    assert handler.deadlines.keys() == {method.path for method in UNARY}
    for path, remaining in handler.deadlines.items():
        assert remaining is not None, path
        # gRPC rounds it up on its way.
        assert DEFAULT_TIMEOUT - 3 < remaining < DEFAULT_TIMEOUT + 0.5, path


async def test_a_silent_service_is_given_up(
    anything: tuple[Anything, str, client.Channels],
) -> None:
    handler, address, channels = anything
    handler.silent = True
    begun = time.monotonic()
    outcomes = await asyncio.gather(
        *(
            getattr(MAKE[m.service](address, channels=channels, timeout=0.3), m.name)(m.request())
            for m in UNARY
        ),
        return_exceptions=True,
    )
    assert all(isinstance(outcome, Unavailable) for outcome in outcomes), outcomes
    assert len(outcomes) == len(UNARY)
    assert time.monotonic() - begun < 5


async def test_a_service_that_is_not_there_is_given_up() -> None:
    channels = client.Channels()
    begun = time.monotonic()
    for method in UNARY[::6]:
        api = MAKE[method.service]("127.0.0.1:1", channels=channels, timeout=0.2)
        with pytest.raises(Unavailable):
            await getattr(api, method.name)(method.request())
    assert time.monotonic() - begun < 10
    await channels.close()
