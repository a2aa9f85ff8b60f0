"""Limits on what a tenant may begin, the same at every replica."""

import asyncio

import pytest
from kvplane.api.session.v1 import session_pb2 as pb
from kvplane.kernel.errors import InvalidField, NotFound, QuotaExceeded
from kvplane.kernel.limits import Limits, Quotas
from session.session_requests import CANCELLED, OK, begin, complete, tenant

# One at once, and the next after a time that no test takes.
ONE_AT_ONCE = 0.001


def hard(**limits) -> Quotas:
    return Quotas(hard=Limits(**limits))


def soft(**limits) -> Quotas:
    return Quotas(soft=Limits(**limits))


async def refused(part, request, method="BeginTurn") -> QuotaExceeded:
    with pytest.raises(QuotaExceeded) as caught:
        await getattr(part.servicer, method)(request)
    return caught.value


async def counts(registry) -> tuple[int, int]:
    """How many sessions and turns are stored."""
    (row,) = await registry.execute(
        "SELECT (SELECT count(*) FROM sessions), (SELECT count(*) FROM turns)"
    )
    return row


async def usage(part) -> pb.GetUsageResponse:
    return await part.servicer.GetUsage(pb.GetUsageRequest())


def unheld(request_id, outcome=OK, **more) -> pb.CompleteTurnRequest:
    return pb.CompleteTurnRequest(request_id=request_id, outcome=outcome, **more)


# -- rates ------------------------------------------------------------------------


async def test_a_rate_is_the_tenants_at_all_replicas_and_after_a_restart(registry):
    registry.quotas["a"] = hard(requests_per_second=ONE_AT_ONCE)
    one, two = registry.replica(), registry.replica()
    with tenant("a"):
        await one.servicer.BeginTurn(begin("r1", "s"))
        error = await refused(two, begin("r2", "s"))
        assert error.metadata == {"quota": "requests_per_second"}
        assert error.retry_after == pytest.approx(1 / ONE_AT_ONCE, rel=0.2)
        await refused(registry.replica(), begin("r3", "s"))
    with tenant("b"):
        await two.servicer.BeginTurn(begin("r2", "s"))


async def test_a_refused_turn_leaves_nothing_behind(registry):
    part = registry.replica()
    registry.quotas[""] = hard(requests_per_second=ONE_AT_ONCE, request_bytes=10)
    assert (await refused(part, begin("large", "s", size=11))).metadata["quota"] == "request_bytes"
    assert await counts(registry) == (0, 0)
    await part.servicer.BeginTurn(begin("first", "s", size=10))
    await refused(part, begin("second", "other"))
    await refused(part, begin("third"))
    assert await counts(registry) == (1, 1)


async def test_a_repetition_is_neither_charged_nor_refused(registry):
    registry.quotas[""] = hard(requests_per_second=ONE_AT_ONCE)
    one, two = registry.replica(), registry.replica()
    first = await one.servicer.BeginTurn(begin("r1", "s"))
    for part in (one, two, one):
        assert await part.servicer.BeginTurn(begin("r1", "s")) == first
    registry.quotas[""] = hard(requests_per_second=0.2)
    await one.servicer.BeginTurn(begin("r2", "s"))


async def test_of_a_burst_at_all_replicas_as_many_begin_as_may(registry):
    registry.quotas[""] = hard(requests_per_second=0.5, tokens_per_second=1000)
    parts = [registry.replica() for _ in range(2)]
    calls = [
        parts[i % 2].servicer.BeginTurn(begin(f"r{i}", f"s{i % 4}", tokens=1)) for i in range(12)
    ]
    since = registry.clock.monotonic()
    answers = await asyncio.gather(*calls, return_exceptions=True)
    begun = [a for a in answers if isinstance(a, pb.BeginTurnResponse)]
    assert 5 <= len(begun) <= 5 + (registry.clock.monotonic() - since) * 0.5
    assert sum(isinstance(a, QuotaExceeded) for a in answers) == 12 - len(begun)
    assert (await counts(registry))[1] == len(begun)


