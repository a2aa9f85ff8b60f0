"""Pings: clients that ping are not sent away (X-01). Spoken in plain HTTP/2 frames."""

import asyncio
import struct

import grpc
import pytest
from kvplane.client.channels import CHANNEL_OPTIONS
from kvplane.runtime.server import OPTIONS

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
SETTINGS, PING, GOAWAY, ACK = 4, 6, 7, 1


def frame(kind: int, payload: bytes = b"", flags: int = 0) -> bytes:
    return struct.pack(">I", len(payload))[1:] + bytes([kind, flags]) + b"\0\0\0\0" + payload


async def ping(port: int, times: int, every: float) -> tuple[int, bytes]:
    """Return how many pings were answered and the reason of a GOAWAY, if one came."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(PREFACE + frame(SETTINGS))
    answered, reason = 0, b""

    async def listen():
        nonlocal answered, reason
        while True:
            head = await reader.readexactly(9)
            payload = await reader.readexactly(int.from_bytes(head[:3], "big"))
            if head[3] == SETTINGS and not head[4] & ACK:
                writer.write(frame(SETTINGS, flags=ACK))
            elif head[3] == PING and head[4] & ACK:
                answered += 1
            elif head[3] == GOAWAY:
                reason = payload[8:]

    listening = asyncio.create_task(listen())
    for n in range(times):
        await asyncio.sleep(every)
        writer.write(frame(PING, n.to_bytes(8, "big")))
    await asyncio.sleep(0.3)
    listening.cancel()
    await asyncio.gather(listening, return_exceptions=True)
    writer.close()
    return answered, reason


async def test_an_idle_client_that_pings_every_five_seconds_stays(start):
    running = await start()
    gentle, hasty = await asyncio.gather(
        ping(running.port, times=4, every=5.1), ping(running.port, times=8, every=0.1)
    )
    assert gentle == (4, b"")
    # The limit is real, so the first half of this test means something.
    assert hasty[1] == b"too_many_pings"


def test_our_own_client_pings_less_often_than_the_server_allows():
    client, server = dict(CHANNEL_OPTIONS), dict(OPTIONS)
    allowed = server["grpc.http2.min_ping_interval_without_data_ms"]
    assert client["grpc.keepalive_time_ms"] >= 2 * allowed


@pytest.mark.parametrize(
    "options", [dict(OPTIONS), dict(CHANNEL_OPTIONS)], ids=["server", "client"]
)
def test_a_dead_peer_is_noticed_within_half_a_minute(options):
    assert options["grpc.keepalive_time_ms"] + options["grpc.http2.ping_timeout_ms"] <= 30_000


def scaled(options):
    """The same options with shorter times: which ones are there is what counts."""
    times = {"grpc.keepalive_time_ms": 500, "grpc.keepalive_timeout_ms": 300}
    times["grpc.http2.ping_timeout_ms"] = 300
    return [(name, times.get(name, value)) for name, value in options]


async def test_the_server_hangs_up_on_a_client_that_does_not_answer_pings():
    server = grpc.aio.server(options=scaled(OPTIONS))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(PREFACE + frame(SETTINGS) + frame(SETTINGS, flags=ACK))
    try:
        async with asyncio.timeout(10):
            while await reader.read(1 << 16):
                pass
    finally:
        writer.close()
        await server.stop(0)


async def test_the_client_gives_up_on_a_server_that_does_not_answer_pings():
    async def mute(reader, writer):
        writer.write(frame(SETTINGS) + frame(SETTINGS, flags=ACK))
        while await reader.read(1 << 16):
            pass
        writer.close()

    server = await asyncio.start_server(mute, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    channel = grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=scaled(CHANNEL_OPTIONS))
    stream = channel.stream_stream("/a.B/C")(iter([b""]))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async with asyncio.timeout(10):
            await anext(aiter(stream))
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    await channel.close()
    server.close()
