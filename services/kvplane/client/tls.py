"""The files of mutual TLS, how they are renewed, and what a failed connection means.

A process shows a certificate and believes those of a CA. Files that are replaced hold
for new connections, without a restart.
"""

import logging
import os
import re
import ssl
import threading
from dataclasses import dataclass, field
from typing import Final

from kvplane.kernel.clock import Clock, SystemClock
from kvplane.kernel.errors import InvalidField

log = logging.getLogger(__name__)

VARIABLE: Final = "KVPLANE_TLS_"
_LOOK_EVERY_S: Final = 1.0
_FILES: Final = ("ca_file", "cert_file", "key_file")


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """Where the PEM files are."""

    ca_file: str  # the certificates of those that are believed
    cert_file: str  # our own, with what lies between it and the CA
    key_file: str  # its private key, without a password
    # The name in the servers' certificates, where it is not in the address.
    server_name: str = ""

    @classmethod
    def of(
        cls, ca_file: str, cert_file: str, key_file: str, server_name: str = ""
    ) -> "TlsFiles | None":
        """Return all of them, or None for none.

        Raises InvalidField with the name of what is missing.
        """
        files = dict(zip(_FILES, (ca_file, cert_file, key_file), strict=True))
        if not any(files.values()):
            if server_name:
                raise InvalidField("server_name", f"needs {', '.join(_FILES)}")
            return None
        for name, value in files.items():
            if not value:
                raise InvalidField(name, f"must be set: {', '.join(_FILES)} belong together")
        return cls(ca_file, cert_file, key_file, server_name)

    @classmethod
    def from_environment(cls) -> "TlsFiles | None":
        """Return those of the variables ``KVPLANE_TLS_CA_FILE`` and so on; see `of`."""
        names = (*_FILES, "server_name")
        return cls.of(*(os.environ.get(VARIABLE + name.upper(), "") for name in names))


@dataclass(frozen=True, slots=True)
class Pem:
    """What is in the files."""

    ca: bytes
    cert: bytes
    key: bytes = field(repr=False)


def load(files: TlsFiles) -> Pem:
    """Read the files. They are whole, and key and certificate fit together.

    Raises InvalidField with the name of the wrong one.
    """
    pem = _read(files)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    for name, content in (("ca_file", pem.ca), ("cert_file", pem.cert)):
        try:
            context.load_verify_locations(cadata=content.decode("ascii", "ignore"))
        except (ssl.SSLError, ValueError):
            raise InvalidField(name, f"{getattr(files, name)} has no certificate in PEM") from None
    try:
        context.load_cert_chain(files.cert_file, files.key_file, password="")
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            problem = f"{files.key_file} is not the key of {files.cert_file}"
        else:
            problem = f"{files.key_file} has no private key in PEM, or one with a password"
        raise InvalidField("key_file", problem) from None
    except (OSError, ValueError) as error:
        raise InvalidField("key_file", f"{files.key_file}: {error}") from None
    if _read(files) != pem:
        raise InvalidField("cert_file", f"{files.cert_file} is being written")
    return pem


def _read(files: TlsFiles) -> Pem:
    found = []
    for name in _FILES:
        path = getattr(files, name)
        try:
            with open(path, "rb") as file:
                found.append(file.read())
        except OSError as error:
            raise InvalidField(name, f"{path}: {error.strerror or error}") from None
    return Pem(*found)


class Renewed:
    """The newest usable content of the files. Thread-safe.

    Files that do not fit together, such as one of a pair that is just being replaced,
    leave what was there before in use.
    """

    def __init__(self, files: TlsFiles, clock: Clock | None = None) -> None:
        """Read them. Raises InvalidField."""
        self._files = files
        self._clock = clock or SystemClock()
        self._pem = load(files)
        self._looked = self._clock.monotonic()
        self._looking = threading.Lock()
        self._complained = False

    def current(self) -> Pem:
        """Return it; looks at the files at most once a second."""
        due = self._clock.monotonic() - self._looked >= _LOOK_EVERY_S
        if due and self._looking.acquire(blocking=False):
            try:
                self._look()
                self._looked = self._clock.monotonic()
            finally:
                self._looking.release()
        return self._pem

    def _look(self) -> None:
        # By content: times and inodes do not tell a file that was read half-written.
        try:
            if _read(self._files) == self._pem:
                self._complained = False
                return
            self._pem = load(self._files)
        except InvalidField as error:
            if not self._complained:
                log.warning("tls: %s; the files of before stay in use", error)
            self._complained = True
        else:
            self._complained = False
            log.info("tls: %s is renewed", self._files.cert_file)


_CLOSED: Final = re.compile(
    r"(failed to connect to all|connections to all).*"
    r"(Socket closed|Connection reset|Broken pipe|End of TCP stream)"
)
_NOT_BELIEVED: Final = re.compile(r"CERTIFICATE_VERIFY_FAILED: ([^:]+)")


def explain(details: str, *, encrypted: bool) -> str | None:
    """Return what gRPC's `details` say of a connection's TLS; None: it is something else.

    `encrypted`: our side of the connection speaks TLS.
    """
    closed = _CLOSED.search(details)
    if not encrypted:
        if closed:
            return (
                "the server closes connections without TLS, or is just going away:"
                " if it speaks TLS, give ca_file, cert_file and key_file"
            )
        return None
    if "WRONG_VERSION_NUMBER" in details:
        return "the server does not speak TLS, and we do"
    if found := _NOT_BELIEVED.search(details):
        return f"the server's certificate is not accepted: {found[1].strip()}"
    if "Hostname Verification Check failed" in details:
        return "the server's certificate is for another name than its address: see server_name"
    if closed:
        return (
            "the server closes our connections, or is just going away:"
            " is our certificate expired, or of a CA that it does not know?"
        )
    return None
