"""Turns over every database: finding the session, numbering, idempotency."""

import asyncio

import pytest

from kvplane.api.session.v1 import session_pb2 as pb
from kvplane.kernel.errors import InvalidField, NotFound


def begin(request_id="r", name="", history=(), model="m"):
    return pb.BeginTurnRequest(
        request_id=request_id, key=pb.SessionKey(name=name, history=history), model=model
    )


def complete(begun, outcome=pb.TURN_OUTCOME_OK, digest=b"", **more):
    return pb.CompleteTurnRequest(
        session_id=begun.session.session_id,
        turn=begun.turn,
        outcome=outcome,
        history_digest=digest,
        **more,
    )


def digest(text):
    return text.encode().ljust(16, b".")


async def test_a_named_session_is_made_once_and_found_again(registry):
    service = registry.replica().servicer
    first = await service.BeginTurn(begin("r1", "chat"))
    second = await service.BeginTurn(begin("r2", "chat"))
    assert first.session.session_id == second.session.session_id
    assert (first.turn, second.turn) == (1, 2)
    assert first.session.name == "chat"
    assert first.session.state == pb.SESSION_STATE_ACTIVE
    assert (first.open_turns, second.open_turns) == (0, 1)
