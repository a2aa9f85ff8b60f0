"""What storage must do to keep what is held within limits. Like `LeaseStore`, in one piece each."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from kvplane.lease.keeping import Amount, Bound, Hold
from kvplane.lease.store import Effects


@dataclass(frozen=True, slots=True)
class Share:
    """What a worker holds for a tenant."""

    worker_id: str
    tenant_id: str
    amount: Amount


@dataclass(frozen=True, slots=True)
class Stock:
    """What is held in all, at one instant."""

    now_us: int
    # Until then usage was counted before.
    until_us: int
    shares: list[Share]
    # By tenant, since `until_us`; also of what has ended since.
    token_seconds: dict[str, float]
    # Live ones, by tenant.
    leases: dict[str, int]
    # Blocks that workers let be held, where they said so.
    limits: dict[str, int]

    def by_tenant(self) -> dict[str, Amount]:
        """Return what is held for each tenant."""
        held: dict[str, Amount] = defaultdict(Amount)
        for share in self.shares:
            held[share.tenant_id] += share.amount
        return dict(held)

    def by_worker(self) -> defaultdict[str, Amount]:
        """Return what each worker holds."""
        held: defaultdict[str, Amount] = defaultdict(Amount)
        for share in self.shares:
            held[share.worker_id] += share.amount
        return held


@dataclass(frozen=True, slots=True)
class Usage:
    """What a tenant holds, and what it has held over all time, at most one sweep late."""

    held: Amount
    live_leases: int
    held_token_seconds: float


class HoldStore(Protocol):
    """Sums over what is held, and holds freed before their time."""

    async def stock(self) -> Stock:
        """Return what is held in all."""
        ...

    async def count_held(self, counted: Stock) -> bool:
        """Add to what tenants have held over all time, unless another replica has since."""
        ...

    async def usage(self, tenant_id: str) -> Usage:
        """Return what a tenant holds and has held."""
        ...

    async def holds_on(self, worker_id: str) -> tuple[list[Hold], int]:
        """Return all that a worker holds, leased or not, and the time."""
        ...

    async def holds_of(self, tenant_id: str) -> tuple[list[Hold], int]:
        """Return all that is held for a tenant, leased or not, and the time."""
        ...

    async def free_holds(self, bound: Bound, chosen: Sequence[Hold]) -> tuple[list[Hold], Effects]:
        """Free these, in their order, while more than `bound` is held; return the freed ones.

        As when a newer turn replaces them: RELEASED, and ordered to be freed. What is not
        HELD any more is left alone.
        """
        ...
