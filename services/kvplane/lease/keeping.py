"""Who loses what when too much is held. Pure: what is held in, ids of what to free out.

Only what is HELD is ever chosen. How the choice orders two holds does not depend on when
it is made, so that replicas which look at the same rows choose the same.
"""

import heapq
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from kvplane.kernel.limits import Limits
from kvplane.lease.domain import LeaseConfig
from kvplane.lease.values import micros


@dataclass(frozen=True, slots=True)
class Amount:
    """So many tokens, in so many blocks of engines' pools."""

    tokens: int = 0
    blocks: int = 0

    def __add__(self, other: "Amount") -> "Amount":
        """Return both."""
        return Amount(self.tokens + other.tokens, self.blocks + other.blocks)

    def __sub__(self, other: "Amount") -> "Amount":
        """Return what is left; it may be negative."""
        return Amount(self.tokens - other.tokens, self.blocks - other.blocks)

    @property
    def some(self) -> bool:
        """Tell whether there is any of either."""
        return self.tokens > 0 or self.blocks > 0


@dataclass(frozen=True, slots=True)
class Hold:
    """What a worker holds, as far as a choice needs it."""

    ownership_id: str
    tenant_id: str
    worker_id: str
    amount: Amount
    reported_us: int
    leased: bool = False
    for_decode: bool = False


@dataclass(frozen=True, slots=True)
class Bound:
    """What may be held on a worker, or for a tenant; the other is "". 0 is no limit."""

    worker_id: str = ""
    tenant_id: str = ""
    tokens: int = 0
    blocks: int = 0

    def excess(self, held: Amount) -> Amount:
        """Return what `held` is beyond it, neither below 0."""
        return Amount(
            max(held.tokens - self.tokens, 0) if self.tokens else 0,
            max(held.blocks - self.blocks, 0) if self.blocks else 0,
        )


def bound_of(tenant_id: str, limits: Limits) -> Bound:
    """Return what may be held for a tenant with these limits."""
    return Bound(tenant_id=tenant_id, tokens=limits.held_tokens, blocks=limits.held_blocks)


def worth(hold: Hold, config: LeaseConfig) -> float:
    """Return what keeping it is worth; only the order of two means anything.

    The logarithm of (tokens that a return saves, for each block) times the likelihood of a
    return, which halves in each `return_half_life_s` since the report. In the logarithm
    the present is the same summand for all, and left out.
    """
    saved = max(hold.amount.tokens, 1) / max(hold.amount.blocks, 1)
    return math.log2(saved) + hold.reported_us / micros(config.return_half_life_s)


def may_go(hold: Hold, now_us: int, config: LeaseConfig) -> bool:
    """Tell whether it may be freed: nobody has a lease on it or is about to ask for one.

    A prefill's blocks are asked for by the decode of the same turn within moments: without
    them a running request would compute its whole prompt again.
    """
    if hold.leased:
        return False
    return not hold.for_decode or now_us - hold.reported_us >= micros(config.handover_s)


def over_quota(holds: Iterable[Hold], bound: Bound, now_us: int, config: LeaseConfig) -> list[Hold]:
    """Return what a tenant loses of all that is held for it: the cheapest, and no more than needed.

    In the order in which it is to be freed.
    """
    everything = list(holds)
    excess = bound.excess(_sum(everything))
    chosen: list[Hold] = []
    left = excess
    for hold in _cheapest_first(everything, now_us, config):
        if not left.some:
            break
        if (left.tokens > 0 and hold.amount.tokens) or (left.blocks > 0 and hold.amount.blocks):
            chosen.append(hold)
            left -= hold.amount
    return _needed(chosen, excess)


def short_of_blocks(
    holds: Iterable[Hold],
    most_blocks: int,
    beyond: Mapping[str, Amount],
    now_us: int,
    config: LeaseConfig,
) -> list[Hold]:
    """Return what is freed on a worker, of all that it holds, so that it holds `most_blocks`.

    A tenant loses its cheapest hold, and then it is asked again who loses the next one:
    first those beyond a soft limit (`beyond` says by how much), then all others; among
    them the one for which the worker holds the most blocks. In the order in which it is to
    be freed, and no more than needed.
    """
    everything = list(holds)
    excess = Amount(blocks=sum(hold.amount.blocks for hold in everything) - most_blocks)
    share: dict[str, int] = defaultdict(int)
    for hold in everything:
        share[hold.tenant_id] += hold.amount.blocks
    queues: dict[str, list[Hold]] = defaultdict(list)
    for hold in reversed(_cheapest_first(everything, now_us, config)):
        queues[hold.tenant_id].append(hold)
    left_beyond = dict(beyond)

    def turn(tenant_id: str) -> tuple[bool, int, str]:
        over = left_beyond.get(tenant_id, Amount()).some
        return not over, -share[tenant_id], tenant_id

    waiting = [turn(tenant_id) for tenant_id in queues]
    heapq.heapify(waiting)
    chosen: list[Hold] = []
    left = excess.blocks
    while left > 0 and waiting:
        tenant_id = heapq.heappop(waiting)[2]
        hold = queues[tenant_id].pop()
        if hold.amount.blocks:
            chosen.append(hold)
            left -= hold.amount.blocks
            share[tenant_id] -= hold.amount.blocks
            if tenant_id in left_beyond:
                left_beyond[tenant_id] -= hold.amount
        if queues[tenant_id]:
            heapq.heappush(waiting, turn(tenant_id))
    return _needed(chosen, excess)


def _cheapest_first(holds: Iterable[Hold], now_us: int, config: LeaseConfig) -> list[Hold]:
    free = [hold for hold in holds if may_go(hold, now_us, config)]
    free.sort(key=lambda hold: (worth(hold, config), hold.ownership_id))
    return free


def _needed(chosen: Sequence[Hold], excess: Amount) -> list[Hold]:
    """Return what of it is needed: a large one at the end may do without smaller ones before."""
    spare = _sum(chosen) - excess
    kept = []
    for hold in reversed(chosen):
        after = spare - hold.amount
        if (not excess.tokens or after.tokens >= 0) and (not excess.blocks or after.blocks >= 0):
            spare = after
        else:
            kept.append(hold)
    return kept[::-1]


def _sum(holds: Iterable[Hold]) -> Amount:
    return sum((hold.amount for hold in holds), Amount())
