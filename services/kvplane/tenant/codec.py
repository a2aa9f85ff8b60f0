"""Messages to values, checked field by field, and values to messages."""

import base64
from typing import Final

from kvplane.api.tenant.v1 import tenant_pb2 as pb
from kvplane.kernel import validate
from kvplane.kernel.context import Role
from kvplane.kernel.errors import InvalidField
from kvplane.kernel.limits import Limits, Quotas
from kvplane.tenant.domain import (
    LIMIT_NAMES,
    NO_TENANT,
    ApiKey,
    Changes,
    FoundKey,
    KeyOrder,
    Tenant,
)

DISPLAY_NAME_BYTES: Final = 256
KEY_ID_BYTES: Final = 64
WORKER_ID_BYTES: Final = 128
MAX_LIMIT: Final = 10**15
# A hundred years.
_MAX_TTL_S: Final = 36_500 * 86_400
_NANOS: Final = 1_000_000_000

_ROLES: Final = {
    pb.ROLE_UNSPECIFIED: Role.TENANT,
    pb.ROLE_TENANT: Role.TENANT,
    pb.ROLE_WORKER: Role.WORKER,
    pb.ROLE_OPERATOR: Role.OPERATOR,
}
_ROLE_NUMBERS: Final = {role: number for number, role in _ROLES.items()}


def display_name(value: str) -> str:
    """Any text, or none."""
    return validate.plain("display_name", value, DISPLAY_NAME_BYTES) if value else ""


def key_id(value: str) -> str:
    """An id as CreateApiKey gives it out."""
    return validate.identifier("key_id", value, KEY_ID_BYTES)


def key_order(request: pb.CreateApiKeyRequest) -> KeyOrder:
    """A tenant's key names its tenant, a worker's its worker, an operator's neither."""
    role = _ROLES.get(request.role)
    if role is None:
        raise InvalidField("role", "use ROLE_TENANT, ROLE_WORKER or ROLE_OPERATOR")
    if role is Role.TENANT:
        validate.tenant_id("tenant_id", request.tenant_id)
    elif request.tenant_id:
        raise InvalidField("tenant_id", f"leave it empty: a key of role {role} is no tenant's")
    if role is Role.WORKER:
        validate.identifier("worker_id", request.worker_id, WORKER_ID_BYTES)
    elif request.worker_id:
        raise InvalidField("worker_id", f"leave it empty: a key of role {role} is no worker's")
    return KeyOrder(request.tenant_id, role, request.worker_id, _ttl_us(request))


def whose_keys(tenant_id: str) -> str:
    """A tenant, or nobody for workers' and operators' keys."""
    return validate.tenant_id("tenant_id", tenant_id) if tenant_id else NO_TENANT


def changes(field: str, limits: pb.Limits) -> Changes:
    """Return the limits that are there."""
    found: Changes = {}
    for name in LIMIT_NAMES:
        if limits.HasField(name):
            value = getattr(limits, name)
            validate.between(f"{field}.{name}", value, 0, MAX_LIMIT)
            found[name] = value
    return found


def soft_changes(limits: pb.Limits) -> Changes:
    """Return the soft limits that are there; of leases there is none."""
    found = changes("quotas.soft", limits)
    if found.get("live_leases"):
        raise InvalidField(
            "quotas.soft.live_leases", "is no soft limit: leave it out and set the hard one"
        )
    return found


def page_token(last: Tenant) -> str:
    """Return where the next page begins."""
    return base64.urlsafe_b64encode(last.tenant_id.encode()).decode()


def after(token: str) -> str:
    """Return the last tenant of the page before, empty for the first page."""
    if not token:
        return ""
    try:
        raw = base64.b64decode(token.encode(), altchars=b"-_", validate=True).decode()
        return validate.tenant_id("page_token", raw)
    except (ValueError, InvalidField):
        raise InvalidField("page_token", "is not one that was given out") from None


def tenant_message(tenant: Tenant) -> pb.Tenant:
    """Return the API's form of a tenant."""
    message = pb.Tenant(tenant_id=tenant.tenant_id, display_name=tenant.display_name)
    message.create_time.FromMicroseconds(tenant.create_us)
    return message


def key_message(key: ApiKey) -> pb.ApiKey:
    """Return the API's form of a key: without its hash."""
    message = pb.ApiKey(
        key_id=key.key_id,
        tenant_id=key.tenant_id,
        prefix=key.prefix,
        role=_ROLE_NUMBERS[key.role],
        worker_id=key.worker_id,
    )
    message.create_time.FromMicroseconds(key.create_us)
    if key.revoke_us is not None:
        message.revoke_time.FromMicroseconds(key.revoke_us)
    if key.expire_us is not None:
        message.expire_time.FromMicroseconds(key.expire_us)
    return message


def resolved_message(found: FoundKey) -> pb.ResolveApiKeyResponse:
    """Return what a valid key is good for."""
    key = found.key
    message = pb.ResolveApiKeyResponse(
        tenant_id=key.tenant_id,
        key_id=key.key_id,
        role=_ROLE_NUMBERS[key.role],
        worker_id=key.worker_id,
        cache_salt=found.cache_salt,
    )
    if key.expire_us is not None:
        message.valid_for.FromMicroseconds(key.expire_us - found.now_us)
    return message


def quotas_message(quotas: Quotas) -> pb.Quotas:
    """Return the API's form of limits: without those that are none."""
    return pb.Quotas(soft=_limits_message(quotas.soft), hard=_limits_message(quotas.hard))


def _limits_message(limits: Limits) -> pb.Limits:
    values = {name: getattr(limits, name) for name in LIMIT_NAMES}
    return pb.Limits(**{name: value for name, value in values.items() if value})


def _ttl_us(request: pb.CreateApiKeyRequest) -> int:
    if not request.HasField("ttl"):
        return 0
    ttl = request.ttl
    right = 0 <= ttl.seconds <= _MAX_TTL_S and 0 <= ttl.nanos < _NANOS
    if not right or ttl.seconds == ttl.nanos == 0:
        most = f"must be more than 0 and at most {_MAX_TTL_S} seconds"
        raise InvalidField("ttl", f"{most}; leave it out for a key without an end")
    # Up: what is short must not become 0, which is for ever.
    return ttl.seconds * 1_000_000 + -(-ttl.nanos // 1000)
