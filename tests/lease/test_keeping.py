"""Who loses what when too much is held: the choice by itself."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvplane.lease.domain import LeaseConfig
from kvplane.lease.keeping import (
    Amount,
    Bound,
    Hold,
    may_go,
    over_quota,
    short_of_blocks,
    worth,
)
from kvplane.lease.values import micros

CONFIG = LeaseConfig()
NOW = 1_800_000_000_000_000


def hold(ident: str, tenant: str = "t", *, tokens: int = 160, blocks: int = 10, age: float = 0,
         leased: bool = False, for_decode: bool = False) -> Hold:  # fmt: skip
    return Hold(ident, tenant, "d1", Amount(tokens, blocks), NOW - micros(age), leased, for_decode)


def quota(holds: list[Hold], *, tokens: int = 0, blocks: int = 0) -> list[str]:
    bound = Bound(tenant_id="t", tokens=tokens, blocks=blocks)
    return [each.ownership_id for each in over_quota(holds, bound, NOW, CONFIG)]


def pressure(holds: list[Hold], most: int, **beyond: Amount) -> list[str]:
    chosen = short_of_blocks(holds, most, beyond, NOW, CONFIG)
    return [each.ownership_id for each in chosen]


def test_the_cheapest_goes_first():
    """Tokens saved for each block, and half as likely a return each 120 s."""
    holds = [
        hold("fresh", tokens=160), hold("two minutes", tokens=160, age=120),
        hold("dense", tokens=330, age=120), hold("sparse", tokens=70),
    ]  # fmt: skip
    assert quota(holds, blocks=1) == ["sparse", "two minutes", "fresh", "dense"]
    assert quota(holds, blocks=20) == ["sparse", "two minutes"]
    assert quota(holds, tokens=500) == ["sparse", "two minutes"]
    assert quota(holds, blocks=40) == []
    assert quota(holds) == []


def test_one_large_hold_spares_what_was_smaller():
    holds = [hold("small", blocks=1, tokens=1), hold("large", blocks=50, tokens=800)]
    assert quota(holds, blocks=10) == ["large"]
    # For tokens it does not do.
    assert quota(holds, blocks=10, tokens=800) == ["large"]
    assert quota(holds, tokens=800) == ["small"]


def test_who_holds_most_loses_first():
    burst = [hold(f"burst{n}", "burst", blocks=1, tokens=16) for n in range(100)]
    small = [hold(f"small{n}", "small", blocks=1, tokens=16, age=600) for n in range(10)]
    chosen = pressure(burst + small, 60)
    assert len(chosen) == 50
    assert all(ident.startswith("burst") for ident in chosen)
    # Down to an equal share, both lose.
    chosen = pressure(burst + small, 12)
    assert sum(ident.startswith("small") for ident in chosen) == 4


def test_beyond_a_soft_limit_comes_before_a_large_share():
    large = [hold(f"large{n}", "large") for n in range(10)]
    beyond = [hold(f"beyond{n}", "beyond") for n in range(3)]
    chosen = pressure(large + beyond, 100, beyond=Amount(blocks=15))
    assert sorted(chosen) == ["beyond0", "beyond1", "large0"]


def test_reads_and_hand_overs_are_left_alone():
    holds = [
        hold("read", leased=True), hold("handed over", for_decode=True, age=9),
        hold("forgotten", for_decode=True, age=11), hold("old", age=1000),
    ]  # fmt: skip
    assert set(quota(holds, blocks=1)) == {"forgotten", "old"}
    assert set(pressure(holds, 0)) == {"forgotten", "old"}


def test_worth_of_what_counts_no_block():
    assert worth(hold("none", tokens=0, blocks=0), CONFIG) < worth(hold("some"), CONFIG)


HOLDS = st.lists(
    st.builds(
        hold,
        st.uuids().map(str),
        st.sampled_from("abc"),
        tokens=st.integers(0, 1000),
        blocks=st.integers(0, 60),
        age=st.floats(0, 3600),
        leased=st.booleans(),
        for_decode=st.booleans(),
    ),
    max_size=40,
)
AMOUNTS = st.builds(Amount, tokens=st.integers(0, 500), blocks=st.integers(0, 50))


def total(holds: list[Hold]) -> Amount:
    return sum((each.amount for each in holds), Amount())


def check(holds: list[Hold], chosen: list[Hold], bound: Bound) -> None:
    assert len({each.ownership_id for each in chosen}) == len(chosen)
    assert all(may_go(each, NOW, CONFIG) and not each.leased for each in chosen)
    excess = bound.excess(total(holds))
    left = bound.excess(total(holds) - total(chosen))
    rest = [each for each in holds if may_go(each, NOW, CONFIG) and each not in chosen]
    if left.some:  # no help in what is left
        assert not left.tokens or not any(each.amount.tokens for each in rest)
        assert not left.blocks or not any(each.amount.blocks for each in rest)
    elif excess.some:  # none of it could have stayed
        for each in chosen:
            assert bound.excess(total(holds) - total(chosen) + each.amount).some
    if not excess.some:
        assert chosen == []


@given(holds=HOLDS, tokens=st.integers(0, 20_000), blocks=st.integers(0, 1000))
def test_a_quota_takes_what_is_needed_and_no_more(holds, tokens, blocks):
    bound = Bound(tenant_id="t", tokens=tokens, blocks=blocks)
    check(holds, over_quota(holds, bound, NOW, CONFIG), bound)


@given(
    holds=HOLDS, most=st.integers(1, 1000), beyond=st.dictionaries(st.sampled_from("abc"), AMOUNTS)
)
def test_pressure_takes_what_is_needed_and_no_more(holds, most, beyond):
    chosen = short_of_blocks(holds, most, beyond, NOW, CONFIG)
    check(holds, chosen, Bound(worker_id="d1", blocks=most))


@given(holds=HOLDS, most=st.integers(0, 1000))
def test_a_small_tenant_loses_nothing_to_a_large_one(holds, most):
    """Who holds less than an equal part of the room keeps it all, if the others can give theirs."""
    holds = [replace(each, leased=False, for_decode=False) for each in holds]
    share = {t: sum(h.amount.blocks for h in holds if h.tenant_id == t) for t in "abc"}
    chosen = short_of_blocks(holds, most, {}, NOW, CONFIG)
    for tenant in "abc":
        if share[tenant] * 3 <= most:
            assert all(each.tenant_id != tenant for each in chosen)


@given(holds=HOLDS, most=st.integers(0, 1000), later=st.floats(0, 100), order=st.randoms())
def test_replicas_choose_the_same(holds, most, later, order):
    """Whenever they look, in whatever order the rows come."""
    holds = [replace(each, for_decode=False) for each in holds]
    shuffled = list(holds)
    order.shuffle(shuffled)
    assert short_of_blocks(holds, most, {}, NOW, CONFIG) == short_of_blocks(
        shuffled, most, {}, NOW + micros(later), CONFIG
    )


@pytest.mark.parametrize("limits", [{}, {"tokens": 5}, {"blocks": 5}, {"tokens": 5, "blocks": 5}])
def test_no_limit_is_no_excess(limits: dict[str, int]):
    excess = Bound(worker_id="d1", **limits).excess(Amount(7, 9))
    assert excess == Amount(2 if "tokens" in limits else 0, 4 if "blocks" in limits else 0)


@given(holds=HOLDS, tokens=st.integers(0, 20_000), blocks=st.integers(0, 1000), order=st.randoms())
def test_a_quota_takes_the_same_whatever_the_order_of_rows(holds, tokens, blocks, order):
    bound = Bound(tenant_id="t", tokens=tokens, blocks=blocks)
    shuffled = list(holds)
    order.shuffle(shuffled)
    chosen = over_quota(holds, bound, NOW, CONFIG)
    assert over_quota(shuffled, bound, NOW, CONFIG) == chosen
    # In that order, and of two holds of a size the cheaper one.
    price = [(worth(each, CONFIG), each.ownership_id) for each in chosen]
    assert price == sorted(price)
    spared = [each for each in holds if may_go(each, NOW, CONFIG) and each not in chosen]
    for each in chosen:
        for other in spared:
            if each.amount == other.amount:
                assert worth(each, CONFIG) <= worth(other, CONFIG)


@given(holds=HOLDS, most=st.integers(0, 300), more=st.integers(0, 300))
def test_who_may_hold_more_loses_no_more(holds, most, more):
    """Of holds of one size; with others a larger limit may spare a large one for two small ones."""
    holds = [replace(each, amount=Amount(16, 1)) for each in holds]
    less = short_of_blocks(holds, most + more, {}, NOW, CONFIG)
    assert less == short_of_blocks(holds, most, {}, NOW, CONFIG)[: len(less)]
    if most:
        fewer = over_quota(holds, Bound(tenant_id="t", blocks=most + more), NOW, CONFIG)
        chosen = over_quota(holds, Bound(tenant_id="t", blocks=most), NOW, CONFIG)
        assert fewer == chosen[: len(fewer)]


@given(holds=HOLDS, most=st.integers(0, 1000), beyond=st.dictionaries(st.just("a"), AMOUNTS))
def test_what_is_freed_once_is_enough(holds, most, beyond):
    chosen = short_of_blocks(holds, most, beyond, NOW, CONFIG)
    rest = [each for each in holds if each not in chosen]
    if total(rest).blocks <= most:
        assert short_of_blocks(rest, most, beyond, NOW, CONFIG) == []
