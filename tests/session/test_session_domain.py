"""The registry's rules, without storage."""

from dataclasses import fields, replace

import pytest
from kvplane.session import domain
from kvplane.session.domain import (
    BeginTurn,
    Candidate,
    CompleteTurn,
    Session,
    SessionConfig,
    SessionState,
    Turn,
    TurnOutcome,
)

CONFIG = SessionConfig()
T0 = 1_800_000_000_000_000
SECOND = 1_000_000


def fresh() -> Session:
    return domain.new_session("t", "s", "name", "m", T0, CONFIG)


def opened(session: Session, now_us: int = T0, others: int = 0) -> tuple[Session, Turn]:
    return domain.open_turn(session, BeginTurn("r", "m", "name"), now_us, others, CONFIG)


def closed(
    session: Session, turn: Turn, outcome=TurnOutcome.OK, now_us: int = T0, **more
) -> Session:
    report = CompleteTurn("s", turn.turn, outcome, **more)
    return domain.complete_turn(session, turn, report, now_us, CONFIG)[0]


def test_turns_count_from_one_and_postpone_the_expiry():
    session, first = opened(fresh(), T0 + 5)
    session, second = opened(session, T0 + 7)
    assert (first.turn, second.turn) == (1, 2)
    assert session.turns == 2
    assert session.last_turn_us == T0 + 7
    assert session.due_us == T0 + 7 + 24 * 3600 * SECOND


@pytest.mark.parametrize(
    ("outcome", "later_us", "expected"),
    [
        (TurnOutcome.OK, 0, True),
        (TurnOutcome.OK, 2 * SECOND - 1, True),
        (TurnOutcome.OK, 2 * SECOND, False),
        (TurnOutcome.FAILED, 0, False),
        (TurnOutcome.CANCELLED, 0, False),
    ],
)
def test_previous_completed_means_well_and_just_now(outcome, later_us, expected):
    session, turn = opened(fresh())
    session = closed(session, turn, outcome)
    assert opened(session, T0 + later_us)[1].previous_completed is expected


def test_previous_completed_is_about_the_turn_just_before():
    session, first = opened(fresh())
    session, _second = opened(session)
    session = closed(session, first)
    assert opened(session)[1].previous_completed is False
    assert opened(fresh())[1].previous_completed is False


def test_a_turn_that_ended_well_moves_the_session():
    session, turn = opened(fresh())
    session = closed(
        session,
        turn,
        prompt_tokens=100,
        tokens_reused=60,
        prefill_worker_id="p1",
        decode_worker_id="d1",
        now_us=T0 + 9,
    )
    assert (session.tokens_reused, session.tokens_recomputed) == (60, 40)
    assert (session.last_prefill_worker_id, session.last_decode_worker_id) == ("p1", "d1")
    assert session.last_turn_us == T0 + 9
    assert session.due_us == T0 + 9 + 24 * 3600 * SECOND


@pytest.mark.parametrize("outcome", [TurnOutcome.FAILED, TurnOutcome.CANCELLED])
def test_half_a_turn_is_counted_but_moves_nothing(outcome):
    session, turn = opened(fresh())
    session = closed(session, turn, prefill_worker_id="p1", decode_worker_id="d1")
    session, turn = opened(session)
    report = CompleteTurn(
        "s", 2, outcome, prompt_tokens=10, decode_worker_id="d2", history_digest=b"h" * 16
    )
    assert not domain.records_history(session, report)
    session, turn = domain.complete_turn(session, turn, report, T0, CONFIG)
    assert (session.last_prefill_worker_id, session.last_decode_worker_id) == ("p1", "d1")
    assert session.tokens_recomputed == 10
    assert session.histories == 0
    assert turn.outcome is outcome


def test_an_older_turn_that_completes_later_does_not_move_the_session_back():
    session, first = opened(fresh())
    session, second = opened(session)
    session = closed(session, second, decode_worker_id="new")
    session = closed(session, first, decode_worker_id="old", prompt_tokens=5)
    assert session.last_decode_worker_id == "new"
    assert session.tokens_recomputed == 5


