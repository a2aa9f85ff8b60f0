"""Tenants, API keys and limits: frozen values, and what a key looks like."""

import hashlib
import secrets
from dataclasses import dataclass, field, fields, replace
from typing import Final

from kvplane.kernel.context import Role
from kvplane.kernel.errors import InvalidField
from kvplane.kernel.limits import Limits, Quotas

KEY_MARK: Final = "kvp_"
# Whose keys are those of workers and operators.
NO_TENANT: Final = ""
# Keys that work at once: of one tenant, and of all workers and operators.
MAX_LIVE_KEYS: Final = 1_000
MAX_LIVE_PLATFORM_KEYS: Final = 10_000
# So many of those that have ended are listed, the newest.
LISTED_ENDED_KEYS: Final = 1_000
LIMIT_NAMES: Final = tuple(field.name for field in fields(Limits))

# The mark and 48 bits: enough to recognise a key, nothing to guess it by.
_PREFIX_LENGTH = len(KEY_MARK) + 8
_SECRET_BYTES = 32
_SALT_BYTES = 16

# The limits that a request sets, by their names; the others stay.
Changes = dict[str, float]


@dataclass(frozen=True, slots=True)
class Tenant:
    """The unit of isolation. Times are microseconds since 1970."""

    tenant_id: str
    display_name: str
    create_us: int
    # Its space in the engines' prefix caches: known to gateways only.
    cache_salt: str = field(repr=False)


@dataclass(frozen=True, slots=True)
class KeyOrder:
    """What a new key is to be; the request's fields fit together."""

    tenant_id: str
    role: Role
    worker_id: str = ""
    # Microseconds; 0: until it is revoked.
    ttl_us: int = 0


@dataclass(frozen=True, slots=True)
class ApiKey:
    """A credential; the secret itself is known to its user only."""

    # NO_TENANT for workers' and operators' keys.
    tenant_id: str
    key_id: str
    # How the secret begins.
    prefix: str
    secret_hash: bytes
    create_us: int
    revoke_us: int | None = None
    role: Role = Role.TENANT
    worker_id: str = ""
    expire_us: int | None = None

    def valid_at(self, now_us: int) -> bool:
        """Neither revoked nor expired."""
        return self.revoke_us is None and (self.expire_us is None or now_us < self.expire_us)


@dataclass(frozen=True, slots=True)
class FoundKey:
    """A key as the store has it at one moment."""

    key: ApiKey
    # Its tenant's; empty where it has none.
    cache_salt: str = field(repr=False)
    now_us: int


def new_secret() -> str:
    """Return a secret of 256 random bits."""
    return KEY_MARK + secrets.token_urlsafe(_SECRET_BYTES)


def new_salt() -> str:
    """Return 128 random bits, as 32 hexadecimal digits."""
    return secrets.token_hex(_SALT_BYTES)


def secret_hash(secret: str) -> bytes:
    """Return what is stored and searched for.

    A secret is random and long, so it needs neither salt nor a slow hash; and who can
    time the search learns about hashes only.
    """
    return hashlib.sha256(secret.encode("utf-8", "surrogatepass")).digest()


def new_key(order: KeyOrder, key_id: str, secret: str, now_us: int) -> ApiKey:
    """Return the record of a new secret."""
    return ApiKey(
        tenant_id=order.tenant_id,
        key_id=key_id,
        prefix=secret[:_PREFIX_LENGTH],
        secret_hash=secret_hash(secret),
        create_us=now_us,
        role=order.role,
        worker_id=order.worker_id,
        expire_us=now_us + order.ttl_us if order.ttl_us else None,
    )


def most_live_keys(tenant_id: str) -> int:
    """Return how many keys may work at once."""
    return MAX_LIVE_PLATFORM_KEYS if tenant_id == NO_TENANT else MAX_LIVE_KEYS


def revoke(key: ApiKey, now_us: int) -> ApiKey:
    """Revoke a key; the first time stays."""
    return key if key.revoke_us is not None else replace(key, revoke_us=now_us)


def change(quotas: Quotas, soft: Changes, hard: Changes) -> Quotas:
    """Return the quotas with these limits changed.

    Raises InvalidField for a soft limit beyond the hard one: it would never be reached.
    """
    new = Quotas(soft=_changed(quotas.soft, soft), hard=_changed(quotas.hard, hard))
    for name in LIMIT_NAMES:
        low, high = getattr(new.soft, name), getattr(new.hard, name)
        if low and high and low > high:
            if name in soft:
                raise InvalidField(
                    f"quotas.soft.{name}", f"must be at most the hard limit ({high}), not {low}"
                )
            raise InvalidField(
                f"quotas.hard.{name}", f"must be at least the soft limit ({low}), not {high}"
            )
    return new


def _changed(limits: Limits, changes: Changes) -> Limits:
    return replace(limits, **changes) if changes else limits  # type: ignore[arg-type]
