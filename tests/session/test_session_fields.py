"""Bad input at every call: an error that names the field, and nothing stored."""

import pytest
from kvplane.api.session.v1 import session_pb2 as pb
from kvplane.kernel.errors import InvalidField
from session.session_requests import begin, call, tenant


def complete(**changes):
    fields = {"session_id": "session-1", "turn": 1, "outcome": pb.TURN_OUTCOME_OK} | changes
    return pb.CompleteTurnRequest(**fields)


def late_token(seconds=0, nanos=0):
    request = complete()
    request.time_to_first_token.seconds = seconds
    request.time_to_first_token.nanos = nanos
    return request


BAD = [
    ("BeginTurn", begin(request_id=""), "request_id"),
    ("BeginTurn", begin(request_id="x" * 129), "request_id"),
    ("BeginTurn", begin(request_id="a\0"), "request_id"),
    ("BeginTurn", begin(model=""), "model"),
    ("BeginTurn", begin(model="m" * 257), "model"),
    ("BeginTurn", begin(model="m\0"), "model"),
    ("BeginTurn", begin(name="x" * 513), "key.name"),
    ("BeginTurn", begin(name="\u00e9" * 257), "key.name"),
    ("BeginTurn", begin(history=[b"x" * 16] * 65), "key.history"),
    ("BeginTurn", begin(history=[b"x" * 16, b"x" * 15]), "key.history[1]"),
    ("BeginTurn", begin(name="n", history=[b""]), "key.history[0]"),
    ("CompleteTurn", complete(session_id=""), "session_id"),
    ("CompleteTurn", complete(session_id="a b"), "session_id"),
    ("CompleteTurn", complete(turn=0), "turn"),
    ("CompleteTurn", complete(turn=-1), "turn"),
    ("CompleteTurn", complete(turn=2**63 - 1), "turn"),
    ("CompleteTurn", complete(outcome=pb.TURN_OUTCOME_UNSPECIFIED), "outcome"),
    ("CompleteTurn", complete(outcome=7), "outcome"),
    ("CompleteTurn", complete(prompt_tokens=-1), "prompt_tokens"),
    ("CompleteTurn", complete(prompt_tokens=2**62), "prompt_tokens"),
    ("CompleteTurn", complete(completion_tokens=-1), "completion_tokens"),
    ("CompleteTurn", complete(tokens_reused=-1), "tokens_reused"),
    ("CompleteTurn", complete(prompt_tokens=5, tokens_reused=6), "tokens_reused"),
    ("CompleteTurn", complete(history_digest=b"short"), "history_digest"),
    ("CompleteTurn", complete(prefill_worker_id="no spaces"), "prefill_worker_id"),
    ("CompleteTurn", complete(decode_worker_id="x" * 129), "decode_worker_id"),
    ("CompleteTurn", late_token(seconds=-1), "time_to_first_token"),
    ("CompleteTurn", late_token(nanos=-1), "time_to_first_token"),
    ("CreateSession", pb.CreateSessionRequest(model="m"), "name"),
    ("CreateSession", pb.CreateSessionRequest(name="x" * 513, model="m"), "name"),
    ("CreateSession", pb.CreateSessionRequest(name="chat"), "model"),
    ("GetSession", pb.GetSessionRequest(), "session_id"),
    ("GetSession", pb.GetSessionRequest(session_id="s", name="n"), "session_id"),
    ("GetSession", pb.GetSessionRequest(session_id="\0"), "session_id"),
    ("GetSession", pb.GetSessionRequest(name="x" * 513), "name"),
    ("EndSession", pb.EndSessionRequest(), "session_id"),
    ("EndSession", pb.EndSessionRequest(session_id="s", name="n"), "session_id"),
    ("EndSession", pb.EndSessionRequest(session_id="-"), "session_id"),
    ("ListSessions", pb.ListSessionsRequest(page_size=-1), "page_size"),
    ("ListSessions", pb.ListSessionsRequest(page_size=1001), "page_size"),
    ("ListSessions", pb.ListSessionsRequest(states=[1, 0]), "states[1]"),
    ("ListSessions", pb.ListSessionsRequest(states=[9]), "states[0]"),
    ("ListSessions", pb.ListSessionsRequest(model="m\0"), "model"),
    ("ListSessions", pb.ListSessionsRequest(worker_id="a b"), "worker_id"),
    ("ListSessions", pb.ListSessionsRequest(page_token="no token"), "page_token"),
    ("ListSessions", pb.ListSessionsRequest(page_token="\u00e9"), "page_token"),
    ("ListSessions", pb.ListSessionsRequest(page_token="YTpiOmM="), "page_token"),
    ("ListSessions", pb.ListSessionsRequest(page_token="/////w=="), "page_token"),
    ("WatchSessions", pb.WatchSessionsRequest(session_id="a b"), "session_id"),
]


@pytest.mark.parametrize(
    ("method", "request_", "field"), BAD, ids=[f"{m}-{f}-{i}" for i, (m, _, f) in enumerate(BAD)]
)
async def test_bad_input_names_the_field_and_stores_nothing(sqlite, method, request_, field):
    service = sqlite.replica().servicer
    with pytest.raises(InvalidField) as caught:
        await call(service, method, request_)
    assert caught.value.metadata == {"field": field}
    for table in ("sessions", "turns", "session_history"):
        assert await sqlite.execute(f"SELECT count(*) FROM {table}") == [(0,)]


async def test_the_limits_themselves_are_accepted(registry):
    service = registry.replica().servicer
    with tenant("t" * 64):
        begun = await service.BeginTurn(
            begin("r" * 128, "\u00e9" * 256, [b"x" * 16] * 64, model="\u00e9" * 128)
        )
        await service.CompleteTurn(
            pb.CompleteTurnRequest(
                session_id=begun.session.session_id,
                turn=1,
                outcome=pb.TURN_OUTCOME_OK,
                prompt_tokens=1_000_000_000,
                completion_tokens=1_000_000_000,
                tokens_reused=1_000_000_000,
                history_digest=b"\0" * 16,
                prefill_worker_id="p" * 128,
                decode_worker_id="d" * 128,
            )
        )
        page = await service.ListSessions(pb.ListSessionsRequest(page_size=1000))
    assert page.sessions[0].name == "\u00e9" * 256
