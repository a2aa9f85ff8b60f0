"""Who is calling, and on whose behalf: set once at the edge, read anywhere below it."""

from contextvars import ContextVar
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, Literal

DEFAULT_TENANT: Final = "default"
# The actor of what a gateway does by itself.
GATEWAY: Final = "gateway"


class Role(StrEnum):
    """What a caller may do; see `kvplane.runtime.permissions`."""

    # Its own sessions, turns and leases.
    TENANT = "tenant"
    # One worker: registers, reports and reads, as itself only.
    WORKER = "worker"
    # What people do who run kvplane.
    OPERATOR = "operator"
    # Our own services and gateways, which speak for the tenant they name.
    SERVICE = "service"


EVERY_ROLE: Final = frozenset(Role)


@dataclass(frozen=True, slots=True)
class Identity:
    """Who a peer's certificate says it is: the URI `kvplane:<kind>/<name>`.

    A client has no role of its own and needs a key beside its certificate.
    """

    kind: Literal["service", "worker", "operator", "client"]
    # A worker's is its worker id.
    name: str

    def __str__(self) -> str:
        return f"{self.kind}/{self.name}"


@dataclass(frozen=True, slots=True)
class Caller:
    """The caller of the running request."""

    tenant_id: str = DEFAULT_TENANT
    # For the logs; the same through every hop.
    request_id: str = ""
    roles: frozenset[Role] = EVERY_ROLE
    # The only worker it may speak for; empty: any, where its roles allow that.
    worker_id: str = ""
    # For the audit: `key:<id>`, `cert:<identity>`, `token`, `gateway`, or `local`.
    actor: str = "local"


_caller: ContextVar[Caller] = ContextVar("kvplane_caller")
_anonymous = Caller()


def caller() -> Caller:
    """Return who is calling; this process itself where nobody said."""
    return _caller.get(_anonymous)


def set_caller(value: Caller) -> None:
    """Say who is calling, for this task and those that it starts."""
    _caller.set(value)
