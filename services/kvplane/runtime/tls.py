"""Mutual TLS on the side of the server: our certificate, and who the other side is."""

from collections.abc import Callable
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
    certificate has ended since the connection began, cannot be read, or has not exactly
    one URI ``kvplane:<kind>/<name>`` among its alternative names.
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
    """Return when the certificate ends, in seconds since 1970."""
    # Loads for 50 ms, and only who speaks TLS needs it.
    from cryptography import x509  # noqa: PLC0415

    try:
        return x509.load_pem_x509_certificate(pem).not_valid_after_utc.timestamp()
    except ValueError:  # it has passed the handshake, but this reader is stricter
        raise _refused("cannot be read") from None
