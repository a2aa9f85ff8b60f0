"""Certificates and CAs are replaced while everything runs."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
from kvplane.api.lease.v1 import lease_pb2 as lease
from kvplane.client import Channels, TlsFiles, lease_api
from kvplane.client.tls import Pem
from kvplane.kernel.errors import PermissionDenied, Unavailable
from runtime.until import until

from tls.authority import Authority, write
from tls.conftest import Server

Files = Callable[..., TlsFiles]


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files are looked at more often than once a second."""
    monkeypatch.setattr("kvplane.client.tls._LOOK_EVERY_S", 0.05)


class Talk:
    """A Connect stream of worker w1 that can be asked whether it still runs."""

    def __init__(self, api: Any) -> None:
        self._said: asyncio.Queue[lease.ConnectRequest | None] = asyncio.Queue()
        self._answers = api.Connect(self._requests())

    async def _requests(self) -> AsyncIterator[lease.ConnectRequest]:
        while (request := await self._said.get()) is not None:
            yield request

    async def runs(self) -> None:
        self._said.put_nowait(lease.ConnectRequest(hello=lease.Hello(worker_id="w1")))
        async with asyncio.timeout(5):
            assert (await anext(self._answers)).HasField("welcome")

    async def end(self) -> None:
        self._said.put_nowait(None)
        async with asyncio.timeout(5):
            assert await anext(self._answers, None) is None


def worker(authority: Authority, name: str = "w1", believes: bytes = b"") -> Pem:
    return authority.issue(f"kvplane:worker/{name}", believes=believes)


async def report(server: Server, tls: TlsFiles, name: str = "w1") -> None:
    """Call over a connection of its own."""
    channels = Channels()
    api = lease_api(server.address, channels=channels, tls=tls, timeout=0.3)
    try:
        await api.ReportOwnership(lease.ReportOwnershipRequest(worker_id=name))
    finally:
        await channels.close()


async def eventually(server: Server, tls: TlsFiles) -> None:
    """Try until a new connection works."""
    async with asyncio.timeout(10):
        while True:
            try:
                return await report(server, tls)
            except Unavailable:
                continue


async def test_a_server_gets_another_certificate_of_another_ca(
    serve: Callable[..., Any],
    channels: Channels,
    authority: Authority,
    stranger: Authority,
    files: Files,
) -> None:
    server = await serve()
    old = files(worker(authority))
    new = files(worker(stranger))
    talk = Talk(lease_api(server.address, channels=channels, tls=old))
    await talk.runs()
    with pytest.raises(Unavailable, match="certificate is not accepted"):
        await report(server, new)

    write(server.folder, stranger.issue("kvplane:service/lease"))
    await eventually(server, new)
    with pytest.raises(Unavailable, match="certificate is not accepted"):
        await report(server, old)
    await talk.runs()
    await talk.end()


async def test_two_cas_while_one_takes_the_others_place(
    serve: Callable[..., Any], authority: Authority, stranger: Authority, files: Files
) -> None:
    """The way without a gap: first everybody believes both."""
    both = authority.pem + stranger.pem
    server = await serve(authority.issue("kvplane:service/lease", believes=both))
    clients = [files(worker(each, believes=both)) for each in (authority, stranger)]
    for tls in clients:
        await report(server, tls)
    write(server.folder, stranger.issue("kvplane:service/lease", believes=both))
    await eventually(server, files(worker(authority, believes=stranger.pem)))
    for tls in clients:
        await report(server, tls)


async def test_a_half_written_pair_of_a_server_is_not_used(
    serve: Callable[..., Any], authority: Authority, stranger: Authority, files: Files
) -> None:
    server = await serve()
    old, new = files(worker(authority)), files(worker(stranger))
    fresh = stranger.issue("kvplane:service/lease")
    (server.folder / "ca.pem").write_bytes(fresh.ca)
    (server.folder / "cert.pem").write_bytes(fresh.cert)
    end = asyncio.get_running_loop().time() + 0.3
    while asyncio.get_running_loop().time() < end:  # the server looks several times
        await report(server, old)
    write(server.folder, fresh)
    await eventually(server, new)


async def test_a_client_gets_another_certificate(
    serve: Callable[..., Any],
    channels: Channels,
    authority: Authority,
    files: Files,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[grpc.aio.Channel] = []
    secure_channel = grpc.aio.secure_channel

    def recorded(*args: Any, **more: Any) -> grpc.aio.Channel:
        made.append(secure_channel(*args, **more))
        return made[-1]

    monkeypatch.setattr(grpc.aio, "secure_channel", recorded)
    server = await serve()
    tls = files(worker(authority))
    api = lease_api(server.address, channels=channels, tls=tls)
    talk = Talk(api)
    await talk.runs()

    async def seen_as() -> str:
        await api.GetLease(lease.GetLeaseRequest(lease_id="l1"))
        return server.leases.callers[-1].actor

    write(Path(tls.cert_file).parent, authority.issue("kvplane:service/second"))
    async with asyncio.timeout(10):
        while len(made) < 2:
            with contextlib.suppress(PermissionDenied):  # as w1 it may not ask
                await seen_as()
    assert await seen_as() == "cert:service/second"
    assert len(made) == 2
    await talk.runs()
    assert made[0].get_state() is grpc.ChannelConnectivity.READY

    write(Path(tls.cert_file).parent, authority.issue("kvplane:service/third"))
    async with asyncio.timeout(10):
        while await seen_as() != "cert:service/third":
            pass
    # The second had no call under way, the first still has one.
    await until(lambda: closed(made[1]))
    await talk.runs()
    await talk.end()
    await until(lambda: closed(made[0]))
    assert await seen_as() == "cert:service/third"
    await channels.close()
    assert closed(made[2])


def closed(channel: grpc.aio.Channel) -> bool:
    return channel.get_state() is grpc.ChannelConnectivity.SHUTDOWN