async def test_what_is_told_to_wait_for_is_enough(sqlite):
    sqlite.quotas[""] = hard(requests_per_second=2, tokens_per_second=100)
    part = sqlite.replica()
    for i in range(20):
        await part.servicer.BeginTurn(begin(f"r{i}", "s", tokens=50))
    error = await refused(part, begin("late", "s", tokens=50))
    sqlite.clock.advance(error.retry_after)
    await part.servicer.BeginTurn(begin("late", "s", tokens=50))
    await refused(part, begin("next", "s", tokens=50))


async def test_tokens_are_corrected_when_the_turn_is_over(sqlite):
    sqlite.quotas[""] = hard(tokens_per_second=100)
    one, two = sqlite.replica(), sqlite.replica()
    turn = await one.servicer.BeginTurn(begin("r1", "s", tokens=1000))
    await refused(two, begin("r2", "s", tokens=10))
    await one.servicer.CompleteTurn(complete(turn, prompt_tokens=300, completion_tokens=100))
    await one.servicer.CompleteTurn(complete(turn, prompt_tokens=300, completion_tokens=100))
    more = await two.servicer.BeginTurn(begin("r2", "s", tokens=600))
    await refused(one, begin("r3", "s", tokens=10))
    # It was more than it seemed: a debt.
    await two.servicer.CompleteTurn(complete(more, prompt_tokens=600, completion_tokens=400))
    assert (await refused(one, begin("r3", "s"))).retry_after == pytest.approx(4)
    sqlite.clock.advance(4)
    await one.servicer.BeginTurn(begin("r3", "s"))


async def test_what_has_drained_is_not_given_back(sqlite):
    """Else turns that are kept open would save up room for a burst."""
    sqlite.quotas[""] = hard(tokens_per_second=100)
    part = sqlite.replica()
    kept = await part.servicer.BeginTurn(begin("r1", "s", tokens=1000))
    sqlite.clock.advance(8)
    await part.servicer.BeginTurn(begin("r2", "s", tokens=700))
    await part.servicer.CompleteTurn(complete(kept, prompt_tokens=100))
    # Of its 1000 tokens 800 have drained by now, so 200 are given back.
    assert (await refused(part, begin("r3", "s", tokens=400))).retry_after == pytest.approx(1)
    sqlite.clock.advance(1)
    await part.servicer.BeginTurn(begin("r3", "s", tokens=400))
    await refused(part, begin("r4", "s", tokens=1))


async def test_leaving_early_is_not_cheaper(sqlite):
    sqlite.quotas[""] = hard(tokens_per_second=100)
    part = sqlite.replica()
    turn = await part.servicer.BeginTurn(begin("r1", "s", tokens=1000))
    await part.servicer.CompleteTurn(complete(turn, CANCELLED))
    assert (await refused(part, begin("r2", "s", tokens=100))).retry_after == pytest.approx(1)


async def test_what_was_used_before_there_was_a_limit_is_no_debt(sqlite):
    part = sqlite.replica()
    for i in range(3):
        turn = await part.servicer.BeginTurn(begin(f"r{i}", "s", tokens=1000))
        await part.servicer.CompleteTurn(complete(turn, prompt_tokens=10**6))
    late = await part.servicer.BeginTurn(begin("late", "s"))
    sqlite.quotas[""] = hard(tokens_per_second=1)
    turn = await part.servicer.BeginTurn(begin("r9", "s", tokens=5))
    await part.servicer.CompleteTurn(complete(late, prompt_tokens=10**6))
    await part.servicer.BeginTurn(begin("r10", "s", tokens=5))
    # Nor what is used while there is none again.
    sqlite.quotas.clear()
    turn = await part.servicer.BeginTurn(begin("free", "s"))
    await part.servicer.CompleteTurn(complete(turn, prompt_tokens=10**6))
    sqlite.clock.advance(20)
    sqlite.quotas[""] = hard(tokens_per_second=1)
    await part.servicer.BeginTurn(begin("r11", "s", tokens=10))


