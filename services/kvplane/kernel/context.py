"""Who is calling, and on whose behalf: set once at the edge, read anywhere below it."""

from contextvars import ContextVar
from dataclasses import dataclass

DEFAULT_TENANT = "default"


@dataclass(frozen=True, slots=True)
class Caller:
    """The caller of the running request."""

    tenant_id: str = DEFAULT_TENANT
    # For the logs; the same through every hop.
    request_id: str = ""


_caller: ContextVar[Caller] = ContextVar("kvplane_caller")
_anonymous = Caller()


def caller() -> Caller:
    """Return who is calling; the default tenant where nobody said."""
    return _caller.get(_anonymous)


def set_caller(value: Caller) -> None:
    """Say who is calling, for this task and those that it starts."""
    _caller.set(value)
