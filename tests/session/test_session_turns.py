"""Turns over every database: finding the session, numbers, repetition."""

import asyncio

import pytest
from kvplane.api.session.v1 import session_pb2 as pb
from kvplane.kernel.errors import InvalidField, NotFound
from kvplane.session.domain import SessionConfig
from session.session_requests import CANCELLED, FAILED, OK, begin, complete, digest, tenant


async def test_a_named_session_is_made_on_first_sight_and_found_again(registry):
    service = registry.replica().servicer
    first = await service.BeginTurn(begin("r1", "chat"))
    second = await service.BeginTurn(begin("r2", "chat", model="other"))
    assert first.session.session_id == second.session.session_id
    assert (first.turn, second.turn) == (1, 2)
    assert first.session.name == "chat"
    assert first.session.tenant_id == "default"
    assert first.session.state == pb.SESSION_STATE_ACTIVE
    assert (first.session.model, second.session.model) == ("m", "other")
    assert (first.open_turns, second.open_turns) == (0, 1)
    assert first.session.HasField("expire_time")


NAMES = [
    "chat",
    "Chat",
    "chat ",
    " chat",
    "chat\n",
    "chat\0",
    "chat\0a",
    "ch%t",
    "ch_t",
    "caf\u00e9",
    "cafe\u0301",
    "\u0130stanbul",
    "i\u0307stanbul",
    "stra\u00dfe",
    "strasse",
    "STRASSE",
    "\u202echat",
    "\U0001f600",
    "x" * 512,
    "x" * 511,
    "1",
    "01",
    "NULL",
    "' OR 1=1 --",
]


async def test_no_two_names_are_the_same_session(registry):
    service = registry.replica().servicer
    ids = {}
    for index, name in enumerate(NAMES):
        begun = await service.BeginTurn(begin(f"a{index}", name))
        assert begun.turn == 1, name
        assert begun.session.name == name
        ids[name] = begun.session.session_id
    assert len(set(ids.values())) == len(NAMES)
    for index, name in enumerate(NAMES):
        begun = await service.BeginTurn(begin(f"b{index}", name))
        assert (begun.session.session_id, begun.turn) == (ids[name], 2)
        found = await service.GetSession(pb.GetSessionRequest(name=name))
        assert found.session.session_id == ids[name]


async def test_without_name_and_history_every_turn_is_a_new_session(registry):
    service = registry.replica().servicer
    first = await service.BeginTurn(begin("r1"))
    second = await service.BeginTurn(begin("r2"))
    assert first.session.session_id != second.session.session_id
    assert first.session.name == ""


async def test_a_conversation_is_found_by_its_history(registry):
    service = registry.replica().servicer
    first = await service.BeginTurn(begin("r1"))
    await service.CompleteTurn(complete(first, history_digest=digest("1")))
    second = await service.BeginTurn(begin("r2", history=[digest("1")]))
    await service.CompleteTurn(complete(second, history_digest=digest("12")))
    third = await service.BeginTurn(begin("r3", history=[digest("12"), digest("1")]))
    assert {b.session.session_id for b in (first, second, third)} == {first.session.session_id}
    assert [b.turn for b in (first, second, third)] == [1, 2, 3]


async def test_the_longest_known_history_wins(registry):
    service = registry.replica().servicer
    short = await service.BeginTurn(begin("r1"))
    await service.CompleteTurn(complete(short, history_digest=digest("1")))
    long = await service.BeginTurn(begin("r2"))
    await service.CompleteTurn(complete(long, history_digest=digest("12")))
    history = [digest("123"), digest("12"), digest("1")]
    found = await service.BeginTurn(begin("r3", history=history))
    assert found.session.session_id == long.session.session_id


async def test_a_branch_or_retry_of_an_older_turn_returns_to_its_session(registry):
    service = registry.replica().servicer
    first = await service.BeginTurn(begin("r1"))
    await service.CompleteTurn(complete(first, history_digest=digest("1")))
    second = await service.BeginTurn(begin("r2", history=[digest("1")]))
    await service.CompleteTurn(complete(second, history_digest=digest("1a")))
    retry = await service.BeginTurn(begin("r3", history=[digest("1")]))
    assert retry.session.session_id == first.session.session_id
    assert retry.turn == 3
    await service.CompleteTurn(complete(retry, history_digest=digest("1b")))
    for request_id, branch in (("r4", "1a"), ("r5", "1b")):
        found = await service.BeginTurn(begin(request_id, history=[digest(branch), digest("1")]))
        assert found.session.session_id == first.session.session_id