async def test_what_another_limit_let_in_is_no_debt(sqlite):
    """Whoever has a limit has a bucket for each, but pays into those that are limited only."""
    part = sqlite.replica()
    sqlite.quotas[""] = hard(requests_per_second=1)
    await part.servicer.BeginTurn(begin("r1", "s", tokens=10**6))
    sqlite.quotas[""] = hard(requests_per_second=1, tokens_per_second=1)
    await part.servicer.BeginTurn(begin("r2", "s", tokens=10))
    await refused(part, begin("r3", "s", tokens=1))


async def test_a_session_that_is_made_is_a_request(registry):
    registry.quotas["a"] = hard(requests_per_second=ONE_AT_ONCE)
    one, two = registry.replica(), registry.replica()
    create = pb.CreateSessionRequest(name="s1", model="m")
    with tenant("a"):
        assert (await one.servicer.CreateSession(create)).created
        # One that is there is only found.
        assert not (await two.servicer.CreateSession(create)).created
        more = pb.CreateSessionRequest(name="s2", model="m")
        for request, method in ((more, "CreateSession"), (begin("r1", "s1"), "BeginTurn")):
            error = await refused(two, request, method)
            assert error.metadata == {"quota": "requests_per_second"}
            assert error.retry_after == pytest.approx(1 / ONE_AT_ONCE, rel=0.2)
        assert await counts(registry) == (1, 0)


async def test_a_session_that_is_refused_is_not_charged(sqlite):
    sqlite.quotas[""] = hard(requests_per_second=0.2, sessions=1)  # two at once
    part = sqlite.replica()
    await part.servicer.CreateSession(pb.CreateSessionRequest(name="s1", model="m"))
    for name in ("s2", "s3"):
        more = pb.CreateSessionRequest(name=name, model="m")
        assert (await refused(part, more, "CreateSession")).metadata == {"quota": "sessions"}
    await part.servicer.BeginTurn(begin("r1", "s1"))
    await refused(part, begin("r2", "s1"))


# -- sessions ---------------------------------------------------------------------


async def test_a_tenant_has_as_many_sessions_as_it_may(registry):
    registry.quotas["a"] = hard(sessions=2)
    one, two = registry.replica(), registry.replica()
    with tenant("a"):
        await one.servicer.BeginTurn(begin("r1", "s1"))
        await two.servicer.CreateSession(pb.CreateSessionRequest(name="s2", model="m"))
        for request in (begin("r3", "s3"), begin("r4")):
            error = await refused(two, request)
            assert error.metadata == {"quota": "sessions"}
            assert error.retry_after
        create = pb.CreateSessionRequest(name="s3", model="m")
        await refused(one, create, "CreateSession")
        assert await counts(registry) == (2, 1)
        # Those that it has go on.
        await two.servicer.BeginTurn(begin("r5", "s1"))
        again = pb.CreateSessionRequest(name="s2", model="m")
        assert not (await one.servicer.CreateSession(again)).created
        await one.servicer.EndSession(pb.EndSessionRequest(name="s2"))
        await two.servicer.BeginTurn(begin("r3", "s3"))
    with tenant("b"):
        await one.servicer.BeginTurn(begin("r3", "s3"))


async def test_sessions_asked_for_at_once_are_not_more_than_it_may(registry):
    registry.quotas[""] = hard(sessions=3)
    parts = [registry.replica(), registry.replica()]
    calls = [parts[i % 2].servicer.BeginTurn(begin(f"r{i}", f"s{i // 2}")) for i in range(16)]
    answers = await asyncio.gather(*calls, return_exceptions=True)
    begun = [a for a in answers if isinstance(a, pb.BeginTurnResponse)]
    assert len({a.session.session_id for a in begun}) == 3
    assert sum(isinstance(a, QuotaExceeded) for a in answers) == 16 - len(begun)
    assert await counts(registry) == (3, len(begun))


# -- soft limits ------------------------------------------------------------------


