"""What a tenant may still begin: arithmetic over its limits and what it has used.

A rate is a bucket that use fills and that drains by itself, `BURST_S` of the rate large.
What does not fit is refused (hard) or served without a session (soft). Real token counts
are known only when a turn is over, so a bucket may be beyond full: a debt.
"""

from dataclasses import dataclass, replace
from typing import Final

from kvplane.kernel.errors import QuotaExceeded
from kvplane.kernel.limits import Limits, Quotas

BURST_S: Final = 10.0
# A session may end at any time; nobody can say when.
_SESSION_RETRY_S: Final = 5.0
# A year. A rate near 0 would have one wait for longer than a message can say.
_LONGEST_WAIT_S: Final = 366 * 86_400.0


@dataclass(frozen=True, slots=True)
class Used:
    """What each bucket holds. Requests and tokens; `at_us` is when that was so."""

    at_us: int
    soft_requests: float = 0.0
    soft_tokens: float = 0.0
    hard_requests: float = 0.0
    hard_tokens: float = 0.0


@dataclass(frozen=True, slots=True)
class Ask:
    """What a turn costs when it begins; 0 for what is not known."""

    tokens: int = 0
    size_bytes: int = 0


NOTHING: Final = Ask()


@dataclass(frozen=True, slots=True)
class OverQuota:
    """Served without a session: the tenant is beyond this soft limit."""

    quota: str


def concerns_turns(quotas: Quotas) -> bool:
    """Tell whether there is a limit on beginning turns."""
    return any(
        limits.sessions
        or limits.requests_per_second
        or limits.tokens_per_second
        or limits.request_bytes
        for limits in (quotas.hard, quotas.soft)
    )


def drained(used: Used, quotas: Quotas, now_us: int) -> Used:
    """Let time pass. A clock that was set back drains nothing."""
    passed_s = max(0, now_us - used.at_us) / 1e6
    soft, hard = quotas.soft, quotas.hard
    return Used(
        at_us=max(now_us, used.at_us),
        soft_requests=_left(used.soft_requests, soft.requests_per_second, passed_s),
        soft_tokens=_left(used.soft_tokens, soft.tokens_per_second, passed_s),
        hard_requests=_left(used.hard_requests, hard.requests_per_second, passed_s),
        hard_tokens=_left(used.hard_tokens, hard.tokens_per_second, passed_s),
    )


def settled(used: Used, *, held: int, unheld: int) -> Used:
    """Take in what turns with and without a session used beyond their estimates, or below."""
    return replace(
        used,
        soft_tokens=max(0.0, used.soft_tokens + held),
        hard_tokens=max(0.0, used.hard_tokens + held + unheld),
    )


def charged(used: Used, ask: Ask, *, held: bool) -> Used:
    """Count a turn that begins. One without a session is none for the soft limits."""
    after = replace(
        used,
        hard_requests=used.hard_requests + 1,
        hard_tokens=used.hard_tokens + ask.tokens,
    )
    if not held:
        return after
    return replace(
        after,
        soft_requests=used.soft_requests + 1,
        soft_tokens=used.soft_tokens + ask.tokens,
    )


def judge(used: Used, quotas: Quotas, ask: Ask) -> OverQuota | QuotaExceeded | None:
    """Decide about a turn by its size and the rates; None: it may have a session."""
    hard, soft = quotas.hard, quotas.soft
    if _too_large(ask, hard):
        return QuotaExceeded(
            f"the request has {ask.size_bytes} bytes and may have {hard.request_bytes}",
            metadata={"quota": "request_bytes"},
        )
    waits = _waits(used.hard_requests, used.hard_tokens, hard, ask)
    quota = max(waits, key=waits.__getitem__)
    if waits[quota] > 0:
        return _reached(quota, getattr(hard, quota), waits[quota])
    if _too_large(ask, soft):
        return OverQuota("request_bytes")
    for quota, wait_s in _waits(used.soft_requests, used.soft_tokens, soft, ask).items():
        if wait_s > 0:
            return OverQuota(quota)
    return None


def judge_sessions(active: int, quotas: Quotas) -> OverQuota | QuotaExceeded | None:
    """Decide about one session more, beside those that are active."""
    if 0 < quotas.hard.sessions <= active:
        return _reached("sessions", quotas.hard.sessions, _SESSION_RETRY_S)
    if 0 < quotas.soft.sessions <= active:
        return OverQuota("sessions")
    return None


def _left(amount: float, rate: float, passed_s: float) -> float:
    return max(0.0, amount - rate * passed_s) if rate > 0 else 0.0


def _too_large(ask: Ask, limits: Limits) -> bool:
    return 0 < limits.request_bytes < ask.size_bytes


def _waits(requests: float, tokens: float, limits: Limits, ask: Ask) -> dict[str, float]:
    """Return by the quota's name how many seconds until the turn fits; 0: now."""
    # Never less than one request, and what is larger than the bucket waits until it is empty.
    room = max(1.0, limits.requests_per_second * BURST_S)
    most = limits.tokens_per_second * BURST_S
    return {
        "requests_per_second": _wait(requests + 1 - room, limits.requests_per_second),
        "tokens_per_second": _wait(tokens + min(ask.tokens, most) - most, limits.tokens_per_second),
    }


def _wait(excess: float, rate: float) -> float:
    # What a float's rounding leaves is no excess.
    return min(excess / rate, _LONGEST_WAIT_S) if rate > 0 and excess > 1e-6 else 0.0


def _reached(quota: str, limit: float, retry_after: float) -> QuotaExceeded:
    return QuotaExceeded(
        f"the limit of {limit:g} {quota} is reached",
        metadata={"quota": quota},
        retry_after=retry_after,
    )
