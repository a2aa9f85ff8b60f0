"""SessionService of kvplane.api.session.v1, over the wire or called directly."""

from collections.abc import AsyncIterator
from typing import Any

from kvplane.api.session.v1 import session_pb2 as pb
from kvplane.api.session.v1 import session_pb2_grpc
from kvplane.kernel.context import caller
from kvplane.session import codec
from kvplane.session.service import SessionService


class SessionServicer(session_pb2_grpc.SessionServiceServicer):
    """Everything is the calling tenant's; errors are kvplane.kernel.errors."""

    def __init__(self, service: SessionService) -> None:
        self._service = service

    async def CreateSession(
        self, request: pb.CreateSessionRequest, context: Any = None
    ) -> pb.CreateSessionResponse:
        """Return the active session of a name, made if it is new. Raises QuotaExceeded."""
        name, model = codec.name_and_model(request)
        session, created = await self._service.create(caller().tenant_id, name, model)
        return pb.CreateSessionResponse(session=codec.session_message(session), created=created)

    async def GetSession(
        self, request: pb.GetSessionRequest, context: Any = None
    ) -> pb.GetSessionResponse:
        """Return a session with its live ownerships."""
        session, held = await self._service.get(caller().tenant_id, codec.session_ref(request))
        return pb.GetSessionResponse(session=codec.session_message(session, held))

    async def ListSessions(
        self, request: pb.ListSessionsRequest, context: Any = None
    ) -> pb.ListSessionsResponse:
        """Return a page of sessions, newest first."""
        which, after, size = codec.list_request(request)
        # One more than asked for tells whether there is another page.
        page = await self._service.list_sessions(caller().tenant_id, which, after, size + 1)
        shown = page[:size]
        return pb.ListSessionsResponse(
            sessions=[codec.session_message(session) for session in shown],
            next_page_token=codec.page_token(shown[-1], which) if len(page) > size else "",
        )

    async def EndSession(
        self, request: pb.EndSessionRequest, context: Any = None
    ) -> pb.EndSessionResponse:
        """End a session."""
        session, was_active = await self._service.end(
            caller().tenant_id, codec.session_ref(request)
        )
        return pb.EndSessionResponse(
            session=codec.session_message(session), already_ended=not was_active
        )

    async def WatchSessions(
        self, request: pb.WatchSessionsRequest, context: Any = None
    ) -> AsyncIterator[pb.WatchSessionsResponse]:
        """Stream the present state, then changes."""
        session_id = codec.watched_id(request)
        async for session in self._service.watch(caller().tenant_id, session_id):
            yield pb.WatchSessionsResponse(session=codec.session_message(session))

    async def BeginTurn(
        self, request: pb.BeginTurnRequest, context: Any = None
    ) -> pb.BeginTurnResponse:
        """Find or make a session and open its next turn. Raises QuotaExceeded."""
        wish = codec.begin_turn(request)
        return codec.begun_message(await self._service.begin_turn(caller().tenant_id, wish))

    async def CompleteTurn(
        self, request: pb.CompleteTurnRequest, context: Any = None
    ) -> pb.CompleteTurnResponse:
        """Close a turn."""
        report = codec.complete_turn(request)
        session = await self._service.complete_turn(caller().tenant_id, report)
        if session is None:
            return pb.CompleteTurnResponse()
        return pb.CompleteTurnResponse(session=codec.session_message(session))

    async def GetUsage(
        self, request: pb.GetUsageRequest, context: Any = None
    ) -> pb.GetUsageResponse:
        """Say what the tenant's completed turns have used."""
        tenant_id = caller().tenant_id
        used, active_sessions = await self._service.usage(tenant_id)
        answer = codec.usage_message(used, active_sessions)
        answer.tenant_id = tenant_id
        return answer
