"""Who gets through with which certificate, and what the others are told."""

import asyncio
import datetime
import socket
import ssl
from collections.abc import Callable
from typing import Any

import pytest
from kvplane.api.lease.v1 import lease_pb2 as lease
from kvplane.client import Channels, KvplaneClient, TlsFiles, lease_api
from kvplane.client.keys import OF_THE_ASKER
from kvplane.client.tls import Pem
from kvplane.kernel.clock import FakeClock, SystemClock
from kvplane.kernel.context import Caller, Identity, Role
from kvplane.kernel.errors import InvalidField, PermissionDenied, Unauthenticated, Unavailable
from kvplane.runtime.tls import peer_identity

from tls.authority import HOUR, Authority
from tls.conftest import Server

Files = Callable[..., TlsFiles]
Serve = Callable[..., Any]
GET = lease.GetLeaseRequest(lease_id="l1")
WORKER = "kvplane:worker/10.0.0.7:8100"


def report(worker_id: str) -> lease.ReportOwnershipRequest:
    return lease.ReportOwnershipRequest(worker_id=worker_id)


def api(server: Server, channels: Channels, tls: TlsFiles | None, **more: Any) -> Any:
    return lease_api(server.address, channels=channels, tls=tls, **{"timeout": 0.4, **more})


@pytest.fixture
async def server(serve: Serve) -> Server:
    return await serve()


@pytest.fixture
def ask(
    server: Server, channels: Channels, authority: Authority, files: Files
) -> Callable[..., Any]:
    """Calls with a certificate for `uris` and returns as whom the server saw it."""

    async def go(*uris: str, request: Any = GET, **more: Any) -> Caller:
        remote = api(server, channels, files(authority.issue(*uris)), timeout=5, **more)
        method = remote.GetLease if request is GET else remote.ReportOwnership
        await method(request)
        return server.leases.callers.pop()

    return go


@pytest.mark.parametrize(
    ("uri", "role", "worker_id", "request_"),
    [
        ("kvplane:service/routing", Role.SERVICE, "", GET),
        ("kvplane:operator/ann", Role.OPERATOR, "", GET),
        (WORKER, Role.WORKER, "10.0.0.7:8100", report("10.0.0.7:8100")),
        ("kvplane:worker/a%20b%2Fc", Role.WORKER, "a b/c", report("a b/c")),
    ],
)
async def test_a_certificate_is_enough(
    ask: Any, uri: str, role: Role, worker_id: str, request_: Any
) -> None:
    who = await ask(uri, request=request_)
    assert (who.roles, who.worker_id, who.tenant_id) == ({role}, worker_id, "default")
    assert (
        who.actor == f"cert:{uri.removeprefix('kvplane:').replace('%20', ' ').replace('%2F', '/')}"
    )


async def test_other_uris_beside_ours_do_no_harm(ask: Any) -> None:
    who = await ask("https://example.org/", "kvplane:service/routing", "spiffe://x/y")
    assert who.roles == {Role.SERVICE}


async def test_a_worker_is_not_another_and_no_service(ask: Any) -> None:
    assert (await ask("kvplane:worker/w1", request=report("w1-dp3"))).worker_id == "w1"
    for other in ("w2", "w", "w1-dpx", "W1"):
        with pytest.raises(PermissionDenied, match="speaks for worker 'w1' only"):
            await ask("kvplane:worker/w1", request=report(other))
    with pytest.raises(PermissionDenied, match="GetLease is for tenant or operator or service"):
        await ask("kvplane:worker/w1")


@pytest.mark.parametrize(
    ("uris", "told"),
    [
        ((), "needs one URI kvplane:<kind>/<name>, not 0"),
        (("https://example.org/",), "needs one URI .*, not 0"),
        (("kvplane:service/a", "kvplane:worker/b"), "needs one URI .*, not 2"),
        (("kvplane:service/a", "kvplane:service/a"), "needs one URI .*, not 2"),
        (("kvplane:root/a",), "has kvplane:root; known are service, worker, operator, client"),
        (("kvplane:worker/",), "has kvplane:worker without a name"),
        (("kvplane:worker",), "has kvplane:worker without a name"),
        (("kvplane:worker/%ff",), "has kvplane:worker without a name"),
        (("kvplane:worker/%00",), "has kvplane:worker without a name"),
        (("kvplane:worker/" + "x" * 257,), "has kvplane:worker without a name"),
    ],
)
async def test_what_names_nobody_is_refused_even_with_a_key(
    ask: Any, uris: tuple[str, ...], told: str
) -> None:
    for key in (None, "kvp_a"):
        with pytest.raises(Unauthenticated, match=f"the client's certificate {told}") as caught:
            await ask(*uris, token=key)
        assert caught.value.metadata == OF_THE_ASKER


