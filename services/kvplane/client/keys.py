"""Whose API key it is: asked of the tenant service and remembered for a few seconds."""

import asyncio
import hashlib
import secrets
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Final

from kvplane.api.tenant.v1 import tenant_pb2 as pb
from kvplane.client.api import TenantApi
from kvplane.kernel.clock import Clock
from kvplane.kernel.context import Role
from kvplane.kernel.errors import (
    InvalidField,
    KvplaneError,
    NotFound,
    Unauthenticated,
    Unavailable,
)

PREFIX: Final = "kvp_"
# In the metadata of an Unauthenticated: it is not about the key that was asked for, but
# about the credential of who asked.
OF_THE_ASKER: Final = {"credential": "caller"}

_MAX_BYTES: Final = 512
_MAX_KNOWN: Final = 10_000
_MAX_NOBODYS: Final = 10_000
# Nobody's keys are asked for again after this, in seconds, or after `ttl`.
_NOBODYS_TTL_S: Final = 1.0
# Waits, in seconds: for a key that was good a moment ago, and for one never seen.
_WAIT_KNOWN_S: Final = 0.3
_WAIT_NEW_S: Final = 2.0
# After a failure, a good key is believed for so long without another try.
_PAUSE_S: Final = 1.0
# Wrong guesses that a process passes on to the tenant service: so many at once, then so
# many in a second. Good keys give their place back.
_GUESSES: Final = 200.0
_GUESSES_PER_S: Final = 20.0

_ROLES: Final = {
    pb.ROLE_UNSPECIFIED: Role.TENANT,
    pb.ROLE_TENANT: Role.TENANT,
    pb.ROLE_WORKER: Role.WORKER,
    pb.ROLE_OPERATOR: Role.OPERATOR,
}


@dataclass(frozen=True, slots=True)
class Key:
    """What a key is good for."""

    key_id: str
    role: Role
    # Role TENANT only.
    tenant_id: str = ""
    # Role WORKER only.
    worker_id: str = ""
    # The tenant's secret space in the engines' prefix caches.
    cache_salt: str = field(default="", repr=False)


@dataclass(slots=True)
class _Known:
    key: Key
    # On the monotonic clock, in seconds: as of when, asked again when, and its last moment.
    at: float
    ask_at: float
    end: float