async def test_conversations_that_began_alike_do_not_pile_up_in_one_session(registry):
    service = registry.replica().servicer
    ids = set()
    for number in range(3):
        begun = await service.BeginTurn(begin(f"a{number}"))
        await service.CompleteTurn(complete(begun, history_digest=digest("same")))
        ids.add(begun.session.session_id)
    together = [begin(f"b{number}", history=[digest("same")]) for number in range(3)]
    continued = await asyncio.gather(*(service.BeginTurn(request) for request in together))
    assert {begun.session.session_id for begun in continued} == ids
    assert {begun.turn for begun in continued} == {2}


async def test_history_is_of_a_model_and_a_tenant(registry):
    service = registry.replica().servicer
    first = await service.BeginTurn(begin("r1"))
    await service.CompleteTurn(complete(first, history_digest=digest("1")))
    other_model = await service.BeginTurn(begin("r2", history=[digest("1")], model="n"))
    with tenant("other"):
        other_tenant = await service.BeginTurn(begin("r2", history=[digest("1")]))
    ids = {b.session.session_id for b in (first, other_model, other_tenant)}
    assert len(ids) == 3


async def test_history_is_not_asked_when_there_is_a_name(registry):
    service = registry.replica().servicer
    first = await service.BeginTurn(begin("r1"))
    await service.CompleteTurn(complete(first, history_digest=digest("1")))
    named = await service.BeginTurn(begin("r2", "chat", history=[digest("1")]))
    assert named.session.session_id != first.session.session_id


async def test_the_last_few_histories_are_kept(registry):
    service = registry.replica(SessionConfig(histories_kept=3)).servicer
    begun = await service.BeginTurn(begin("r0"))
    session_id = begun.session.session_id
    await service.CompleteTurn(complete(begun, history_digest=digest("0")))
    for number in range(1, 5):
        begun = await service.BeginTurn(begin(f"r{number}", history=[digest(str(number - 1))]))
        # Turns that fail do not push any out.
        failed = await service.BeginTurn(begin(f"f{number}", history=[digest(str(number - 1))]))
        await service.CompleteTurn(complete(failed, FAILED, history_digest=digest("failed")))
        await service.CompleteTurn(complete(begun, history_digest=digest(str(number))))
    found = {}
    for text in ("0", "1", "2", "3", "4", "failed"):
        begun = await service.BeginTurn(begin(f"x{text}", history=[digest(text)]))
        found[text] = begun.session.session_id == session_id
    assert found == {"0": False, "1": False, "2": True, "3": True, "4": True, "failed": False}
    assert await registry.execute("SELECT count(*) FROM session_history") == [(3,)]


async def test_the_same_history_again_is_recorded_once(registry):
    service = registry.replica().servicer
    for number in range(3):
        begun = await service.BeginTurn(begin(f"r{number}", "chat"))
        await service.CompleteTurn(complete(begun, history_digest=digest("1")))
    assert await registry.execute("SELECT turn, number FROM session_history") == [(3, 3)]


async def test_a_repeated_request_gets_the_first_answer(registry):
    service = registry.replica().servicer
    first = await service.BeginTurn(begin("r0", "chat"))
    await service.CompleteTurn(
        complete(
            first, prompt_tokens=9, tokens_reused=4, decode_worker_id="d", history_digest=b"h" * 16
        )
    )
    requests = [begin("named", "chat"), begin("unnamed"), begin("found", history=[b"h" * 16])]
    answers = [await service.BeginTurn(request) for request in requests]
    for answer in answers:
        await service.CompleteTurn(complete(answer, prompt_tokens=70, decode_worker_id="e"))
    await service.BeginTurn(begin("r9", "chat"))
    assert [await service.BeginTurn(request) for request in requests] == answers
    await service.EndSession(pb.EndSessionRequest(name="chat"))
    assert [await service.BeginTurn(request) for request in requests] == answers
    assert await registry.execute("SELECT count(*) FROM turns") == [(5,)]
    assert await registry.execute("SELECT count(*) FROM sessions") == [(2,)]


async def test_the_same_request_many_times_at_once_opens_one_turn(registry):
    service = registry.replica().servicer
    for request in (begin("named", "chat"), begin("unnamed")):
        answers = await asyncio.gather(*(service.BeginTurn(request) for _ in range(20)))
        assert all(answer == answers[0] for answer in answers)
        assert answers[0].turn == 1


async def test_a_request_id_of_another_key_is_refused(registry):
    service = registry.replica().servicer
    await service.BeginTurn(begin("r", "chat"))
    for other in (begin("r", "chat2"), begin("r"), begin("r", "chat", model="n")):
        with pytest.raises(InvalidField, match="request_id"):
            await service.BeginTurn(other)
    assert await registry.execute("SELECT count(*) FROM sessions") == [(1,)]
    with tenant("other"):
        assert (await service.BeginTurn(begin("r", "elsewhere"))).turn == 1