async def test_a_client_needs_a_key_and_has_its_role(ask: Any) -> None:
    with pytest.raises(Unauthenticated, match="send an API key"):
        await ask("kvplane:client/app")
    who = await ask("kvplane:client/app", token="kvp_a")
    assert (who.tenant_id, who.roles, who.worker_id) == ("acme", {Role.TENANT}, "")
    with pytest.raises(Unauthenticated, match="not valid"):
        await ask("kvplane:client/app", token="kvp_wrong")


async def test_a_key_beside_a_workers_certificate_is_bound_to_that_worker(ask: Any) -> None:
    who = await ask("kvplane:worker/w1", token="kvp_w", request=report("w1"))
    assert (who.roles, who.worker_id, who.actor) == ({Role.WORKER}, "w1", "key:id-kvp_w")
    with pytest.raises(PermissionDenied, match="different workers"):
        await ask("kvplane:worker/w2", token="kvp_w", request=report("w1"))


async def test_a_key_takes_the_place_of_a_stronger_certificate(ask: Any) -> None:
    who = await ask("kvplane:service/gateway", token="kvp_a")
    assert (who.tenant_id, who.roles) == ("acme", {Role.TENANT})


async def test_a_whole_client(server: Server, authority: Authority, files: Files) -> None:
    tls = files(authority.issue("kvplane:operator/ann"))
    async with KvplaneClient(server.address, tls=tls, tenant="acme") as kvplane:
        await kvplane.leases.GetLease(GET)
    assert server.leases.callers[0].tenant_id == "acme"


@pytest.mark.parametrize("whose", ["a stranger's", "an expired"])
async def test_a_certificate_that_is_not_believed_does_not_connect(
    server: Server,
    channels: Channels,
    authority: Authority,
    stranger: Authority,
    files: Files,
    whose: str,
) -> None:
    if whose == "an expired":
        pem = authority.issue(WORKER, lasts=-HOUR)
    else:
        pem = stranger.issue(WORKER, believes=authority.pem)
    told = "the server closes our connections.*is our certificate expired, or of a CA"
    with pytest.raises(Unavailable, match=told) as caught:
        await api(server, channels, files(pem)).GetLease(GET)
    assert caught.value.metadata == {"tls": "on"}
    assert server.leases.callers == []


@pytest.mark.parametrize(
    ("pem", "told"),
    [
        ("stranger", "the server's certificate is not accepted: unable to get local issuer"),
        ("expired", "the server's certificate is not accepted: certificate has expired"),
        ("elsewhere", "the server's certificate is for another name than its address"),
    ],
)
async def test_a_server_that_is_not_believed_is_not_asked(
    serve: Serve,
    channels: Channels,
    authority: Authority,
    stranger: Authority,
    files: Files,
    pem: str,
    told: str,
) -> None:
    mine = {
        "stranger": lambda: stranger.issue("kvplane:service/x", believes=authority.pem),
        "expired": lambda: authority.issue("kvplane:service/x", lasts=-HOUR),
        "elsewhere": lambda: authority.issue("kvplane:service/x", hosts=("kvplane.internal",)),
    }[pem]()
    server = await serve(mine)
    ours = authority.issue("kvplane:service/y")
    with pytest.raises(Unavailable, match=told):
        await api(server, channels, files(ours)).GetLease(GET)
    assert server.leases.callers == []
    if pem == "elsewhere":
        tls = files(ours, server_name="kvplane.internal")
        await api(server, channels, tls, timeout=5).GetLease(GET)
        tls = files(ours, server_name="other.internal")
        with pytest.raises(Unavailable, match=told):
            await api(server, channels, tls).GetLease(GET)


async def test_replicas_need_a_name(
    serve: Serve, channels: Channels, authority: Authority, files: Files
) -> None:
    hosts = ("kvplane.internal",)
    servers = [await serve(authority.issue("kvplane:service/x", hosts=hosts)) for _ in range(2)]
    address = ",".join(server.address for server in servers)
    pem = authority.issue("kvplane:service/y")
    with pytest.raises(InvalidField, match="server_name: must be set for several addresses"):
        channels.get(address, files(pem))
    tls = files(pem, server_name="kvplane.internal")
    remote = lease_api(address, channels=channels, tls=tls)
    async with asyncio.timeout(5):
        while not all(server.leases.callers for server in servers):
            await remote.GetLease(GET)


async def test_one_side_without_tls_is_told(
    server: Server, serve: Serve, channels: Channels, authority: Authority, files: Files
) -> None:
    with pytest.raises(Unavailable, match="if it speaks TLS, give ca_file, cert_file") as caught:
        await api(server, channels, None).GetLease(GET)
    assert caught.value.metadata == {"tls": "off"}
    plain = await serve(None)
    tls = files(authority.issue("kvplane:service/y"))
    with pytest.raises(Unavailable, match="the server does not speak TLS, and we do") as caught:
        await api(plain, channels, tls).GetLease(GET)
    assert caught.value.metadata == {"tls": "on"}


