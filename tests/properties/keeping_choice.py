"""Who loses which hold, step by step and as slowly as docs/protocol.md says it."""

import math
from collections.abc import Mapping, Sequence

from kvplane.kernel.limits import Limits
from kvplane.lease.keeping import Amount
from kvplane.lease.values import Ownership, OwnershipState
from properties.lease_state import CONFIG, micros


def total(owns: Sequence[Ownership]) -> Amount:
    return Amount(sum(own.num_tokens for own in owns), sum(own.blocks for own in owns))


def within(held: Amount, limits: Limits) -> bool:
    """Tell whether so much may be held."""
    return (not limits.held_tokens or held.tokens <= limits.held_tokens) and (
        not limits.held_blocks or held.blocks <= limits.held_blocks
    )


def lost_by_tenant(owns: Sequence[Ownership], limits: Limits, now_us: int) -> list[Ownership]:
    """Return what a tenant loses of all that is held for it."""
    chosen: list[Ownership] = []
    for own in _may_go(owns, now_us):
        left = total(owns) - total(chosen)
        helps = (
            own.num_tokens and not within(Amount(tokens=left.tokens), limits),
            own.blocks and not within(Amount(blocks=left.blocks), limits),
        )
        if any(helps):
            chosen.append(own)
    return _spared(owns, chosen, limits)


def lost_on_worker(
    owns: Sequence[Ownership],
    most: int,
    held: Mapping[str, Amount],
    soft: Mapping[str, Limits],
    now_us: int,
) -> list[Ownership]:
    """Return what is lost of all that a worker holds; `held` is each tenant's in all."""
    chosen: list[Ownership] = []
    while total(owns).blocks - total(chosen).blocks > most:
        left = [own for own in owns if own not in chosen]
        ranks = []
        for own in _may_go(left, now_us):
            tenant = own.tenant_id
            lost = total([each for each in chosen if each.tenant_id == tenant])
            beyond = not within(held[tenant] - lost, soft[tenant])
            share = total([each for each in left if each.tenant_id == tenant]).blocks
            if own.blocks:
                ranks.append((not beyond, -share, tenant, len(ranks), own))
        if not ranks:
            break
        chosen.append(min(ranks)[-1])
    return _spared(owns, chosen, Limits(held_blocks=most))


def _spared(owns: Sequence[Ownership], chosen: list[Ownership], limits: Limits) -> list[Ownership]:
    """Return what of it is needed, the last chosen spared before the first."""
    for own in reversed(chosen):
        fewer = [each for each in chosen if each is not own]
        if within(total(owns) - total(fewer), limits):
            chosen = fewer
    return chosen


def _may_go(owns: Sequence[Ownership], now_us: int) -> list[Ownership]:
    """Return what nobody reads or is about to, the cheapest first."""
    free = [
        own
        for own in owns
        if own.state is OwnershipState.HELD
        and not (own.for_decode and now_us - own.reported_us < micros(CONFIG.handover_s))
    ]
    return sorted(free, key=lambda own: (_worth(own), own.ownership_id))


def _worth(own: Ownership) -> float:
    """Return the logarithm of tokens for each block times 2 ** (the report's time / 120 s)."""
    ratio = max(own.num_tokens, 1) / max(own.blocks, 1)
    return math.log2(ratio) + own.reported_us / micros(CONFIG.return_half_life_s)
