"""X-01, llm-d-kv-cache#359 and sglang PR#19986: pings of clients that are too frequent for the
server end the connection (ENHANCE_YOUR_CALM, too_many_pings), and with it all calls on it.

Over real servers and clients, with the product's own settings; times are a twentieth on both
sides, so ten minutes are 30 s. (No less: gRPC's client never pings more than once a second.)
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import grpc
import pytest
from kvplane.client.channels import CHANNEL_OPTIONS
from kvplane.runtime.server import OPTIONS
from runtime.test_keepalive import ping

FACTOR = 20
MINUTES_10, SECONDS_90 = 600 / FACTOR, 90 / FACTOR

Options = Sequence[tuple[str, int | str]]


def scaled(options: Options, factor: int = FACTOR) -> Options:
    """Return options with all that is about pings in less time."""
    return [
        (name, int(value) // factor if is_ping_time(name) else value) for name, value in options
    ]


def is_ping_time(name: str) -> bool:
    return name.endswith("_ms") and ("keepalive" in name or "ping" in name)


class Silent(grpc.GenericRpcHandler):
    """Answers /kvplane.Test/Wait after as many seconds as asked for."""

    def service(self, details):
        async def wait(request: bytes, _context) -> bytes:
            await asyncio.sleep(float(request))
            return b"done"

        return grpc.unary_unary_rpc_method_handler(wait)


@asynccontextmanager
async def server(options: Options) -> AsyncIterator[str]:
    made = grpc.aio.server(options=options)
    made.add_generic_rpc_handlers([Silent()])
    port = made.add_insecure_port("127.0.0.1:0")
    await made.start()
    yield f"127.0.0.1:{port}"
    await made.stop(0)


@asynccontextmanager
async def connection(address: str, options: Options) -> AsyncIterator[grpc.aio.Channel]:
    # Each on a connection of its own.
    alone = [*options, ("grpc.use_local_subchannel_pool", 1)]
    async with grpc.aio.insecure_channel(address, options=alone) as channel:
        await channel.channel_ready()
        yield channel


async def states(channel: grpc.aio.Channel, seconds: float) -> list[str]:
    """Return the states that a connection goes through; a GOAWAY makes it IDLE."""
    state = channel.get_state()
    seen = [state.name]
    try:
        async with asyncio.timeout(seconds):
            while True:
                await channel.wait_for_state_change(state)
                state = channel.get_state()
                seen.append(state.name)
    except TimeoutError:
        return seen


def port_of(address: str) -> int:
    return int(address.rpartition(":")[2])


def wait(channel: grpc.aio.Channel, seconds: float) -> grpc.aio.UnaryUnaryCall:
    return channel.unary_unary("/kvplane.Test/Wait")(str(seconds).encode())


async def test_ten_minutes_of_silence_end_no_connection() -> None:
    ours = scaled(CHANNEL_OPTIONS)
    async with (
        server(scaled(OPTIONS)) as address,
        connection(address, ours) as idle,
        connection(address, ours) as calling,
        connection(address, ours) as longer,
    ):
        calls = [wait(calling, SECONDS_90), wait(longer, MINUTES_10)]
        # A client that is not ours pings each 10 s, with calls and without: that is allowed.
        stranger = asyncio.create_task(ping(port_of(address), 60, MINUTES_10 / 60))
        connections = (idle, calling, longer)
        seen = await asyncio.gather(*(states(one, MINUTES_10) for one in connections))
        assert seen == [["READY"]] * 3
        assert [await call for call in calls] == [b"done"] * 2
        assert await stranger == (60, b"")
        # And they are still good for something.
        assert [await wait(one, 0) for one in connections] == [b"done"] * 3


async def test_a_stranger_that_pings_each_second_is_sent_away() -> None:
    """Above one ping in 5 s. It also shows that the test above would notice."""
    async with server(scaled(OPTIONS)) as address:
        _, reason = await ping(port_of(address), 20, 1 / FACTOR)
    assert reason == b"too_many_pings"


async def test_a_server_with_grpcs_own_settings_would_send_our_client_away() -> None:
    """What the product's server settings are for: by default a ping in 300 s is allowed."""
    default = [("grpc.http2.min_ping_interval_without_data_ms", 300_000)]
    async with (
        server(scaled(default)) as address,
        connection(address, scaled(CHANNEL_OPTIONS)) as channel,
    ):
        with pytest.raises(grpc.aio.AioRpcError, match=r"(?i)too.many.pings"):
            await wait(channel, 20)


def test_the_real_settings_are_what_was_scaled() -> None:
    client, ours = dict(CHANNEL_OPTIONS), dict(OPTIONS)
    assert client["grpc.keepalive_time_ms"] == 20_000
    assert client["grpc.keepalive_permit_without_calls"] == 0
    assert ours["grpc.http2.min_ping_interval_without_data_ms"] == 5_000
    assert ours["grpc.keepalive_permit_without_calls"] == 1
    # A dead peer is noticed after at most so long; tests/runtime/test_keepalive.py shows it.
    for options, longest in ((client, 25_000), (ours, 30_000)):
        noticed = options["grpc.keepalive_time_ms"] + options["grpc.http2.ping_timeout_ms"]
        assert noticed == longest
