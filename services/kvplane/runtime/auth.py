"""Who is calling: from a call's metadata to `kvplane.kernel.context.Caller`.

Mode ``none``: the caller names its tenant; for loopback and trusted networks.

Mode ``api_key``: ``authorization: Bearer kvp_...`` is a tenant's key and names the
tenant by itself. The shared internal token in the same place is one of our own
services or workers, which speak for the tenant they name. Keys reach only what a
tenant may do for itself; everything else is internal.
"""

import hmac
from collections.abc import Mapping
from typing import Final, Protocol

from kvplane.api.tenant.v1.tenant_pb2 import ResolveApiKeyRequest
from kvplane.client.api import TenantApi
from kvplane.kernel import validate
from kvplane.kernel.clock import Clock
from kvplane.kernel.context import DEFAULT_TENANT, Caller
from kvplane.kernel.errors import PermissionDenied, Unauthenticated
from kvplane.kernel.ids import Ids, RandomIds

TENANT_KEY: Final = "x-kvplane-tenant"
REQUEST_ID_KEY: Final = "x-request-id"
AUTHORIZATION_KEY: Final = "authorization"
KEY_PREFIX: Final = "kvp_"
_MAX_CACHED_KEYS: Final = 10_000

# What a tenant's key may call. What is not listed is for workers, services and operators.
_LEASES: Final = (
    "GetOwnership", "ListOwnerships", "GetLease", "ListLeases", "RevokeLease", "ExtendHold",
    "FreeSession",
)  # fmt: skip
_SESSIONS: Final = (
    "CreateSession", "GetSession", "ListSessions", "EndSession", "WatchSessions", "BeginTurn",
    "CompleteTurn",
)  # fmt: skip
TENANT_METHODS: Final = frozenset(
    [f"/kvplane.api.lease.v1.LeaseService/{name}" for name in _LEASES]
    + [f"/kvplane.api.session.v1.SessionService/{name}" for name in _SESSIONS]
    + [f"/kvplane.api.routing.v1.RoutingService/{name}" for name in ("Route", "Complete")]
)


class Authenticator(Protocol):
    """Tells who is calling."""

    async def caller(self, method: str, metadata: Mapping[str, str]) -> Caller:
        """Return the caller of `method` (``/package.Service/Method``).

        Raises Unauthenticated, PermissionDenied, InvalidField, Unavailable.
        """
        ...


class TrustedNetwork:
    """Mode ``none``: believes what it is told."""

    def __init__(self, ids: Ids | None = None) -> None:
        self._ids = ids or RandomIds()

    async def caller(self, method: str, metadata: Mapping[str, str]) -> Caller:
        """Return the named tenant, or the default one. Raises InvalidField."""
        return Caller(_named_tenant(metadata), _request_id(metadata, self._ids))


class ApiKeys:
    """Mode ``api_key``: believes keys and the internal token."""

    def __init__(
        self,
        keys: "KeyCache",
        internal_token: str,
        ids: Ids | None = None,
    ) -> None:
        """`internal_token` must not be empty."""
        if not internal_token:
            raise ValueError("internal_token must be set")
        self._keys = keys
        self._token = internal_token.encode()
        self._ids = ids or RandomIds()

    async def caller(self, method: str, metadata: Mapping[str, str]) -> Caller:
        """Return whose key it is. Raises Unauthenticated, PermissionDenied, Unavailable."""
        request_id = _request_id(metadata, self._ids)
        secret = bearer(metadata.get(AUTHORIZATION_KEY, ""))
        if hmac.compare_digest(secret.encode(), self._token):
            return Caller(_named_tenant(metadata), request_id)
        tenant_id = await self._keys.tenant_of(secret)
        if method not in TENANT_METHODS:
            raise PermissionDenied(
                f"{method.rpartition('/')[2]} needs the internal token; an API key is not enough"
            )
        return Caller(tenant_id, request_id)


class KeyCache:
    """Whose key it is, asked of the tenant service and remembered for a few seconds.

    A revoked key works until its entry is that old. Keys that nobody has are not
    remembered, so that a new one works at once.
    """

    def __init__(self, tenants: TenantApi, clock: Clock, ttl: float = 5.0) -> None:
        """`ttl` is in seconds."""
        self._tenants = tenants
        self._clock = clock
        self._ttl = ttl
        self._known: dict[str, tuple[float, str]] = {}

    async def tenant_of(self, secret: str) -> str:
        """Return the tenant id. Raises Unauthenticated, Unavailable."""
        now = self._clock.monotonic()
        entry = self._known.get(secret)
        if entry is not None and now < entry[0]:
            return entry[1]
        if not secret.startswith(KEY_PREFIX):
            raise Unauthenticated("send an API key: authorization: Bearer kvp_...")
        answer = await self._tenants.ResolveApiKey(ResolveApiKeyRequest(secret=secret))
        if len(self._known) >= _MAX_CACHED_KEYS:
            self._known.clear()
        self._known[secret] = (now + self._ttl, answer.tenant_id)
        return answer.tenant_id


def bearer(authorization: str) -> str:
    """Return the token of ``Bearer <token>``, empty for anything else."""
    scheme, _, token = authorization.partition(" ")
    return token.strip() if scheme.lower() == "bearer" else ""


def _named_tenant(metadata: Mapping[str, str]) -> str:
    named = metadata.get(TENANT_KEY)
    if not named:
        return DEFAULT_TENANT
    return validate.tenant_id(TENANT_KEY, named)


def _request_id(metadata: Mapping[str, str], ids: Ids) -> str:
    given = metadata.get(REQUEST_ID_KEY, "")
    return given[:128] if given else ids.new("req")