async def test_nobody_there_is_no_matter_of_tls(
    channels: Channels, authority: Authority, files: Files
) -> None:
    with socket.socket() as taken:  # bound, but nobody listens
        taken.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        for tls in (None, files(authority.issue(WORKER))):
            remote = lease_api(address, channels=channels, tls=tls, timeout=0.3)
            with pytest.raises(Unavailable, match="Connection refused") as caught:
                await remote.GetLease(GET)
            assert caught.value.metadata == {}


@pytest.mark.filterwarnings("ignore:ssl.TLSVersion.TLSv1_1")
@pytest.mark.parametrize("version", ["TLSv1_1", "TLSv1_2", "TLSv1_3"])
async def test_tls_is_1_2_at_least(
    server: Server, authority: Authority, files: Files, version: str
) -> None:
    tls = files(authority.issue(WORKER))
    context = ssl.create_default_context(cafile=tls.ca_file)
    context.load_cert_chain(tls.cert_file, tls.key_file)
    context.set_alpn_protocols(["h2"])
    # OpenSSL itself refuses what is this old unless it is told to be lax.
    context.set_ciphers("DEFAULT:@SECLEVEL=0")
    number = ssl.TLSVersion[version]
    context.minimum_version = context.maximum_version = number
    connecting = asyncio.open_connection("127.0.0.1", server.port, ssl=context)
    if version == "TLSv1_1":
        with pytest.raises((ssl.SSLError, ConnectionError)):
            await connecting
        return
    _, writer = await connecting
    assert writer.get_extra_info("ssl_object").version() == version.replace("_", ".")
    writer.close()


async def test_without_a_certificate_nothing_is_read(
    server: Server, authority: Authority, files: Files
) -> None:
    context = ssl.create_default_context(cafile=files(authority.issue(WORKER)).ca_file)
    context.set_alpn_protocols(["h2"])
    # In TLS 1.2 the client hears of it in the handshake, in 1.3 with its first read.
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    with pytest.raises((ssl.SSLError, ConnectionError)):
        await asyncio.open_connection("127.0.0.1", server.port, ssl=context)
    context.maximum_version = ssl.TLSVersion.TLSv1_3
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port, ssl=context)
    writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0]))
    with pytest.raises((ssl.SSLError, ConnectionError)):
        raise ConnectionError if await reader.read() == b"" else AssertionError
    writer.close()


async def test_a_certificate_that_ends_ends_its_calls_and_streams(
    server: Server, channels: Channels, authority: Authority, files: Files
) -> None:
    """Also on a connection that was made before."""
    ends = datetime.timedelta(seconds=2.5)
    remote = api(server, channels, files(authority.issue("kvplane:worker/w1", lasts=ends)))
    await remote.ReportOwnership(report("w1"))

    async def hello() -> Any:
        yield lease.ConnectRequest(hello=lease.Hello(worker_id="w1"))
        await asyncio.Event().wait()

    answers = remote.Connect(hello())
    assert (await anext(answers)).HasField("welcome")
    with pytest.raises(Unauthenticated, match="the client's certificate has expired"):
        async with asyncio.timeout(5):
            await anext(answers)
    with pytest.raises(Unauthenticated, match="the client's certificate has expired"):
        await remote.ReportOwnership(report("w1"))


class Shown:
    """A call over a connection with this certificate."""

    def __init__(self, pem: bytes) -> None:
        self._found = {"x509_pem_cert": [pem], "peer_uri": [b"kvplane:worker/w1"]}

    def auth_context(self) -> dict[str, list[bytes]]:
        return self._found


@pytest.mark.parametrize("years", [1, 40, 7900])  # the year of an end has two digits until 2049
def test_a_certificate_counts_until_its_end(authority: Authority, years: int) -> None:
    lasts = datetime.timedelta(days=365 * years)
    shown = Shown(authority.issue(lasts=lasts).cert)
    clock = FakeClock(SystemClock().now_us())
    clock.advance(lasts.total_seconds() - 60)
    assert peer_identity(shown, clock) == Identity("worker", "w1")
    clock.advance(61)
    with pytest.raises(Unauthenticated, match="the client's certificate has expired"):
        peer_identity(shown, clock)


def test_a_certificate_that_cannot_be_read_is_nobodys() -> None:
    for pem in (b"", b"-----BEGIN CERTIFICATE-----\nMAA=\n-----END CERTIFICATE-----\n"):
        with pytest.raises(Unauthenticated, match="the client's certificate cannot be read"):
            peer_identity(Shown(pem))


async def test_the_servers_own_files_must_be_right(serve: Serve, authority: Authority) -> None:
    one, other = authority.issue(), authority.issue()
    with pytest.raises(InvalidField, match=r"key_file: .* is not the key of"):
        await serve(Pem(one.ca, one.cert, other.key))
