"""One read: every transition, and time."""

import pytest
from kvplane.worker import reads
from kvplane.worker.reads import Outcome, Pending, Permit, Phase, Read, Refused

PERMIT = Permit(64, {"remote_num_tokens": 64}, "lease-1")


def permitted(now: float = 0.0, valid_until: float = 10.0) -> Read:
    return reads.granted(reads.begin(now, 0.3), PERMIT, 7, valid_until, now)


def test_it_waits_and_then_computes() -> None:
    read = reads.begin(100.0, 0.3)
    assert reads.answer(reads.at(read, 100.29)) == Pending()
    assert reads.answer(reads.at(read, 100.3)) == Refused("no answer in time")


def test_a_permit_counts_from_when_the_request_was_sent() -> None:
    read = permitted(valid_until=10.0)
    assert reads.answer(read) == PERMIT
    assert reads.answer(reads.at(read, 9.99)) == PERMIT
    assert isinstance(reads.answer(reads.at(read, 10.0)), Refused)


def test_a_grant_after_the_wait_is_not_taken() -> None:
    read = reads.granted(reads.begin(0.0, 0.3), PERMIT, 7, 10.0, now=0.31)
    assert read.phase is Phase.REFUSED
    assert read.lease_id == ""


def test_a_grant_that_has_ended_already_is_no_permit() -> None:
    assert permitted(now=0.0, valid_until=0.0).phase is Phase.REFUSED


def test_a_read_starts_only_with_a_living_permit() -> None:
    assert reads.started(permitted(), 9.0, 30.0).phase is Phase.READING
    assert reads.started(permitted(), 10.0, 30.0).phase is Phase.REFUSED
    assert reads.started(reads.begin(0.0, 0.3), 0.1, 30.0).phase is Phase.PENDING


def test_renewal_extends_and_never_shortens() -> None:
    read = reads.started(permitted(), 1.0, 30.0)
    assert reads.renewed(read, 13.0).valid_until == 13.0
    assert reads.renewed(read, 5.0).valid_until == 10.0


def test_renewal_never_revives() -> None:
    lost = reads.at(reads.started(permitted(), 1.0, 30.0), 10.0)
    assert lost.phase is Phase.LOST
    assert reads.renewed(lost, 99.0) is lost


def test_a_read_that_takes_too_long_is_lost_though_its_lease_lives() -> None:
    read = reads.renewed(reads.started(permitted(), 1.0, 5.0), 99.0)
    assert reads.at(read, 5.9).phase is Phase.READING
    assert reads.at(read, 6.0).phase is Phase.LOST


def test_losing_the_lease_before_the_read_means_compute() -> None:
    read = reads.lost(permitted(), "revoked")
    assert reads.answer(read) == Refused("revoked")


@pytest.mark.parametrize(
    ("read", "sent", "failed", "outcome"),
    [
        (reads.begin(0.0, 0.3), False, False, None),
        (reads.refused_at_once("away"), False, False, None),
        (permitted(), False, False, Outcome.UNUSED),
        (permitted(), True, False, Outcome.CONSUMED),
        (reads.lost(permitted(), "x"), False, False, Outcome.UNUSED),
        (reads.started(permitted(), 1.0, 30.0), True, False, Outcome.CONSUMED),
        # Once started, something may have been sent, whatever the caller says.
        (reads.started(permitted(), 1.0, 30.0), False, False, Outcome.CONSUMED),
        (reads.started(permitted(), 1.0, 30.0), True, True, Outcome.LAPSE),
        (reads.at(reads.started(permitted(), 1.0, 30.0), 11.0), True, False, Outcome.CONSUMED),
    ],
)
def test_what_a_lease_is_given_back_with(
    read: Read, sent: bool, failed: bool, outcome: Outcome | None
) -> None:
    done, given = reads.finished(read, sent=sent, failed=failed)
    assert given is outcome
    assert done.phase is Phase.DONE
    assert reads.finished(done, sent=sent) == (done, None)
