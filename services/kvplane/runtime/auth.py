"""Who is calling: from a call's metadata and certificate to `kvplane.kernel.context.Caller`.

Mode ``none``: the caller names its tenant and may do everything; for loopback.

Mode ``api_key``: ``authorization: Bearer kvp_...`` is a tenant's, a worker's or an
operator's key. The shared internal token in the same place is one of our own services.
A certificate of a service, a worker or an operator speaks for itself. What each may call
is said in `kvplane.runtime.permissions`.
"""

import hmac
from collections.abc import Mapping
from dataclasses import replace
from typing import Final, Protocol
from urllib.parse import unquote

from kvplane.client.keys import OF_THE_ASKER, Key, Keys
from kvplane.kernel import validate
from kvplane.kernel.context import DEFAULT_TENANT, Caller, Identity, Role
from kvplane.kernel.errors import PermissionDenied, Unauthenticated
from kvplane.kernel.ids import Ids, RandomIds
from kvplane.runtime.permissions import speaks_for

TENANT_KEY: Final = "x-kvplane-tenant"
ACTOR_KEY: Final = "x-kvplane-actor"
REQUEST_ID_KEY: Final = "x-request-id"
AUTHORIZATION_KEY: Final = "authorization"

# The internal token is our own services', and an operator's who has it.
_TOKENS: Final = frozenset({Role.SERVICE, Role.OPERATOR})
_OF_CERTIFICATES: Final = {
    "service": frozenset({Role.SERVICE}),
    "worker": frozenset({Role.WORKER}),
    "operator": frozenset({Role.OPERATOR}),
}
_MAX_ACTOR: Final = 256


class Authenticator(Protocol):
    """Tells who is calling."""

    # Streams ask again so often, in seconds; 0: never.
    again_s: float

    async def caller(
        self, metadata: Mapping[str, str], certificate: Identity | None = None
    ) -> Caller:
        """Return who calls with this metadata, over a connection with this certificate.

        Raises Unauthenticated, PermissionDenied, InvalidField, Unavailable.
        """
        ...


class TrustedNetwork:
    """Mode ``none``: believes what it is told."""

    again_s = 0.0

    def __init__(self, ids: Ids | None = None) -> None:
        self._ids = ids or RandomIds()

    async def caller(
        self, metadata: Mapping[str, str], certificate: Identity | None = None
    ) -> Caller:
        """Return the named tenant, or the default one, with every role. Raises InvalidField."""
        who = Caller(_named_tenant(metadata), _request_id(metadata, self._ids))
        return replace(who, actor=_named_actor(metadata) or who.actor)


class ApiKeys:
    """Mode ``api_key``: believes keys, the internal token and certificates."""

    def __init__(
        self, keys: Keys, internal_token: str, again_s: float = 5.0, ids: Ids | None = None
    ) -> None:
        """Without an `internal_token` services show certificates.

        `again_s` is how old a stream's check may be.
        """
        self._keys = keys
        self._token = internal_token.encode()
        self.again_s = again_s
        self._ids = ids or RandomIds()

    async def caller(
        self, metadata: Mapping[str, str], certificate: Identity | None = None
    ) -> Caller:
        """Return whose credentials these are.

        Raises Unauthenticated, PermissionDenied, InvalidField, Unavailable.
        """
        request_id = _request_id(metadata, self._ids)
        worker_id = certificate.name if certificate and certificate.kind == "worker" else ""
        given = metadata.get(AUTHORIZATION_KEY)
        if given is None:
            roles = _OF_CERTIFICATES.get(certificate.kind) if certificate else None
            if roles is None:
                raise _no_credential()
            actor = f"cert:{certificate}"
        else:
            secret = bearer(given)
            if not secret:
                raise _no_credential()
            if not hmac.compare_digest(secret.encode(), self._token):
                key = await self._key(secret)
                return _of_key(key, worker_id, metadata, request_id)
            roles, actor = _TOKENS, "token"
        if Role.SERVICE in roles:  # speaks for who called it
            actor = _named_actor(metadata) or actor
        return Caller(_named_tenant(metadata), request_id, roles, worker_id, actor)

    async def _key(self, secret: str) -> Key:
        try:
            return await self._keys.find(secret)
        except Unauthenticated as error:
            raise Unauthenticated(
                error.message, metadata=OF_THE_ASKER, retry_after=error.retry_after
            ) from None


def _of_key(key: Key, worker_id: str, metadata: Mapping[str, str], request_id: str) -> Caller:
    """Return the caller of a key, bound also to the worker of its certificate, if any."""
    if key.role is Role.WORKER:
        worker_id = _both(key.worker_id, worker_id) if worker_id else key.worker_id
    tenant_id = key.tenant_id if key.role is Role.TENANT else _named_tenant(metadata)
    return Caller(tenant_id, request_id, frozenset({key.role}), worker_id, f"key:{key.key_id}")


def _both(key: str, certificate: str) -> str:
    """Return the worker that both speak for. Raises PermissionDenied."""
    if speaks_for(key, certificate):
        return certificate
    if speaks_for(certificate, key):
        return key
    raise PermissionDenied("the API key and the certificate are of different workers")


def bearer(authorization: str) -> str:
    """Return the token of ``Bearer <token>``, empty for anything else."""
    scheme, _, token = authorization.strip().partition(" ")
    return token.strip() if scheme.lower() == "bearer" else ""


def _no_credential() -> Unauthenticated:
    return Unauthenticated("send an API key: authorization: Bearer kvp_...", metadata=OF_THE_ASKER)


def _named_tenant(metadata: Mapping[str, str]) -> str:
    named = metadata.get(TENANT_KEY)
    if not named:
        return DEFAULT_TENANT
    return validate.tenant_id(TENANT_KEY, named)


def _named_actor(metadata: Mapping[str, str]) -> str:
    # NUL fits into no database.
    return unquote(metadata.get(ACTOR_KEY, "")).replace("\0", "")[:_MAX_ACTOR]


def _request_id(metadata: Mapping[str, str], ids: Ids) -> str:
    given = metadata.get(REQUEST_ID_KEY, "")
    return given[:128] if given else ids.new("req")