def test_a_turn_that_outlives_its_session_has_its_blocks_freed_again():
    session, turn = opened(fresh())
    session = replace(domain.end(session, SessionState.ENDED, T0, CONFIG), free_due_us=None)
    after = closed(session, turn, now_us=T0 + 1, prompt_tokens=7, decode_worker_id="d")
    assert after.state is SessionState.ENDED
    assert after.due_us == session.due_us
    assert after.tokens_recomputed == 7
    assert after.last_decode_worker_id == ""
    assert after.free_due_us == T0 + 1 + 2 * SECOND


def test_who_ends_a_session_frees_first_and_the_sweeper_frees_expired_ones_at_once():
    ended = domain.end(fresh(), SessionState.ENDED, T0, CONFIG)
    expired = domain.end(fresh(), SessionState.EXPIRED, T0, CONFIG)
    assert ended.free_due_us == T0 + 5 * SECOND
    assert expired.free_due_us == T0


def test_the_version_grows_even_when_the_clock_does_not():
    session, turn = opened(fresh(), T0 - 10)
    assert session.version == T0 + 1
    session = closed(session, turn, now_us=T0 - 10)
    assert session.version == T0 + 2
    assert domain.end(session, SessionState.ENDED, T0 + 99, CONFIG).version == T0 + 99


def test_the_second_answer_is_the_first_one_whatever_came_after():
    session, turn = opened(fresh())
    session = closed(session, turn, prompt_tokens=9, tokens_reused=3, decode_worker_id="d1")
    before, turn = opened(session, T0 + 1, others=4)
    first = domain.begun(before, turn)
    after = closed(before, turn, prompt_tokens=50, decode_worker_id="d2")
    after, _ = opened(after, T0 + 3)
    after = domain.end(after, SessionState.ENDED, T0 + 4, CONFIG)
    again = domain.begun_again(after, turn, CONFIG)
    assert again.replayed
    answered = ("turn", "previous_completed", "open_turns")
    assert [getattr(again, f) for f in answered] == [getattr(first, f) for f in answered]
    hidden = {"version", "newest_outcome", "newest_completed_us", "last_ok_turn", "free_due_us"}
    shown = {field.name for field in fields(Session)} - hidden
    for name in sorted(shown):
        assert getattr(again.session, name) == getattr(first.session, name), name


def test_keys_that_differ_in_any_part_have_different_digests():
    requests = [
        BeginTurn("r", "m"),
        BeginTurn("r", "m", "n"),
        BeginTurn("r", "mn"),
        BeginTurn("r", "", "mn"),
        BeginTurn("r", "m", history=(b"a" * 16,)),
        BeginTurn("r", "m", history=(b"a" * 16, b"b" * 16)),
        BeginTurn("r", "m", history=(b"b" * 16, b"a" * 16)),
    ]
    assert len({domain.key_digest(request) for request in requests}) == len(requests)
    assert domain.key_digest(BeginTurn("x", "m", "n", (b"a" * 16,))) == domain.key_digest(
        BeginTurn("y", "m", "n")
    )


def test_the_longest_known_history_wins():
    known = {b"short": [Candidate("a", 1, 1, 9)], b"long": [Candidate("b", 5, 1, 1)]}
    assert domain.choose([b"longest", b"long", b"short"], known, {}) == "b"
    assert domain.choose([b"other"], known, {}) is None
    assert domain.choose([], known, {}) is None


def test_of_equal_histories_those_not_continued_come_first_then_the_newest():
    continued = Candidate("continued", turns=3, recorded_turn=2, recorded_us=30)
    old = Candidate("old", turns=1, recorded_turn=1, recorded_us=10)
    new = Candidate("new", turns=1, recorded_turn=1, recorded_us=20)
    known = {b"h": [continued, old, new]}
    assert domain.choose([b"h"], known, {}) == "new"
    assert domain.choose([b"h"], known, {"new": 1}) == "old"
    assert domain.choose([b"h"], known, {"new": 1, "old": 1}) == "continued"
