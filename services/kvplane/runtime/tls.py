"""Mutual TLS on the side of the server: our certificate, and who the other side is."""

import ssl
from collections.abc import Callable
from datetime import UTC, datetime
from functools import lru_cache
from typing import Any, Final, cast, get_args, get_type_hints
from urllib.parse import unquote

import grpc

from kvplane.client.keys import OF_THE_ASKER
from kvplane.client.tls import Pem, Renewed, TlsFiles
from kvplane.kernel import validate
from kvplane.kernel.clock import Clock, SystemClock
from kvplane.kernel.context import Identity
from kvplane.kernel.errors import InvalidField, Unauthenticated

SCHEME: Final = "kvplane:"
KINDS: Final[tuple[str, ...]] = get_args(get_type_hints(Identity)["kind"])

_UTC_TIME: Final = 0x17


def server_credentials(files: TlsFiles, clock: Clock | None = None) -> grpc.ServerCredentials:
    """Return what a server listens with: TLS 1.2 or newer, clients must show a certificate.

    Renewed files hold for new connections. Raises InvalidField for a wrong file.
    """
    newest = Renewed(files, clock)
    # gRPC asks at each handshake, in a thread of its own; None: as before.
    given = newest.current()

    def renewed() -> grpc.ServerCertificateConfiguration | None:
        nonlocal given
        pem = newest.current()
        if pem is given:
            return None
        given = pem
        return _configuration(pem)

    # Its stubs do not know of None.
    fetch = cast(Callable[[], grpc.ServerCertificateConfiguration], renewed)
    return grpc.dynamic_ssl_server_credentials(
        _configuration(given), fetch, require_client_authentication=True
    )


def _configuration(pem: Pem) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration([(pem.key, pem.cert)], pem.ca)


def peer_identity(context: Any, clock: Clock | None = None) -> Identity | None:
    """Return who the caller's certificate says it is, None on a connection without TLS.

    `context` is the call's grpc.aio.ServicerContext. Raises Unauthenticated when the
    certificate has ended since the connection began, or has not exactly one URI
    ``kvplane:<kind>/<name>`` among its alternative names.
    """
    found = context.auth_context()
    shown = found.get("x509_pem_cert")
    if not shown:
        return None
    if (clock or _clock).now_us() / 1e6 > _end(shown[0]):
        raise _refused("has expired")
    return _identity(tuple(found.get("peer_uri", ())))


_clock: Final = SystemClock()


@lru_cache(maxsize=4096)
def _identity(uris: tuple[bytes, ...]) -> Identity:
    ours = [uri for each in uris if (uri := each.decode(errors="replace")).startswith(SCHEME)]
    if len(ours) != 1:
        raise _refused(f"needs one URI {SCHEME}<kind>/<name>, not {len(ours)}")
    kind, _, name = ours[0].removeprefix(SCHEME).partition("/")
    if kind not in KINDS:
        raise _refused(f"has {SCHEME}{kind}; known are {', '.join(KINDS)}")
    try:
        name = validate.plain("name", unquote(name, errors="strict"), 256)
    except (InvalidField, UnicodeDecodeError):
        raise _refused(f"has {SCHEME}{kind} without a name of 1 to 256 bytes of UTF-8") from None
    return Identity(cast(Any, kind), name)


def _refused(why: str) -> Unauthenticated:
    return Unauthenticated(f"the client's certificate {why}", metadata=OF_THE_ASKER)


@lru_cache(maxsize=4096)
def _end(pem: bytes) -> float:
    """Return when the certificate ends, in seconds since 1970 (RFC 5280, 4.1)."""
    ((_, certificate),) = _inside(ssl.PEM_cert_to_DER_cert(pem.decode()))
    to_be_signed = _inside(_inside(certificate)[0][1])
    # The version is optional and has a tag of its own; then come the serial number, the
    # algorithm, the issuer and the validity.
    start = 1 if to_be_signed[0][0] == 0xA0 else 0
    tag, value = _inside(to_be_signed[start + 3][1])[1]
    text = value.decode()
    if tag == _UTC_TIME:
        text = ("20" if text < "50" else "19") + text
    return datetime.strptime(text, "%Y%m%d%H%M%SZ").replace(tzinfo=UTC).timestamp()


def _inside(der: bytes) -> list[tuple[int, bytes]]:
    """Return tag and content of each element that follows on another in `der`."""
    found = []
    at = 0
    while at < len(der):
        tag, length = der[at], der[at + 1]
        at += 2
        if length & 0x80:
            size = length & 0x7F
            length = int.from_bytes(der[at : at + size])
            at += size
        found.append((tag, der[at : at + length]))
        at += length
    return found
