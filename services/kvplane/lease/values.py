"""The values of the lease manager: what is owned, what is leased, and their states."""

from dataclasses import dataclass
from enum import IntEnum

from kvplane.kernel.ids import derived


class OwnershipState(IntEnum):
    """What has become of held blocks. Numbered as in the proto."""

    HELD = 1
    LEASED = 2
    CONSUMED = 3
    EXPIRED = 4
    RELEASED = 5
    LOST = 6


class LeaseState(IntEnum):
    """What has become of a lease. Numbered as in the proto."""

    GRANTED = 1
    READING = 2
    CONSUMED = 3
    RELEASED = 4
    REVOKED = 5
    EXPIRED = 6
    LOST = 7


class Refusal(IntEnum):
    """Why no lease is granted. Numbered as in the proto."""

    NOT_HELD = 1
    ALREADY_LEASED = 2
    EXPIRING = 3
    INCOMPATIBLE = 4
    BELOW_THRESHOLD = 5
    OWNER_LOST = 6
    OVER_QUOTA = 7


class Outcome(IntEnum):
    """What a holder says of its read. Numbered as in the proto."""

    CONSUMED = 1
    UNUSED = 2
    NEVER_BEGUN = 3


LIVE_OWNERSHIP = (OwnershipState.HELD, OwnershipState.LEASED)
LIVE_LEASE = (LeaseState.GRANTED, LeaseState.READING)


@dataclass(frozen=True, slots=True)
class Holder:
    """The reader that has, or asks for, a lease."""

    worker_id: str
    epoch: int
    compatibility: str = ""


@dataclass(frozen=True, slots=True)
class Handle:
    """The engine's own name for blocks that it holds."""

    engine_id: str
    request_id: str

    @property
    def ownership_id(self) -> str:
        """Return the id of the ownership that these blocks are."""
        return derived("own", self.engine_id, self.request_id)


@dataclass(frozen=True, slots=True)
class Ownership:
    """What a worker holds, without the bulky parts."""

    ownership_id: str
    tenant_id: str
    session_id: str
    turn: int
    worker_id: str
    epoch: int
    engine_id: str
    request_id: str
    num_tokens: int
    block_size: int
    compatibility: str
    cuttable: bool
    for_decode: bool
    reported_us: int
    state: OwnershipState
    # Until then its owner holds it, whatever happens. Never moves back.
    hold_deadline_us: int
    # Of the newest lease; 0 before the first.
    fencing_token: int = 0
    # The current lease, or "".
    lease_id: str = ""
    ended_us: int = 0
    # Of the engine's pool, over all groups of its KV cache.
    blocks: int = 0

    @property
    def live(self) -> bool:
        """Tell whether it can still be read."""
        return self.state in LIVE_OWNERSHIP


@dataclass(frozen=True, slots=True)
class Payload:
    """The bulky parts: the handle (an encoded KvTransferParams) and the token digests."""

    params: bytes = b""
    digests: bytes = b""


@dataclass(frozen=True, slots=True)
class Lease:
    """One reader's permission to read one ownership until a deadline."""

    lease_id: str
    tenant_id: str
    session_id: str
    ownership_id: str
    fencing_token: int
    holder_worker_id: str
    holder_epoch: int
    granted_us: int
    state: LeaseState
    deadline_us: int
    draining: bool = False
    ended_us: int = 0

    @property
    def live(self) -> bool:
        """Tell whether it has not been ended. Its deadline may have passed all the same."""
        return self.state in LIVE_LEASE

    def usable(self, now_us: int) -> bool:
        """Tell whether its holder may rely on it."""
        return self.live and now_us < self.deadline_us

    def held_by(self, holder: Holder) -> bool:
        """Tell whether this worker, in this epoch, has it."""
        return self.holder_worker_id == holder.worker_id and self.holder_epoch == holder.epoch


@dataclass(frozen=True, slots=True)
class Change:
    """The outcome of a transition: an ownership and the lease that it concerns."""

    ownership: Ownership
    lease: Lease | None = None
    # The owner is to be told to free the blocks.
    free_now: bool = False


def micros(seconds: float) -> int:
    """Return seconds as whole microseconds."""
    return round(seconds * 1_000_000)
