"""Requests of the session service, short to write."""

import contextlib
from collections.abc import Iterator

from kvplane.api.session.v1 import session_pb2 as pb
from kvplane.kernel.context import Caller, caller, set_caller

OK = pb.TURN_OUTCOME_OK
CANCELLED = pb.TURN_OUTCOME_CANCELLED
FAILED = pb.TURN_OUTCOME_FAILED


def begin(
    request_id="r", name="", history=(), model="m", *, tokens=0, size=0
) -> pb.BeginTurnRequest:
    key = pb.SessionKey(name=name, history=history)
    return pb.BeginTurnRequest(
        request_id=request_id,
        key=key,
        model=model,
        prompt_tokens_estimate=tokens,
        request_bytes=size,
    )


def complete(begun: pb.BeginTurnResponse, outcome=OK, **more) -> pb.CompleteTurnRequest:
    return pb.CompleteTurnRequest(
        session_id=begun.session.session_id, turn=begun.turn, outcome=outcome, **more
    )


def digest(text: str) -> bytes:
    return text.encode().ljust(16, b".")


@contextlib.contextmanager
def tenant(tenant_id: str) -> Iterator[None]:
    """Call as that tenant."""
    before = caller()
    set_caller(Caller(tenant_id=tenant_id))
    try:
        yield
    finally:
        set_caller(before)


async def call(service, method: str, request):
    """Call any of the methods; of a stream, return the first answer."""
    answer = getattr(service, method)(request)
    return await (anext(answer) if method == "WatchSessions" else answer)
