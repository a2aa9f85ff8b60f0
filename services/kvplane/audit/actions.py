"""Which calls are written down, and what is written about each."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from kvplane.audit.domain import details
from kvplane.kernel.context import GATEWAY, Caller, Role

# A request or an answer of the call; what it is depends on the call.
Message = Any


def _nothing(_message: Message) -> str:
    return ""


def _never(_message: Message) -> bool:
    return False


def _always(_caller: Caller) -> bool:
    return True


def _operators(caller: Caller) -> bool:
    """People; our own services and workers do it all the time by themselves."""
    return Role.OPERATOR in caller.roles and Role.SERVICE not in caller.roles


def _asked_for(caller: Caller) -> bool:
    """What somebody asked for; a gateway gives back by itself what a request leaves."""
    return not (Role.SERVICE in caller.roles and caller.actor == GATEWAY)


def _the(field: str) -> Callable[[Message], str]:
    return lambda message: str(getattr(message, field))


@dataclass(frozen=True, slots=True)
class Action:
    """How one call is written down."""

    # From the request: what it is to be done to.
    target: Callable[[Message], str]
    # From the request; None: the caller's own.
    tenant: Callable[[Message], str] | None = None
    detail: Callable[[Message], str] = _nothing
    # From the answer, where that knows better.
    done_to: Callable[[Message], str] = _nothing
    done_for: Callable[[Message], str] = _nothing
    # From the answer: nothing was changed, so nothing is to be kept of it.
    in_vain: Callable[[Message], bool] = _never
    # Whose calls.
    whose: Callable[[Caller], bool] = _always


def _key_detail(request: Message) -> str:
    role = request.DESCRIPTOR.fields_by_name["role"].enum_type.values_by_number.get(request.role)
    return details(
        {
            "role": role.name.removeprefix("ROLE_").lower() if role and role.number else "",
            "worker_id": request.worker_id,
            "ttl": f"{request.ttl.seconds}s" if request.HasField("ttl") else "",
        }
    )


def _quota_detail(request: Message) -> str:
    return details(
        {
            f"{level}.{field.name}": f"{value:g}" if isinstance(value, float) else value
            for level in ("soft", "hard")
            for field, value in getattr(request.quotas, level).ListFields()
        }
    )


_tenant_id = _the("tenant_id")
_session_id = _the("session_id")
_worker_id = _the("worker_id")

ACTIONS: Final[Mapping[str, Mapping[str, Action]]] = {
    "TenantService": {
        "CreateTenant": Action(target=_tenant_id, tenant=_tenant_id),
        "CreateApiKey": Action(
            target=_nothing,
            tenant=_tenant_id,
            detail=_key_detail,
            done_to=lambda answer: str(answer.api_key.key_id),
        ),
        "RevokeApiKey": Action(
            target=_the("key_id"),
            tenant=_nothing,
            done_for=lambda answer: str(answer.api_key.tenant_id),
        ),
        "SetQuotas": Action(target=_tenant_id, tenant=_tenant_id, detail=_quota_detail),
        "RotateCacheSalt": Action(target=_tenant_id, tenant=_tenant_id),
    },
    "SessionService": {
        "EndSession": Action(
            target=lambda request: str(request.session_id or request.name),
            done_to=lambda answer: str(answer.session.session_id),
            in_vain=lambda answer: bool(answer.already_ended),
        ),
    },
    "LeaseService": {
        "RevokeLease": Action(target=_the("lease_id"), whose=_asked_for),
        "ExtendHold": Action(
            target=_session_id,
            detail=lambda request: f"hold={request.hold.seconds}s",
            in_vain=lambda answer: not answer.asked,
        ),
        "FreeSession": Action(target=_session_id, whose=_operators),
    },
    "WorkerService": {
        "DrainWorker": Action(
            target=_worker_id,
            tenant=_nothing,
            detail=lambda request: "undo" if request.undo else "",
        ),
        "DeregisterWorker": Action(target=_worker_id, tenant=_nothing, whose=_operators),
    },
}