async def test_turns_begun_together_are_numbered_apart(registry):
    service = registry.replica().servicer
    begun = await asyncio.gather(*(service.BeginTurn(begin(f"r{i}", "chat")) for i in range(40)))
    assert sorted(answer.turn for answer in begun) == list(range(1, 41))
    assert sorted(answer.open_turns for answer in begun) == list(range(40))


async def test_the_first_outcome_stays(registry):
    service = registry.replica().servicer
    begun = await service.BeginTurn(begin("r", "chat"))
    first = await service.CompleteTurn(
        complete(begun, prompt_tokens=100, tokens_reused=60, decode_worker_id="d1")
    )
    assert (first.session.tokens_reused, first.session.tokens_recomputed) == (60, 40)
    again = await service.CompleteTurn(
        complete(begun, CANCELLED, prompt_tokens=1, decode_worker_id="d2")
    )
    assert again == first
    assert await registry.execute("SELECT outcome, prompt_tokens FROM turns") == [(1, 100)]


async def test_the_first_of_two_outcomes_at_once_stays(registry):
    service = registry.replica().servicer
    begun = await service.BeginTurn(begin("r", "chat"))
    reports = [complete(begun, outcome, prompt_tokens=10) for outcome in (OK, FAILED, OK)]
    answers = await asyncio.gather(*(service.CompleteTurn(report) for report in reports))
    assert {answer.session.tokens_recomputed for answer in answers} == {10}
    assert await registry.execute("SELECT outcome FROM turns") == [(1,)]


async def test_a_completed_turn_is_stored_whole(registry):
    service = registry.replica().servicer
    begun = await service.BeginTurn(begin("r", "chat"))
    report = complete(
        begun,
        prompt_tokens=100,
        completion_tokens=20,
        tokens_reused=60,
        prefill_worker_id="p1",
        decode_worker_id="d1",
    )
    report.time_to_first_token.FromMilliseconds(250)
    session = (await service.CompleteTurn(report)).session
    assert (session.last_prefill_worker_id, session.last_decode_worker_id) == ("p1", "d1")
    rows = await registry.execute(
        "SELECT outcome, prompt_tokens, completion_tokens, tokens_reused, prefill_worker_id,"
        " decode_worker_id, time_to_first_token_us FROM turns"
    )
    assert rows == [(1, 100, 20, 60, "p1", "d1", 250_000)]


async def test_previous_completed_and_open_turns(registry):
    service = registry.replica().servicer
    first = await service.BeginTurn(begin("r1", "chat"))
    second = await service.BeginTurn(begin("r2", "chat"))
    await service.CompleteTurn(complete(first))
    await service.CompleteTurn(complete(second))
    third = await service.BeginTurn(begin("r3", "chat"))
    assert (third.previous_completed, third.open_turns) == (True, 0)
    fourth = await service.BeginTurn(begin("r4", "chat"))
    assert (fourth.previous_completed, fourth.open_turns) == (False, 1)
    await service.CompleteTurn(complete(fourth, FAILED))
    fifth = await service.BeginTurn(begin("r5", "chat"))
    assert (fifth.previous_completed, fifth.open_turns) == (False, 1)


async def test_a_turn_open_for_ten_minutes_is_abandoned_and_may_still_complete(sqlite):
    service = sqlite.replica().servicer
    old = await service.BeginTurn(begin("r1", "chat"))
    sqlite.clock.advance(300)
    await service.BeginTurn(begin("r2", "chat"))
    sqlite.clock.advance(299.9)
    assert (await service.BeginTurn(begin("r3", "chat"))).open_turns == 2
    sqlite.clock.advance(0.2)
    assert (await service.BeginTurn(begin("r4", "chat"))).open_turns == 2
    session = (await service.CompleteTurn(complete(old, prompt_tokens=3))).session
    assert session.tokens_recomputed == 3


async def test_unknown_sessions_and_turns_are_not_found(registry):
    service = registry.replica().servicer
    begun = await service.BeginTurn(begin("r", "chat"))
    begun.turn = 2
    with pytest.raises(NotFound, match="no turn"):
        await service.CompleteTurn(complete(begun))
    begun.session.session_id = "session-unknown"
    with pytest.raises(NotFound, match="no session"):
        await service.CompleteTurn(complete(begun))


async def test_create_returns_the_session_of_that_name(registry):
    service = registry.replica().servicer
    request = pb.CreateSessionRequest(name="chat", model="m")
    made, again = await service.CreateSession(request), await service.CreateSession(request)
    assert (made.created, again.created) == (True, False)
    assert made.session == again.session
    assert made.session.turns == 0
    assert not made.session.HasField("last_turn_time")
    begun = await service.BeginTurn(begin("r", "chat"))
    assert (begun.session.session_id, begun.turn) == (made.session.session_id, 1)