class Keys:
    """Resolves keys. A key itself is never kept, only its hash under a secret of the process.

    A revoked key works for `ttl` at most, an expired one not at all. While the tenant
    service does not answer, keys that were good go on for `stale`. Guesses push out no
    good key, and only a bounded number of them reaches the tenant service.
    """

    def __init__(
        self, tenants: TenantApi, clock: Clock, *, ttl: float = 5.0, stale: float = 300.0
    ) -> None:
        """`ttl` and `stale` are in seconds."""
        self._tenants, self._clock, self._ttl, self._stale = tenants, clock, ttl, stale
        self._secret = secrets.token_bytes(32)
        self._known: OrderedDict[bytes, _Known] = OrderedDict()
        # Hash -> until when it is nobody's.
        self._nobodys: OrderedDict[bytes, float] = OrderedDict()
        self._asking: dict[bytes, asyncio.Task[_Known | KvplaneError]] = {}
        self._guesses = _GUESSES
        self._guesses_at = clock.monotonic()

    async def find(self, secret: str) -> Key:
        """Return whose key it is.

        Raises Unauthenticated for nobody's, and with retry_after when too many of those
        are tried; Unavailable when nobody can tell.
        """
        if not secret.startswith(PREFIX) or not secret.isascii() or len(secret) > _MAX_BYTES:
            raise _nobodys()
        name = hashlib.blake2b(secret.encode(), key=self._secret, digest_size=32).digest()
        now = self._clock.monotonic()
        known = self._known.get(name)
        if known is not None and now >= known.end:
            del self._known[name]
            known = None
        if known is not None and now < known.ask_at:
            self._known.move_to_end(name)
            return known.key
        if known is None and now < self._nobodys.get(name, now):
            raise _nobodys()
        task = self._asking.get(name)
        if task is None:
            if known is None:
                self._take_a_guess(now)
            task = asyncio.ensure_future(self._ask(name, secret, now, new=known is None))
            self._asking[name] = task
        return await self._answer(task, known, now)

    async def _answer(
        self, task: "asyncio.Task[_Known | KvplaneError]", known: _Known | None, now: float
    ) -> Key:
        failure: Exception
        try:
            async with asyncio.timeout(_WAIT_NEW_S if known is None else _WAIT_KNOWN_S):
                answer = await asyncio.shield(task)
            if isinstance(answer, _Known):
                return answer.key
            if isinstance(answer, Unauthenticated):
                raise _nobodys()
            failure = answer
        except TimeoutError as late:
            failure = late
        # An outage must not shut out who was known a moment ago.
        if known is not None and now - known.at < self._stale:
            known.ask_at = self._clock.monotonic() + min(_PAUSE_S, self._ttl)
            return known.key
        raise Unavailable("API keys cannot be checked now", retry_after=1.0) from failure

    async def _ask(
        self, name: bytes, secret: str, now: float, *, new: bool
    ) -> "_Known | KvplaneError":
        """Return the answer, stored; Unauthenticated for nobody's key. Never raises."""
        try:
            answer = await self._tenants.ResolveApiKey(pb.ResolveApiKeyRequest(secret=secret))
            known = self._read(answer, now)
        except (KvplaneError, TimeoutError, OSError) as error:
            known = None
            failure = _judged(error)
            if not isinstance(failure, Unauthenticated):
                self._give_back(new)
                return failure
        finally:
            del self._asking[name]
        if known is None:
            self._known.pop(name, None)
            self._nobodys[name] = self._clock.monotonic() + min(self._ttl, _NOBODYS_TTL_S)
            self._nobodys.move_to_end(name)
            if len(self._nobodys) > _MAX_NOBODYS:
                self._nobodys.popitem(last=False)
            return _nobodys()
        self._give_back(new)
        self._nobodys.pop(name, None)
        self._known[name] = known
        self._known.move_to_end(name)
        if len(self._known) > _MAX_KNOWN:
            self._known.popitem(last=False)
        return known

    def _read(self, answer: pb.ResolveApiKeyResponse, now: float) -> _Known | None:
        """Return None for a key that is good for nothing. `now` is before it was asked for."""
        role = _ROLES.get(answer.role)
        whose = {Role.TENANT: answer.tenant_id, Role.WORKER: answer.worker_id}
        if role is None or not whose.get(role, "anybody"):
            return None
        key = Key(answer.key_id, role, answer.tenant_id, answer.worker_id, answer.cache_salt)
        end = float("inf")
        if answer.HasField("valid_for"):
            end = now + answer.valid_for.seconds + answer.valid_for.nanos / 1e9
        return _Known(key, now, now + self._ttl, end)

    def _take_a_guess(self, now: float) -> None:
        gained = (now - self._guesses_at) * _GUESSES_PER_S
        self._guesses = min(_GUESSES, self._guesses + gained)
        self._guesses_at = now
        if self._guesses < 1:
            raise Unauthenticated(
                "too many unknown API keys are being tried; try again", retry_after=1.0
            )
        self._guesses -= 1

    def _give_back(self, new: bool) -> None:
        if new:
            self._guesses = min(_GUESSES, self._guesses + 1)


def _judged(error: Exception) -> KvplaneError:
    """Return Unauthenticated for nobody's key, Unavailable for what says nothing of the key."""
    if isinstance(error, Unauthenticated) and error.metadata != OF_THE_ASKER:
        return error
    if isinstance(error, InvalidField | NotFound):
        return _nobodys()
    return Unavailable(str(error))


def _nobodys() -> Unauthenticated:
    return Unauthenticated("the API key is not valid")
