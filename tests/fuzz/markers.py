"""What only one tenant knows, and where it shows."""

import base64
import re
from collections.abc import Iterator
from typing import Final

from google.protobuf.message import Message

from fuzz.methods import leaves

_MIN_TEXT: Final = 10
_MIN_NUMBER: Final = 1 << 33
# Instants in microseconds, which two tenants may share.
_INSTANTS: Final = range(1_600_000_000_000_000, 2_000_000_000_000_000)
_ID: Final = re.compile(r"[a-z]+-[0-9a-f]{32}\Z")
_DIGEST: Final = 16


def values_of(message: Message) -> Iterator[bytes | int]:
    """Yield what may tell a tenant apart: long texts, digests, large numbers."""
    for _, value in leaves(message):
        if isinstance(value, str):
            if len(value) >= _MIN_TEXT:
                yield value.encode()
        elif isinstance(value, bytes):
            for start in range(0, len(value) - _DIGEST + 1, _DIGEST):
                yield value[start : start + _DIGEST]
        elif type(value) is int and value >= _MIN_NUMBER and value not in _INSTANTS:
            yield value


def new_ids(message: Message) -> Iterator[bytes]:
    """Yield the ids in a message that a server has made."""
    for _, value in leaves(message):
        if isinstance(value, str) and _ID.match(value):
            yield value.encode()


def forms(marker: bytes) -> tuple[bytes, ...]:
    """Return the marker as it may be in an answer: as it is, and within base64."""
    found = [marker]
    for ahead in range(3):
        whole = base64.urlsafe_b64encode(b"\0" * ahead + marker)
        # Without what the neighbours change.
        inner = whole[(ahead * 8 + 5) // 6 :].rstrip(b"=")[:-1]
        found += [inner, inner.replace(b"-", b"+").replace(b"_", b"/")]
    return tuple(dict.fromkeys(found))


class Markers:
    """One tenant's secrets, searched for in what another one gets."""

    def __init__(self, values: set[bytes | int]) -> None:
        self.numbers = {value for value in values if isinstance(value, int)}
        self._forms = {value: forms(value) for value in values if isinstance(value, bytes)}

    @property
    def texts(self) -> list[bytes]:
        """Return those that are bytes on the wire."""
        return list(self._forms)

    def copy(self) -> "Markers":
        """Return one that can grow by itself."""
        made = Markers(set())
        made.numbers, made._forms = set(self.numbers), dict(self._forms)
        return made

    def add(self, marker: bytes) -> None:
        """Take one more."""
        self._forms.setdefault(marker, forms(marker))

    def shown(self, raw: bytes, said: bytes) -> list[bytes]:
        """Return those in `raw` that are not in `said`, which its reader has said itself."""
        return [
            marker
            for marker, looks in self._forms.items()
            if any(look in raw for look in looks) and marker not in said
        ]

    def numbers_shown(self, message: Message, said: set[int]) -> list[int]:
        """Return the numbers in a message that are among them."""
        return [
            value
            for _, value in leaves(message)
            if type(value) is int and value in self.numbers and value not in said
        ]
