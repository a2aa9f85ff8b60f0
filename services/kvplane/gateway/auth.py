"""Whose request it is."""

import hashlib
from collections import OrderedDict
from dataclasses import dataclass
from typing import Final

from kvplane.api.tenant.v1 import tenant_pb2
from kvplane.client.api import TenantApi
from kvplane.gateway.config import GatewayConfig
from kvplane.gateway.failures import Failure, from_kvplane, unavailable
from kvplane.kernel.clock import Clock
from kvplane.kernel.context import DEFAULT_TENANT
from kvplane.kernel.errors import KvplaneError, Unauthenticated

_KEPT: Final = 10_000
_MAX_KEY: Final = 512


@dataclass(frozen=True, slots=True)
class _Known:
    # None: nobody's.
    tenant_id: str | None
    at: float


class Tenants:
    """Resolves API keys. A key itself is never kept, only its hash."""

    def __init__(self, api: TenantApi | None, clock: Clock, config: GatewayConfig) -> None:
        if config.auth == "api_key" and api is None:
            raise ValueError("auth: api_key needs the tenant service")
        self._api, self._clock, self._config = api, clock, config
        self._known: OrderedDict[bytes, _Known] = OrderedDict()

    async def tenant(self, authorization: str | None) -> str:
        """Return the tenant of an Authorization header.

        Raises Failure: 401 for no key or a wrong one, 503 when nobody can tell.
        """
        if self._config.auth == "none" or self._api is None:
            return DEFAULT_TENANT
        scheme, _, key = (authorization or "").strip().partition(" ")
        key = key.strip()
        if scheme.lower() != "bearer" or not key or len(key) > _MAX_KEY:
            raise _wrong("Give an API key: `Authorization: Bearer <key>`.")
        if not key.isascii():  # none of ours, and not even a text
            raise _wrong("This API key is not valid.")
        name = hashlib.blake2b(key.encode(), digest_size=16).digest()
        known = self._known.get(name)
        now = self._clock.monotonic()
        if known is None or now - known.at >= self._config.auth_cache_s:
            known = await self._ask(self._api, key, known, now)
            self._known[name] = known
            self._known.move_to_end(name)
            if len(self._known) > _KEPT:
                self._known.popitem(last=False)
        if known.tenant_id is None:
            raise _wrong("This API key is not valid.")
        return known.tenant_id

    async def _ask(self, api: TenantApi, key: str, known: _Known | None, now: float) -> _Known:
        try:
            answer = await api.ResolveApiKey(tenant_pb2.ResolveApiKeyRequest(secret=key))
        except Unauthenticated:
            return _Known(None, now)
        except (KvplaneError, TimeoutError, OSError) as error:
            failure = from_kvplane(error) if isinstance(error, KvplaneError) else None
            if failure is not None:
                return _Known(None, now)
            # An outage must not shut out who was known a moment ago.
            if known is not None and now - known.at < self._config.auth_stale_s:
                return known
            raise unavailable("API keys cannot be checked now.") from error
        return _Known(answer.tenant_id, now)


def _wrong(message: str) -> Failure:
    return Failure(401, message, code="invalid_api_key")
