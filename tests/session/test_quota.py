"""The arithmetic of limits, without a database."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvplane.kernel.errors import QuotaExceeded
from kvplane.kernel.limits import NO_QUOTAS, Limits, Quotas
from kvplane.runtime.status import to_status
from kvplane.session.domain import CompleteTurn, TurnOutcome
from kvplane.session.quota import (
    BURST_S,
    Ask,
    OverQuota,
    Used,
    charged,
    concerns_turns,
    drained,
    judge,
    judge_sessions,
    settled,
)
from kvplane.session.usage import correction

SECOND = 1_000_000
ONE = Ask()


def hard(**limits) -> Quotas:
    return Quotas(hard=Limits(**limits))


def soft(**limits) -> Quotas:
    return Quotas(soft=Limits(**limits))


def take(used: Used, quotas: Quotas, ask: Ask = ONE) -> Used:
    assert judge(used, quotas, ask) is None
    return charged(used, ask, held=True)


def refused(used: Used, quotas: Quotas, ask: Ask = ONE) -> QuotaExceeded:
    verdict = judge(used, quotas, ask)
    assert isinstance(verdict, QuotaExceeded)
    return verdict


def test_ten_seconds_worth_may_come_at_once_and_then_one_for_each_that_drains():
    quotas, used = hard(requests_per_second=2), Used(at_us=0)
    for _ in range(20):
        used = take(used, quotas)
    error = refused(used, quotas)
    assert error.metadata == {"quota": "requests_per_second"}
    assert error.retry_after == pytest.approx(0.5)
    assert "requests_per_second" in error.message
    used = take(drained(used, quotas, SECOND // 2), quotas)
    refused(used, quotas)


def test_a_slow_rate_still_lets_one_request_in():
    quotas = hard(requests_per_second=0.01)
    used = take(Used(at_us=0), quotas)
    assert refused(used, quotas).retry_after == pytest.approx(100)
    take(drained(used, quotas, 100 * SECOND), quotas)


def test_nobody_is_told_to_wait_for_longer_than_a_message_can_say():
    quotas = hard(requests_per_second=1e-310)
    error = refused(take(Used(at_us=0), quotas), quotas)
    assert error.retry_after == 366 * 86_400
    to_status(error)


def test_tokens_are_charged_by_the_estimate_and_a_debt_is_waited_for():
    quotas = hard(tokens_per_second=100)
    used = take(Used(at_us=0), quotas, Ask(tokens=900))
    assert refused(used, quotas, Ask(tokens=200)).retry_after == pytest.approx(1)
    used = settled(used, held=600, unheld=0)  # it was 1500
    assert used.hard_tokens == 1500
    # Without an estimate nothing is charged, but a debt is one all the same.
    assert refused(used, quotas).retry_after == pytest.approx(5)
    take(drained(used, quotas, 5 * SECOND), quotas)


def test_what_is_larger_than_the_bucket_waits_until_it_is_empty_and_leaves_a_debt():
    quotas, large = hard(tokens_per_second=10), Ask(tokens=1000)
    used = take(Used(at_us=0), quotas, large)
    assert refused(used, quotas, large).retry_after == pytest.approx(100)
    take(drained(used, quotas, 100 * SECOND), quotas, large)


def test_of_two_rates_the_longer_wait_is_told():
    quotas = hard(requests_per_second=0.1, tokens_per_second=1)
    used = take(Used(at_us=0), quotas, Ask(tokens=100))
    error = refused(used, quotas, Ask(tokens=5))
    assert (error.metadata["quota"], error.retry_after) == ("tokens_per_second", 95)


def test_a_large_request_is_refused_for_good():
    error = refused(Used(at_us=0), hard(request_bytes=10), Ask(size_bytes=11))
    assert (error.metadata, error.retry_after) == ({"quota": "request_bytes"}, None)
    take(Used(at_us=0), hard(request_bytes=10), Ask(size_bytes=10))


@pytest.mark.parametrize("name", ["requests_per_second", "tokens_per_second", "request_bytes"])
def test_beyond_a_soft_limit_there_is_no_session(name):
    quotas, ask = soft(**{name: 1}), Ask(tokens=10, size_bytes=11)
    used = Used(at_us=0, soft_requests=10, soft_tokens=10)
    assert judge(used, quotas, ask) == OverQuota(name)


def test_turns_without_a_session_do_not_keep_a_tenant_beyond_its_soft_limit():
    quotas, used = soft(requests_per_second=0.1), Used(at_us=0)
    used = take(used, quotas)
    for _ in range(100):
        assert judge(used, quotas, ONE) == OverQuota("requests_per_second")
        used = charged(used, ONE, held=False)
    assert used.hard_requests == 101
    take(drained(used, quotas, 10 * SECOND), quotas)


def test_a_hard_limit_goes_before_a_soft_one():
    quotas = Quotas(soft=Limits(sessions=1), hard=Limits(sessions=2))
    assert judge_sessions(0, quotas) is None
    assert judge_sessions(1, quotas) == OverQuota("sessions")
    verdict = judge_sessions(2, quotas)
    assert isinstance(verdict, QuotaExceeded)
    assert verdict.metadata == {"quota": "sessions"}
    assert verdict.retry_after
    assert judge_sessions(10**9, NO_QUOTAS) is None


def test_limits_on_what_is_held_are_none_on_turns():
    assert not concerns_turns(Quotas(Limits(held_tokens=1), Limits(held_blocks=1, live_leases=1)))
    for name in ("sessions", "requests_per_second", "tokens_per_second", "request_bytes"):
        assert concerns_turns(hard(**{name: 1}))
        assert concerns_turns(soft(**{name: 1}))


@pytest.mark.parametrize(
    ("charge", "outcome", "used", "expected"),
    [
        (None, TurnOutcome.OK, 50, 0),  # no limit when it began
        (40, TurnOutcome.OK, 50, 10),
        (40, TurnOutcome.OK, 30, -10),
        (40, TurnOutcome.OK, 0, 0),  # an engine that does not say
        (40, TurnOutcome.CANCELLED, 0, 0),
        (40, TurnOutcome.CANCELLED, 30, 0),
        (40, TurnOutcome.FAILED, 50, 10),
        (0, TurnOutcome.OK, 50, 50),
    ],
)
def test_only_a_turn_that_ended_well_is_given_back_what_it_did_not_use(
    charge, outcome, used, expected
):
    report = CompleteTurn("s", 1, outcome, prompt_tokens=used // 2, completion_tokens=used // 2)
    assert correction(charge, report, 0) == expected


def test_what_has_drained_is_not_given_back():
    report = CompleteTurn("s", 1, TurnOutcome.OK, prompt_tokens=10)
    assert [correction(40, report, drained) for drained in (5, 10, 10.5, 39, 50)] == [
        -30,
        -30,
        -29,
        -1,
        0,
    ]
    assert correction(5, report, 100) == 5


@given(
    rate=st.floats(0.01, 1000),
    gaps_ms=st.lists(st.integers(0, 20_000), min_size=1, max_size=60),
    tokens=st.lists(st.integers(0, 3000), min_size=60, max_size=60),
)
def test_no_way_of_asking_gets_more_than_the_rate_and_the_burst(rate, gaps_ms, tokens):
    quotas = hard(requests_per_second=rate, tokens_per_second=rate)
    used, now_us, let_in, token_sum = Used(at_us=0), 0, 0, 0
    for gap, count in zip(gaps_ms, tokens, strict=False):
        now_us += gap * 1000
        used = drained(used, quotas, now_us)
        verdict = judge(used, quotas, Ask(tokens=count))
        if verdict is None:
            used = charged(used, Ask(tokens=count), held=True)
            let_in += 1
            token_sum += count
        else:
            # When it says so, it fits, if nobody else comes first.
            later = now_us + round(verdict.retry_after * SECOND) + 1
            assert judge(drained(used, quotas, later), quotas, Ask(tokens=count)) is None
    seconds = now_us / SECOND
    assert let_in <= max(1, rate * BURST_S) + rate * seconds + 0.001
    assert token_sum <= rate * (BURST_S + seconds) + max(tokens) + 0.001


@given(st.integers(-(10**9), 10**9), st.integers(-(10**9), 10**9))
def test_a_bucket_is_never_less_than_empty(held, unheld):
    used = settled(Used(0, 1, 2, 3, 4), held=held, unheld=unheld)
    assert min(used.soft_tokens, used.hard_tokens) >= 0
