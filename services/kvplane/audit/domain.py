"""Audit events: frozen values, and how what callers sent is written down."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Final

from kvplane.kernel.errors import InvalidField

ACTOR_LENGTH: Final = 256
ACTION_LENGTH: Final = 64
TARGET_LENGTH: Final = 256
DETAIL_LENGTH: Final = 512
TENANT_LENGTH: Final = 64
REASON_LENGTH: Final = 64
REQUEST_ID_LENGTH: Final = 128
DAY_US: Final = 86_400_000_000


class Outcome(IntEnum):
    """How it ended; numbered as in the API."""

    STARTED = 1
    DONE = 2
    REFUSED = 3


@dataclass(frozen=True, slots=True)
class Entry:
    """What is known before it is done."""

    actor: str
    # Empty for what concerns no tenant.
    tenant_id: str
    # Such as ``LeaseService/RevokeLease``.
    action: str
    target: str
    detail: str
    request_id: str


@dataclass(frozen=True, slots=True)
class Ending:
    """How it ended. Where it names a tenant or target, those are what it was done to."""

    outcome: Outcome
    reason: str = ""
    tenant_id: str = ""
    target: str = ""


@dataclass(frozen=True, slots=True)
class Event:
    """An entry as it is kept."""

    event_id: str
    # Microseconds since 1970, when it began.
    time_us: int
    entry: Entry
    outcome: Outcome
    reason: str


@dataclass(frozen=True, slots=True)
class Filter:
    """Which events; each part that is set must fit. `since_us` is in, `until_us` is out."""

    tenant_id: str = ""
    actor: str = ""
    action: str = ""
    since_us: int | None = None
    until_us: int | None = None


@dataclass(frozen=True, slots=True)
class Place:
    """Where a page ended: the time and id of its last event."""

    time_us: int
    event_id: str


@dataclass(frozen=True, slots=True)
class AuditConfig:
    """Settings."""

    # Days after which an event is deleted.
    kept_days: int = 400

    def __post_init__(self) -> None:
        """Raise InvalidField for a setting that makes no sense."""
        if self.kept_days < 1:
            raise InvalidField("kept_days", f"must be at least 1, not {self.kept_days}")


def written(value: str, length: int) -> str:
    """Return one line of at most `length` characters, whatever a caller sent.

    What cannot be printed becomes ``?``: no terminal is steered by it, every database
    holds it.
    """
    cut = value[:length] if len(value) <= length else value[: length - 1] + "…"
    return "".join(char if char.isprintable() else "?" for char in cut)


def details(values: Mapping[str, object]) -> str:
    """Return ``name=value`` for each value that is there."""
    return " ".join(f"{name}={value}" for name, value in values.items() if value not in ("", None))
