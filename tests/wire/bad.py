"""How bad inputs are written down: a field, and values that it must not have."""

from dataclasses import dataclass
from typing import Any, Final

from google.protobuf.duration_pb2 import Duration

MOST: Final = 2**63 - 1
LEAST: Final = -(2**63)


@dataclass(frozen=True)
class Bad:
    """One wrong request: the right one, but for `put`."""

    # What the answer must name, as the proto spells it.
    field: str
    # Paths to values; None clears a field.
    put: dict[str, Any]
    # Words of the fix.
    says: str = ""
    # For Connect: sent after a right Hello.
    later: bool = False

    def __str__(self) -> str:
        return f"{self.field}={_short(self.put)}"


def _short(put: dict[str, Any]) -> str:
    values = ",".join(repr(value) for value in put.values())
    text = "".join(c for c in values if c.isascii() and c.isprintable()).replace(" ", "")
    return text if len(text) <= 40 else f"{text[:36]}...{len(text)}"


def bad(field: str, *values: Any, at: str = "", says: str = "", **more: Any) -> list[Bad]:
    """The field, or the one at `at`, with each of the values."""
    return [Bad(field, {at or field: value}, says, **more) for value in values]


def unset(field: str, at: str, **more: Any) -> list[Bad]:
    """A message that is not there; the answer names what is missed in it."""
    return [Bad(field, {at: None}, **more)]


def duration(seconds: int = 0, nanos: int = 0) -> Duration:
    return Duration(seconds=seconds, nanos=nanos)


# What `validate.identifier` refuses, for the default length.
IDENTIFIERS: Final = ["", " ", "a b", "a\0b", "-a", "é", "a\n", "x" * 129, "\U0001f600"]
# What `validate.plain` refuses, for a length of 128 bytes.
TEXTS: Final = ["", "\0", "a\0b", "x" * 129, "é" * 65]
EPOCHS: Final = [0, -1, LEAST]
COUNTS: Final = [-1, LEAST]
SIZES: Final = [-1, 1001, 2**31 - 1, -(2**31)]
TOKENS: Final = [
    "!", "garbage", "YWJj", "YWJjOg==", "bm90IGEgbnVtYmVyOmE=", "x" * 100_000, "é", "\0",
    "LTE6YQ==", "OTk5OTk5OTk5OTk5OTk5OTk5OTk5OTk6YQ==",
]  # fmt: skip
DURATIONS: Final = [
    duration(-1), duration(0, -1), duration(10**12), duration(MOST), duration(LEAST),
    duration(1, 10**9), duration(1, -1), duration(-1, 1),
]  # fmt: skip
DIGESTS: Final = [b"x", b"x" * 15, b"x" * 17, b"x" * 1000]
