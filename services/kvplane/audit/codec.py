"""Messages to values, checked field by field, and values to messages."""

import base64
from typing import Final

from google.protobuf.timestamp_pb2 import Timestamp

from kvplane.api.audit.v1 import audit_pb2 as pb
from kvplane.audit import domain
from kvplane.audit.domain import Event, Filter, Place
from kvplane.kernel import validate
from kvplane.kernel.errors import InvalidField

_LONGEST_TOKEN: Final = 256
# 0001-01-01 and 9999-12-31: what a Timestamp may hold.
_FIRST_S: Final = -62_135_596_800
_LAST_S: Final = 253_402_300_799
_NANOS: Final = 1_000_000_000


def wanted(request: pb.ListAuditEventsRequest) -> Filter:
    """Return the filter; what is not set fits everything."""
    if request.tenant_id:
        validate.tenant_id("tenant_id", request.tenant_id)
    if request.actor:
        validate.plain("actor", request.actor, domain.ACTOR_LENGTH)
    if request.action:
        validate.plain("action", request.action, domain.ACTION_LENGTH)
    has_since, has_until = request.HasField("since"), request.HasField("until")
    since_us = _micros("since", request.since) if has_since else None
    until_us = _micros("until", request.until) if has_until else None
    if since_us is not None and until_us is not None and since_us >= until_us:
        raise InvalidField("until", "must be later than since")
    return Filter(
        tenant_id=request.tenant_id,
        actor=request.actor,
        action=request.action,
        since_us=since_us,
        until_us=until_us,
    )


def page_token(last: Event) -> str:
    """Return where the next page begins."""
    return base64.urlsafe_b64encode(f"{last.time_us} {last.event_id}".encode()).decode()


def after(token: str) -> Place | None:
    """Return where the page before ended, None for the first page."""
    if not token:
        return None
    try:
        validate.text("page_token", token, _LONGEST_TOKEN)
        raw = base64.b64decode(token.encode(), altchars=b"-_", validate=True).decode()
        time, _, event_id = raw.partition(" ")
        time_us = int(time)
        validate.between("page_token", time_us, 0, 2**63 - 1)
        return Place(time_us, validate.identifier("page_token", event_id))
    except (ValueError, InvalidField):
        raise InvalidField("page_token", "is not one that was given out") from None


def event_message(event: Event) -> pb.AuditEvent:
    """Return the API's form of an event."""
    message = pb.AuditEvent(
        event_id=event.event_id,
        actor=event.entry.actor,
        tenant_id=event.entry.tenant_id,
        action=event.entry.action,
        target=event.entry.target,
        detail=event.entry.detail,
        outcome=pb.Outcome.Name(event.outcome),
        reason=event.reason,
        request_id=event.entry.request_id,
    )
    message.time.FromMicroseconds(event.time_us)
    return message


def _micros(field: str, value: Timestamp) -> int:
    if not (_FIRST_S <= value.seconds <= _LAST_S and 0 <= value.nanos < _NANOS):
        raise InvalidField(field, "must be a time from year 1 to 9999")
    return value.seconds * 1_000_000 + value.nanos // 1000
