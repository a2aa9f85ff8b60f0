"""Identifiers: random ones for things that are made, derived ones for things that are reported."""

import hashlib
import secrets
from typing import Protocol


class Ids(Protocol):
    """Where new ids come from; a test or a simulation brings its own."""

    def new(self, prefix: str) -> str:
        """Return a new id such as ``lease-3f0c...``."""
        ...


class RandomIds:
    """Ids of 128 random bits."""

    def new(self, prefix: str) -> str:
        """Return ``prefix-`` and 32 hex digits."""
        return f"{prefix}-{secrets.token_hex(16)}"


def derived(prefix: str, *parts: str) -> str:
    """Return the same id for the same parts, and another one for any others."""
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        raw = part.encode("utf-8", "surrogatepass")
        digest.update(len(raw).to_bytes(8, "little"))
        digest.update(raw)
    return f"{prefix}-{digest.hexdigest()}"
