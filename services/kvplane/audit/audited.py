"""A servicer whose changes are written down, before they are made and after."""

from collections.abc import Awaitable, Callable
from typing import Any, Final, TypeVar, cast

from kvplane.audit import domain
from kvplane.audit.actions import ACTIONS, Action
from kvplane.audit.domain import Ending, Entry, Outcome, written
from kvplane.audit.service import AuditLog
from kvplane.kernel.context import Caller, Role, caller
from kvplane.kernel.errors import Internal, InvalidField, KvplaneError, NotFound

S = TypeVar("S")
_Call = Callable[..., Awaitable[Any]]
# Refused before anything was done.
_HARMLESS: Final = (InvalidField, NotFound)


def audited(servicer: S, log: AuditLog, service: str) -> S:
    """Return `servicer` with its calls that change something written down.

    `service` is its short name, such as ``LeaseService``. Direct calls and calls over the
    wire are the same; calls that are not in `actions` are the servicer's own methods.
    Nothing is done that could not be written down first: then the call is Unavailable.
    """
    return cast(S, _Audited(servicer, log, service))


class _Audited:
    def __init__(self, servicer: Any, log: AuditLog, service: str) -> None:
        actions = ACTIONS[service]
        for name in dir(servicer):
            if not name.startswith("_"):
                call = getattr(servicer, name)
                if name in actions:
                    call = _written_down(call, log, f"{service}/{name}", actions[name])
                setattr(self, name, call)


def _written_down(call: _Call, log: AuditLog, name: str, action: Action) -> _Call:
    async def with_audit(request: Any, context: Any = None) -> Any:
        who = caller()
        if not action.whose(who):
            return await call(request, context)
        event_id = await log.begin(_entry(request, who, name, action))
        try:
            answer = await call(request, context)
        except Exception as error:
            if isinstance(error, _HARMLESS) and Role.OPERATOR not in who.roles:
                # A tenant that asks for what does not exist must not fill the log.
                await log.drop(event_id)
            else:
                reason = error.reason if isinstance(error, KvplaneError) else Internal.reason
                await log.finish(event_id, Ending(Outcome.REFUSED, reason))
            raise
        if action.in_vain(answer):
            await log.drop(event_id)
            return answer
        ending = Ending(
            Outcome.DONE,
            tenant_id=written(action.done_for(answer), domain.TENANT_LENGTH),
            target=written(action.done_to(answer), domain.TARGET_LENGTH),
        )
        await log.finish(event_id, ending)
        return answer

    return with_audit


def _entry(request: Any, who: Caller, name: str, action: Action) -> Entry:
    tenant_id = who.tenant_id if action.tenant is None else action.tenant(request)
    return Entry(
        actor=written(who.actor, domain.ACTOR_LENGTH),
        tenant_id=written(tenant_id, domain.TENANT_LENGTH),
        action=name,
        target=written(action.target(request), domain.TARGET_LENGTH),
        detail=written(action.detail(request), domain.DETAIL_LENGTH),
        request_id=written(who.request_id, domain.REQUEST_ID_LENGTH),
    )
