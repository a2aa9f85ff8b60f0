"""One read under a lease, from the question to the release: values and transitions.

    PENDING -> PERMITTED -> READING -> DONE
       |           |            '----> LOST      the lease ended first: drop the result
       '-----------'-> REFUSED                   recompute; nothing was sent

All times are of the reader's monotonic clock. A lease counts from when its request was
SENT, so the reader always stops before the server does.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any


@dataclass(frozen=True, slots=True)
class Question:
    """What an engine wants to read."""

    local_id: str
    tokens: Sequence[int]
    count: int
    lease: tuple[str, int] | None
    handle: tuple[str, str] | None
    # Host and port where the request says that the owner is; None for what it does not say.
    address: tuple[Any, Any]
    min_tokens: int
    tenant_id: str
    space: bytes
    wait: float


@dataclass(frozen=True, slots=True)
class Pending:
    """Not known yet: ask again."""


@dataclass(frozen=True, slots=True)
class Permit:
    """The first `num_tokens` tokens may be read with `params`, already cut to them."""

    num_tokens: int
    params: dict[str, Any]
    lease_id: str = ""


@dataclass(frozen=True, slots=True)
class Refused:
    """Compute instead, and send the owner nothing."""

    reason: str


Answer = Pending | Permit | Refused


class Phase(Enum):
    """Where a read is."""

    PENDING = "pending"
    PERMITTED = "permitted"
    READING = "reading"
    REFUSED = "refused"
    LOST = "lost"
    DONE = "done"


class Outcome(Enum):
    """What a lease is given back with."""

    CONSUMED = "consumed"
    UNUSED = "unused"
    # Something may have been sent and may not have arrived: let the lease run out, then
    # the owner is told to free.
    LAPSE = "lapse"


@dataclass(frozen=True, slots=True)
class Read:
    """A read that an engine wants to do."""

    phase: Phase
    # PENDING: when waiting ends. READING: when the engine gives up. Else unused.
    limit: float
    permit: Permit | None = None
    reason: str = ""
    lease_id: str = ""
    fencing_token: int = 0
    valid_until: float = 0.0


def begin(now: float, wait: float) -> Read:
    """Ask; wait at most `wait` seconds."""
    return Read(Phase.PENDING, limit=now + wait)


def refused_at_once(reason: str) -> Read:
    """Return a read that was never asked for."""
    return Read(Phase.REFUSED, limit=0.0, reason=reason)


def granted(read: Read, permit: Permit, fencing_token: int, valid_until: float, now: float) -> Read:
    """The server said yes. Too late, or no longer wanted: the read stays as it is.

    `valid_until` counts from when the request was sent.
    """
    read = at(read, now)
    if read.phase is not Phase.PENDING:
        return read
    return at(
        replace(
            read,
            phase=Phase.PERMITTED,
            permit=permit,
            lease_id=permit.lease_id,
            fencing_token=fencing_token,
            valid_until=valid_until,
        ),
        now,
    )


def refused(read: Read, reason: str) -> Read:
    """The server, or the tokens, said no; or the engine wants it no more."""
    if read.phase in (Phase.PENDING, Phase.PERMITTED):
        return replace(read, phase=Phase.REFUSED, reason=reason, permit=None)
    return read


def at(read: Read, now: float) -> Read:
    """Let time pass."""
    if read.phase is Phase.PENDING and now >= read.limit:
        return replace(read, phase=Phase.REFUSED, reason="no answer in time")
    if read.phase is Phase.PERMITTED and now >= read.valid_until:
        return replace(read, phase=Phase.REFUSED, reason="the lease ran out", permit=None)
    if read.phase is Phase.READING and (now >= read.valid_until or now >= read.limit):
        reason = "the lease ran out" if now >= read.valid_until else "the read took too long"
        return replace(read, phase=Phase.LOST, reason=reason)
    return read


def started(read: Read, now: float, limit: float) -> Read:
    """The engine is about to send the read, or its notification."""
    read = at(read, now)
    if read.phase is not Phase.PERMITTED:
        return read
    return replace(read, phase=Phase.READING, limit=now + limit)


def renewed(read: Read, valid_until: float) -> Read:
    """The server extended it. Never shortens."""
    if read.phase in (Phase.PERMITTED, Phase.READING):
        return replace(read, valid_until=max(read.valid_until, valid_until))
    return read


def lost(read: Read, reason: str) -> Read:
    """The server said that the lease has ended."""
    if read.phase is Phase.READING:
        return replace(read, phase=Phase.LOST, reason=reason)
    return refused(read, reason)


def finished(read: Read, *, sent: bool, failed: bool = False) -> tuple[Read, Outcome | None]:
    """The engine is done with it. Returns what to give the lease back with, if it is held.

    `sent`: a read or its notification may have been sent. `failed`: it was, and may not
    have arrived.
    """
    if not read.lease_id or read.phase is Phase.DONE:
        return replace(read, phase=Phase.DONE), None
    outcome = Outcome.UNUSED
    if sent or read.phase in (Phase.READING, Phase.LOST):
        outcome = Outcome.LAPSE if failed else Outcome.CONSUMED
    return replace(read, phase=Phase.DONE), outcome


def answer(read: Read) -> Answer:
    """Return what the engine's scheduler is told."""
    if read.phase is Phase.PENDING:
        return Pending()
    if read.phase in (Phase.PERMITTED, Phase.READING) and read.permit is not None:
        return read.permit
    return Refused(read.reason or read.phase.value)
