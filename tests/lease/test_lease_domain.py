"""The rules by themselves: no storage, no clock."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kvplane.kernel.errors import IllegalTransition
from kvplane.lease.domain import (
    LeaseConfig,
    begin_read,
    clamp_ttl,
    expire,
    free,
    grant,
    hold_deadline,
    hold_until,
    lose_holder,
    lose_owner,
    newest_readable,
    release,
    renewed_deadline,
    revoke,
    superseded,
    withdraw,
)
from kvplane.lease.values import (
    Change,
    Holder,
    Lease,
    LeaseState,
    Outcome,
    Ownership,
    OwnershipState,
    Refusal,
    micros,
)

CONFIG = LeaseConfig()
SLACK = micros(CONFIG.sweep_slack_s)
HOLDER = Holder("p1", 1, "c")
NOW = 1_000_000_000


def owned(**fields) -> Ownership:
    plain = Ownership(
        ownership_id="own-1", tenant_id="t", session_id="s", turn=1, worker_id="d1", epoch=1,
        engine_id="e", request_id="r", num_tokens=100, block_size=16, compatibility="c",
        cuttable=True, for_decode=False, reported_us=NOW, state=OwnershipState.HELD,
        hold_deadline_us=NOW + micros(480),
    )  # fmt: skip
    return replace(plain, **fields)


def granted(own: Ownership, now_us: int = NOW, **fields) -> Change:
    options = {"ttl_us": micros(10), "min_tokens": 0, "begin_read": False} | fields
    change = grant(own, "lease-1", HOLDER, now_us=now_us, config=CONFIG, **options)
    assert isinstance(change, Change)
    return change


def reading(own: Ownership) -> tuple[Ownership, Lease]:
    change = granted(own, begin_read=True)
    assert change.lease is not None
    return change.ownership, change.lease


def test_a_hold_is_never_later_than_its_owner_meant():
    assert hold_deadline(now_us=100, sent_by_us=60, hold_us=50) == 110
    assert hold_deadline(now_us=100, sent_by_us=160, hold_us=50) == 150


def test_ttls_are_clamped():
    assert clamp_ttl(0, CONFIG) == micros(10)
    assert clamp_ttl(1, CONFIG) == micros(1)
    assert clamp_ttl(micros(3600), CONFIG) == micros(60)
    assert clamp_ttl(micros(5), CONFIG) == micros(5)


def test_a_lease_ends_before_its_hold_by_the_margin():
    change = granted(owned(hold_deadline_us=NOW + micros(5)))
    assert change.lease.deadline_us == NOW + micros(3)


def test_the_exact_second_in_which_a_hold_becomes_too_short():
    enough = owned(hold_deadline_us=NOW + micros(3))
    assert granted(enough).lease.deadline_us == NOW + micros(1)
    short = replace(enough, hold_deadline_us=NOW + micros(3) - 1)
    options = {"ttl_us": micros(10), "min_tokens": 0, "begin_read": False}
    refused = grant(short, "l", HOLDER, now_us=NOW, config=CONFIG, **options)
    assert refused is Refusal.EXPIRING


@pytest.mark.parametrize(
    ("state", "refusal"),
    [
        (OwnershipState.LEASED, Refusal.ALREADY_LEASED),
        (OwnershipState.CONSUMED, Refusal.NOT_HELD),
        (OwnershipState.EXPIRED, Refusal.NOT_HELD),
        (OwnershipState.RELEASED, Refusal.NOT_HELD),
        (OwnershipState.LOST, Refusal.OWNER_LOST),
    ],
)
def test_only_a_held_ownership_is_granted(state: OwnershipState, refusal: Refusal):
    options = {"ttl_us": micros(10), "min_tokens": 0, "begin_read": False}
    answer = grant(owned(state=state), "l", HOLDER, now_us=NOW, config=CONFIG, **options)
    assert answer is refusal


def test_the_newest_held_is_preferred_to_a_newer_leased():
    old = owned(ownership_id="a", turn=1)
    new = owned(ownership_id="b", turn=2)
    leased = owned(ownership_id="c", turn=3, state=OwnershipState.LEASED)
    over = owned(ownership_id="d", turn=4, hold_deadline_us=NOW)
    assert newest_readable([new, old, leased, over], NOW) == new
    assert newest_readable([leased, over], NOW) == leased
    assert newest_readable([over], NOW) is None


def test_what_a_newer_turn_supersedes():
    old = owned(ownership_id="a", turn=1)
    leased = owned(ownership_id="b", turn=1, state=OwnershipState.LEASED)
    for_decode = owned(ownership_id="c", turn=1, for_decode=True)
    newest = [owned(ownership_id=name, turn=2) for name in "de"]
    assert superseded([old, leased, for_decode, *newest]) == [old]
    assert superseded(newest) == []


def test_a_read_that_began_is_never_granted_to_another():
    own, lease = reading(owned())
    end = lease.deadline_us + SLACK
    change = expire(own, lease, end, CONFIG)
    assert change.ownership.state is OwnershipState.RELEASED
    assert change.free_now
    assert expire(own, lease, end - 1, CONFIG) is None


def test_a_slow_readers_clock_gets_no_more_than_the_slack():
    """The holder may not know yet that its lease is over; nobody tells it otherwise."""
    own, lease = reading(owned())
    assert SLACK > 0
    for ending in (
        lease,
        revoke(own, lease, NOW + 1).lease,
        lose_holder(own, lease, NOW + 1).lease,
    ):
        assert expire(own, ending, lease.deadline_us + SLACK - 1, CONFIG) is None
        assert expire(own, ending, lease.deadline_us + SLACK, CONFIG).free_now
        assert not ending.usable(lease.deadline_us)
    unread = granted(owned())
    over = expire(unread.ownership, unread.lease, unread.lease.deadline_us, CONFIG)
    assert over.ownership.state is OwnershipState.HELD


def test_a_draining_read_frees_at_its_end_whatever_ended_it():
    own, lease = reading(owned())
    revoked = revoke(own, lease, NOW + 1)
    assert (revoked.free_now, revoked.ownership) == (False, own)
    over = expire(own, revoked.lease, lease.deadline_us + SLACK, CONFIG)
    assert (over.free_now, over.ownership.state) == (True, OwnershipState.RELEASED)
    lost = lose_holder(own, lease, NOW + 1)
    assert (lost.lease.state, lost.lease.draining) == (LeaseState.LOST, True)
    assert expire(own, lost.lease, lease.deadline_us + SLACK, CONFIG).free_now


def test_an_owner_that_was_lost_is_told_when_its_reader_is_done():
    """It may be back: what it said it holds was spared while it was read."""
    own, lease = reading(owned())
    lost = lose_owner(own, lease, NOW + 1)
    assert lost.ownership.state is OwnershipState.LOST
    over = expire(lost.ownership, lost.lease, lease.deadline_us + SLACK, CONFIG)
    assert (over.free_now, over.ownership.lease_id) == (True, "")


def test_an_unused_lease_after_the_hold_gives_nothing_back():
    own, lease = reading(owned(hold_deadline_us=NOW + micros(5)))
    change = release(own, lease, Outcome.UNUSED, NOW + micros(5))
    assert change.ownership.state is OwnershipState.EXPIRED


def test_a_hold_never_moves_back_nor_revives():
    own = owned()
    assert hold_until(own, own.hold_deadline_us - 1) == own
    assert hold_until(own, own.hold_deadline_us + 1).hold_deadline_us > own.hold_deadline_us
    ended = owned(state=OwnershipState.EXPIRED)
    assert hold_until(ended, own.hold_deadline_us + 1) == ended


ACTIONS = (
    "grant", "begin", "renew", "consumed", "unused", "revoke", "free", "withdraw", "expire",
    "lose_owner", "lose_holder", "hold",
)  # fmt: skip


@settings(max_examples=400, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(ACTIONS), st.integers(0, 15)), max_size=40))
def test_no_order_of_events_breaks_an_invariant(events: list[tuple[str, int]]):
    now, own = NOW, owned(hold_deadline_us=NOW + micros(40))
    leases: dict[str, Lease] = {}
    order_to_free = False
    for number, (action, step) in enumerate(events):
        now += micros(step)
        before = own
        current = leases.get(own.lease_id)
        newest = leases.get(f"lease-{own.fencing_token}")
        change = _act(action, own, current, newest, number, now)
        if change is not None:
            own = change.ownership
            if change.lease is not None:
                leases[change.lease.lease_id] = change.lease
            order_to_free |= change.free_now
        _check(before, own, leases, order_to_free, now)


def _act(action, own, current, newest, number, now) -> Change | None:
    if action == "grant":
        token = own.fencing_token + 1
        answer = grant(
            own, f"lease-{token}", HOLDER, ttl_us=micros(10), min_tokens=0,
            begin_read=bool(number % 2), now_us=now, config=CONFIG,
        )  # fmt: skip
        return answer if isinstance(answer, Change) else None
    if action == "hold":
        return Change(hold_until(own, now + micros(30)))
    if action == "expire":
        return expire(own, current, now, CONFIG)
    if action in ("free", "withdraw", "lose_owner"):
        act = {"free": free, "withdraw": withdraw, "lose_owner": lose_owner}
        return act[action](own, current, now)
    if newest is None:
        return None
    try:
        if action == "begin":
            lease = begin_read(
                own, newest, HOLDER, newest.fencing_token, ttl_us=micros(10), now_us=now,
                config=CONFIG,
            )  # fmt: skip
            return Change(own, lease)
        if action == "revoke":
            return revoke(own, newest, now)
    except IllegalTransition:
        return None
    if action == "renew" and newest.usable(now):
        deadline = renewed_deadline(newest, own.hold_deadline_us, micros(10), now, CONFIG)
        assert deadline >= newest.deadline_us
        return Change(own, replace(newest, deadline_us=deadline))
    if action == "lose_holder":
        return lose_holder(own, newest, now) if newest.live else None
    if action in ("consumed", "unused"):
        return release(own, newest, Outcome[action.upper()], now)
    return None


def _check(before: Ownership, own: Ownership, leases: dict[str, Lease], freed: bool, now: int):
    open_leases = [lease for lease in leases.values() if lease.live or lease.draining]
    assert len(open_leases) <= 1
    assert [lease.lease_id for lease in open_leases] == [own.lease_id] * bool(own.lease_id)
    assert (own.state is OwnershipState.LEASED) == (own.live and bool(own.lease_id))
    assert own.fencing_token >= before.fencing_token
    if not before.live:
        assert own.state is before.state
    for lease in open_leases:
        assert lease.deadline_us <= own.hold_deadline_us - micros(CONFIG.margin_s)
        # Nothing is freed under a read.
        if own.live:
            assert not freed
    assert bool(own.ended_us) == (not own.live)
    assert now >= own.ended_us


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"ttl_s": 0.5}, "ttl_s"),
        ({"ttl_s": 100}, "ttl_s"),
        ({"sweep_slack_s": 2.5}, "sweep_slack_s"),
        ({"min_ttl_s": 0}, "min_ttl_s"),
        ({"margin_s": -1}, "margin_s"),
        ({"sweep_rows": 0}, "sweep_rows"),
    ],
)
def test_a_setting_that_makes_no_sense_is_named(fields: dict, named: str):
    with pytest.raises(ValueError, match=f"^{named}: "):
        LeaseConfig(**fields)
