"""Who may call what, and for which worker: decided here for all RPCs, at the edge."""

import re
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any, Final

from google.protobuf import descriptor_pool
from google.protobuf.descriptor import Descriptor

from kvplane.kernel.context import Caller, Role
from kvplane.kernel.errors import PermissionDenied

# One spelling of each, and not any number of them: each is a row, for ever.
_RANK: Final = re.compile(r"(0|[1-9][0-9]{0,3})\Z")

_T, _W, _O, _S = Role.TENANT, Role.WORKER, Role.OPERATOR, Role.SERVICE

_LEASE: Final[dict[str, tuple[Role, ...]]] = {
    "ReportOwnership": (_W, _S),
    "WithdrawOwnership": (_W, _S),
    "GetOwnership": (_T, _O, _S),
    "ListOwnerships": (_T, _O, _S),
    "GrantLease": (_W, _S),
    "BeginRead": (_W, _S),
    "RenewLeases": (_W, _S),
    "ReleaseLeases": (_W, _S),
    "RevokeLease": (_T, _O, _S),
    "GetLease": (_T, _O, _S),
    "ListLeases": (_T, _O, _S),
    "ExtendHold": (_T, _O, _S),
    "FreeSession": (_T, _O, _S),
    "EndWorkerEpoch": (_S,),
    "GetUsage": (_T, _O, _S),
    "Connect": (_W, _S),
}
_SESSION: Final[dict[str, tuple[Role, ...]]] = {
    "CreateSession": (_T, _O, _S),
    "GetSession": (_T, _O, _S),
    "ListSessions": (_T, _O, _S),
    "EndSession": (_T, _O, _S),
    "WatchSessions": (_T, _O, _S),
    # Turns are told by gateways: limits are counted by what is said in them, and a route
    # names addresses of the inside.
    "BeginTurn": (_S,),
    "CompleteTurn": (_S,),
    "GetUsage": (_T, _O, _S),
}
_ROUTING: Final[dict[str, tuple[Role, ...]]] = {"Route": (_S,), "Complete": (_S,)}
_WORKER: Final[dict[str, tuple[Role, ...]]] = {
    "RegisterWorker": (_W, _S),
    "Heartbeat": (_W, _S),
    "DrainWorker": (_O,),
    "DeregisterWorker": (_W, _O, _S),
    "GetWorker": (_O, _S),
    "ListWorkers": (_O, _S),
}
_TENANT: Final[dict[str, tuple[Role, ...]]] = {
    "CreateTenant": (_O,),
    "GetTenant": (_O,),
    "ListTenants": (_O,),
    "CreateApiKey": (_O,),
    "ListApiKeys": (_O,),
    "RevokeApiKey": (_O,),
    "ResolveApiKey": (_S,),
    "GetQuotas": (_O, _S),
    "SetQuotas": (_O,),
    "RotateCacheSalt": (_O,),
}
_AUDIT: Final[dict[str, tuple[Role, ...]]] = {"ListAuditEvents": (_O,)}

# ``/package.Service/Method`` -> the roles that may call it; one of them is enough.
ROLES: Final[Mapping[str, frozenset[Role]]] = {
    f"/kvplane.api.{service}/{method}": frozenset(roles)
    for service, table in (
        ("lease.v1.LeaseService", _LEASE),
        ("session.v1.SessionService", _SESSION),
        ("routing.v1.RoutingService", _ROUTING),
        ("routing.v1.WorkerService", _WORKER),
        ("tenant.v1.TenantService", _TENANT),
        ("audit.v1.AuditService", _AUDIT),
    )
    for method, roles in table.items()
}

# Messages whose worker_id says who acts.
ACTING: Final = frozenset(
    f"kvplane.api.{name}"
    for name in (
        "lease.v1.ReportOwnershipRequest",
        "lease.v1.WithdrawOwnershipRequest",
        "lease.v1.Holder",
        "lease.v1.Hello",
        "routing.v1.Worker",
        "routing.v1.WorkerBeat",
        "routing.v1.DeregisterWorkerRequest",
    )
)
# Whose worker_id the service itself holds to be the report's, or empty.
HARMLESS: Final = frozenset({"kvplane.api.lease.v1.Ownership"})

_Step = tuple[str, bool]
# How to get to a worker_id: fields, and whether they are lists.
_Path = tuple[_Step, ...]


def check_role(caller: Caller, method: str) -> None:
    """Let a caller of `method` (``/package.Service/Method``) pass, or raise PermissionDenied."""
    allowed = ROLES.get(method, frozenset())
    if caller.roles.isdisjoint(allowed):
        wanted = " or ".join(role for role in Role if role in allowed) or "no role at all"
        given = ", ".join(role for role in Role if role in caller.roles) or "none"
        raise PermissionDenied(
            f"{method.rpartition('/')[2]} is for {wanted}; this credential's role is {given}"
        )


def check_worker(caller: Caller, method: str, request: Any) -> None:
    """Let a message of `method` pass unless it speaks for a worker that is not the caller's.

    Raises PermissionDenied, in the same words whether there is such a worker or not. An
    absent worker_id passes: it names nobody, and the service refuses it.
    """
    if not caller.worker_id:
        return
    for path in worker_paths(method):
        for worker_id in _values(request, path):
            if worker_id and not speaks_for(caller.worker_id, worker_id):
                raise PermissionDenied(
                    f"this credential speaks for worker {caller.worker_id!r} only"
                )


def speaks_for(bound: str, worker_id: str) -> bool:
    """Tell whether a credential of the worker `bound` is also `worker_id`'s.

    One engine with several data-parallel ranks is several workers, `<bound>-dp<rank>`.
    """
    if worker_id == bound:
        return True
    prefix = f"{bound}-dp"
    return worker_id.startswith(prefix) and bool(_RANK.match(worker_id[len(prefix) :]))


@cache
def worker_paths(method: str) -> tuple[_Path, ...]:
    """Return where a request of `method` says who acts."""
    name = method.lstrip("/").replace("/", ".")
    message = descriptor_pool.Default().FindMethodByName(name).input_type
    return tuple(_acting(message, (), ())) if message is not None else ()


def _acting(message: Descriptor, way: _Path, seen: tuple[str, ...]) -> Iterator[_Path]:
    if message.full_name in seen:
        return
    if message.full_name in ACTING:
        yield way
    for field in message.fields:
        if field.message_type is not None:
            step = (field.name, field.is_repeated)
            yield from _acting(field.message_type, (*way, step), (*seen, message.full_name))


def _values(message: Any, path: _Path) -> Iterator[str]:
    if not path:
        yield message.worker_id
        return
    (name, many), rest = path[0], path[1:]
    if many:
        for item in getattr(message, name):
            yield from _values(item, rest)
    elif message.HasField(name):
        yield from _values(getattr(message, name), rest)
