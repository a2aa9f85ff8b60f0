"""AuditService of kvplane.api.audit.v1, over the wire or called directly."""

from typing import Any

from kvplane.api.audit.v1 import audit_pb2 as pb
from kvplane.api.audit.v1 import audit_pb2_grpc
from kvplane.audit import codec
from kvplane.audit.service import AuditLog
from kvplane.kernel import validate


class AuditServicer(audit_pb2_grpc.AuditServiceServicer):
    """For operators; errors are kvplane.kernel.errors."""

    def __init__(self, log: AuditLog) -> None:
        self._log = log

    async def ListAuditEvents(
        self, request: pb.ListAuditEventsRequest, context: Any = None
    ) -> pb.ListAuditEventsResponse:
        """Return a page of events, the newest first."""
        size = validate.page_size(request.page_size)
        wanted, after = codec.wanted(request), codec.after(request.page_token)
        # One more than asked for tells whether there is another page.
        page = await self._log.list_events(wanted, after, size + 1)
        return pb.ListAuditEventsResponse(
            events=[codec.event_message(event) for event in page[:size]],
            next_page_token=codec.page_token(page[size - 1]) if len(page) > size else "",
        )
