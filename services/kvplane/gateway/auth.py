"""Whose request it is."""

import hashlib
import hmac
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from kvplane.client.api import TenantApi
from kvplane.client.keys import Key, Keys
from kvplane.gateway.config import GatewayConfig
from kvplane.gateway.failures import Failure
from kvplane.kernel import validate
from kvplane.kernel.clock import Clock
from kvplane.kernel.context import DEFAULT_TENANT, Caller, Role
from kvplane.kernel.errors import PermissionDenied

TENANT_HEADER: Final = "X-Kvplane-Tenant"


@dataclass(frozen=True, slots=True)
class Admitted:
    """A client that may come in."""

    caller: Caller
    # The tenant's secret space in the engines' prefix caches; "" for one that all share.
    cache_salt: str = field(default="", repr=False)


class Tenants:
    """Tells whose requests are, by tenants' API keys or our own internal token."""

    def __init__(self, api: TenantApi | None, clock: Clock, config: GatewayConfig) -> None:
        self._keys: Keys | None = None
        if config.auth == "api_key":
            if api is None:
                raise ValueError("auth: api_key needs the tenant service")
            self._keys = Keys(api, clock, ttl=config.auth_cache_s, stale=config.auth_stale_s)
        self._token = config.internal_token.encode()

    async def admit(self, headers: Mapping[str, str], request_id: str) -> Admitted:
        """Return for whom a request is. A tenant is named by its key, by others in a header.

        Raises Failure(401) for no key, and Unauthenticated, PermissionDenied (a worker's or
        an operator's key), Unavailable and InvalidField.
        """
        if self._keys is None:
            return Admitted(Caller(DEFAULT_TENANT, request_id))
        key = await self._credential(headers, self._keys)
        if key is None:
            tenant_id, actor, salt = DEFAULT_TENANT, "token", ""
            if TENANT_HEADER in headers:
                tenant_id = validate.tenant_id(TENANT_HEADER, headers[TENANT_HEADER])
        elif key.role is Role.TENANT:
            tenant_id, actor, salt = key.tenant_id, f"key:{key.key_id}", key.cache_salt
        else:
            raise PermissionDenied(f"This is the API key of {_a(key.role)}; use a tenant's.")
        caller = Caller(tenant_id, request_id, frozenset({Role.TENANT}), "", actor)
        return Admitted(caller, salt or self._own_salt(tenant_id))

    async def check_operator(self, headers: Mapping[str, str]) -> None:
        """Let operators and our own services pass. Raises as `admit` does."""
        if self._keys is not None:
            key = await self._credential(headers, self._keys)
            if key is not None and key.role is not Role.OPERATOR:
                raise PermissionDenied(f"This is the API key of {_a(key.role)}; use an operator's.")

    async def _credential(self, headers: Mapping[str, str], keys: Keys) -> Key | None:
        """Return the key, None for the internal token."""
        scheme, _, secret = headers.get("Authorization", "").strip().partition(" ")
        secret = secret.strip()
        if scheme.lower() != "bearer" or not secret:
            raise Failure(
                401, "Give an API key: `Authorization: Bearer <key>`.", code="invalid_api_key"
            )
        # What is no text at all is nobody's, and must not stop us here.
        given = secret.encode(errors="surrogateescape")
        if self._token and hmac.compare_digest(given, self._token):
            return None
        return await keys.find(secret)

    def _own_salt(self, tenant_id: str) -> str:
        """Return a space for who comes without a key, which no key's tenant can name."""
        key = hashlib.blake2b(self._token).digest()
        return hashlib.blake2b(tenant_id.encode(), key=key, digest_size=16).hexdigest()


def _a(role: Role) -> str:
    return {Role.TENANT: "a tenant", Role.WORKER: "a worker"}.get(role, "an operator")
