"""Messages to values, checked field by field, and values to messages."""

import base64

from kvplane.api.tenant.v1 import tenant_pb2 as pb
from kvplane.kernel import validate
from kvplane.kernel.errors import InvalidField
from kvplane.tenant.domain import ApiKey, Tenant

DISPLAY_NAME_BYTES = 256
KEY_ID_BYTES = 64


def display_name(value: str) -> str:
    """Any text, or none."""
    return validate.plain("display_name", value, DISPLAY_NAME_BYTES) if value else ""


def key_id(value: str) -> str:
    """An id as CreateApiKey gives it out."""
    return validate.identifier("key_id", value, KEY_ID_BYTES)


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
    message = pb.ApiKey(key_id=key.key_id, tenant_id=key.tenant_id, prefix=key.prefix)
    message.create_time.FromMicroseconds(key.create_us)
    if key.revoke_us is not None:
        message.revoke_time.FromMicroseconds(key.revoke_us)
    return message
