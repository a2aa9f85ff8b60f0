"""Tenants and API keys: frozen values, and what a key looks like."""

import hashlib
import secrets
from dataclasses import dataclass, replace

KEY_MARK = "kvp_"
# The mark and 48 bits: enough to recognise a key, nothing to guess it by.
_PREFIX_LENGTH = len(KEY_MARK) + 8
_SECRET_BYTES = 32


@dataclass(frozen=True, slots=True)
class Tenant:
    """The unit of isolation. Times are microseconds since 1970."""

    tenant_id: str
    display_name: str
    create_us: int


@dataclass(frozen=True, slots=True)
class ApiKey:
    """A credential of a tenant; the secret itself is known to its user only."""

    tenant_id: str
    key_id: str
    # How the secret begins.
    prefix: str
    secret_hash: bytes
    create_us: int
    revoke_us: int | None = None


def new_secret() -> str:
    """Return a secret of 256 random bits."""
    return KEY_MARK + secrets.token_urlsafe(_SECRET_BYTES)


def secret_hash(secret: str) -> bytes:
    """Return what is stored and searched for.

    A secret is random and long, so it needs neither salt nor a slow hash; and who can
    time the search learns about hashes only.
    """
    return hashlib.sha256(secret.encode("utf-8", "surrogatepass")).digest()


def new_key(tenant_id: str, key_id: str, secret: str, now_us: int) -> ApiKey:
    """Return the record of a new secret."""
    return ApiKey(tenant_id, key_id, secret[:_PREFIX_LENGTH], secret_hash(secret), now_us)


def revoke(key: ApiKey, now_us: int) -> ApiKey:
    """Revoke a key; the first time stays."""
    return key if key.revoke_us is not None else replace(key, revoke_us=now_us)
