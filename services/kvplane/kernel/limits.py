"""What a tenant may use. Frozen values; 0 is no limit."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Limits:
    """See kvplane.api.tenant.v1.Limits."""

    sessions: int = 0
    held_tokens: int = 0
    held_blocks: int = 0
    live_leases: int = 0
    requests_per_second: float = 0.0
    tokens_per_second: float = 0.0
    request_bytes: int = 0


NO_LIMITS = Limits()


@dataclass(frozen=True, slots=True)
class Quotas:
    """Beyond `soft` nothing new is held for a tenant, beyond `hard` it is refused."""

    soft: Limits = NO_LIMITS
    hard: Limits = NO_LIMITS


NO_QUOTAS = Quotas()