async def test_beyond_a_soft_limit_a_turn_has_no_session(registry):
    registry.quotas[""] = soft(sessions=1)
    part = registry.replica()
    await part.servicer.BeginTurn(begin("r1", "s1"))
    assert await part.servicer.BeginTurn(begin("r2", "s2")) == pb.BeginTurnResponse(
        over_quota="sessions"
    )
    assert await counts(registry) == (1, 1)
    assert (await part.servicer.BeginTurn(begin("r3", "s1"))).turn == 2


async def test_a_turn_without_a_session_has_none_when_it_is_asked_for_again(registry):
    registry.quotas[""] = soft(sessions=1)
    one, two = registry.replica(), registry.replica()
    await one.servicer.BeginTurn(begin("r1", "s1"))
    over = await one.servicer.BeginTurn(begin("r2", "s2"))
    await one.servicer.EndSession(pb.EndSessionRequest(name="s1"))
    assert await two.servicer.BeginTurn(begin("r2", "s2")) == over
    with pytest.raises(InvalidField, match="request_id"):
        await two.servicer.BeginTurn(begin("r2", "another"))
    assert (await two.servicer.BeginTurn(begin("r3", "s2"))).turn == 1


async def test_a_turn_without_a_session_is_charged_and_corrected_too(sqlite):
    sqlite.quotas[""] = Quotas(
        soft=Limits(requests_per_second=ONE_AT_ONCE), hard=Limits(tokens_per_second=100)
    )
    part = sqlite.replica()
    turn = await part.servicer.BeginTurn(begin("r1", "s", tokens=100))
    await part.servicer.CompleteTurn(complete(turn, prompt_tokens=100))
    over = await part.servicer.BeginTurn(begin("r2", "s", tokens=900))
    assert over.over_quota == "requests_per_second"
    assert await part.servicer.BeginTurn(begin("r2", "s", tokens=900)) == over
    await refused(part, begin("r3", "s", tokens=100))
    done = unheld("r2", prompt_tokens=900, completion_tokens=300, tokens_reused=0)
    for _ in range(2):
        answer = await part.servicer.CompleteTurn(done)
        assert not answer.HasField("session")
    assert (await refused(part, begin("r3", "s", tokens=100))).retry_after == pytest.approx(4)
    used = await usage(part)
    assert (used.turns, used.prompt_tokens, used.completion_tokens) == (2, 1000, 300)


async def test_only_its_tenant_completes_a_turn_without_a_session(registry):
    registry.quotas["a"] = soft(request_bytes=1)
    part = registry.replica()
    with tenant("a"):
        assert (await part.servicer.BeginTurn(begin("r", "s", size=2))).over_quota
    for name, request_id in (("b", "r"), ("a", "unknown")):
        with tenant(name), pytest.raises(NotFound):
            await part.servicer.CompleteTurn(unheld(request_id))
    with pytest.raises(InvalidField, match="request_id"):
        await part.servicer.CompleteTurn(unheld("r", session_id="s", turn=1))
    with tenant("a"):
        await part.servicer.CompleteTurn(unheld("r", CANCELLED))


async def test_turns_without_a_session_are_forgotten(sqlite):
    sqlite.quotas[""] = soft(request_bytes=1)
    part = sqlite.replica()
    await part.servicer.BeginTurn(begin("r", "s", size=2))
    sqlite.clock.advance(599)
    await part.service.sweep()
    assert await sqlite.execute("SELECT count(*) FROM unheld_turns") == [(1,)]
    sqlite.clock.advance(2)
    await part.service.sweep()
    assert await sqlite.execute("SELECT count(*) FROM unheld_turns") == [(0,)]


async def test_create_session_knows_hard_limits_only(registry):
    soft_ones = Limits(sessions=1, requests_per_second=ONE_AT_ONCE)
    registry.quotas[""] = Quotas(soft=soft_ones, hard=Limits(sessions=2))
    part = registry.replica()
    for name in ("s1", "s2"):
        await part.servicer.CreateSession(pb.CreateSessionRequest(name=name, model="m"))
    await refused(part, pb.CreateSessionRequest(name="s3", model="m"), "CreateSession")
