"""What storage must do for the lease manager. The docstrings are the contract.

Each method is one atomic transition, decided by the storage's own clock as read after
the rows are locked. It validates nothing: `kvplane.lease.codec` has done that. Methods
raise Unavailable when the storage is away, and StaleEpoch where a worker's epoch is
given that is older than the newest one known; naming a newer epoch first ends the older
ones, as `end_epoch` does.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from kvplane.lease.values import (
    Handle,
    Holder,
    Lease,
    LeaseState,
    Outcome,
    Ownership,
    OwnershipState,
    Payload,
    Refusal,
)


@dataclass(frozen=True, slots=True)
class Effects:
    """Whom a transition concerns beside its caller."""

    # Workers with new commands in the outbox.
    commanded: frozenset[str] = frozenset()
    # Workers of which an older epoch has ended.
    epoch_ended: frozenset[str] = frozenset()

    def __or__(self, other: "Effects") -> "Effects":
        """Return both."""
        return Effects(self.commanded | other.commanded, self.epoch_ended | other.epoch_ended)


NO_EFFECTS = Effects()


@dataclass(frozen=True, slots=True)
class ReportedItem:
    """One ownership as its worker reports it; server-side fields are placeholders."""

    ownership: Ownership
    payload: Payload
    # None: the worker did not say.
    hold_us: int | None


@dataclass(frozen=True, slots=True)
class Reported:
    """The answer to a report: the stored ownerships, in the order given."""

    ownerships: list[Ownership]
    now_us: int
    effects: Effects


@dataclass(frozen=True, slots=True)
class Withdrawn:
    """The answer to a withdrawal, in the order given; None for a handle never reported."""

    states: list[OwnershipState | None]
    effects: Effects


@dataclass(frozen=True, slots=True)
class Welcomed:
    """The answer to a hello."""

    now_us: int
    effects: Effects


@dataclass(frozen=True, slots=True)
class GrantOrder:
    """A request for a lease. Exactly one of ownership_id and session_id is set."""

    request_id: str
    # Of the caller, or None where the ownership's own tenant counts.
    tenant_id: str | None
    holder: Holder
    ownership_id: str
    session_id: str
    # 0 asks for the default.
    ttl_us: int
    min_tokens: int
    begin_read: bool


@dataclass(frozen=True, slots=True)
class Granted:
    """The answer to a request for a lease: a lease, or a refusal."""

    lease: Lease | None
    # Only with a lease that is live.
    ownership: Ownership | None
    payload: Payload
    refusal: Refusal | None
    now_us: int
    # Nothing was decided, since a report may still come; try again.
    pending: bool = False
    effects: Effects = NO_EFFECTS
    # Nothing was decided: this tenant's limit is not known, or another transaction is just
    # granting it a lease. Try again at once.
    limit_of: str = ""
    crowded: bool = False


@dataclass(frozen=True, slots=True)
class LeaseQuota:
    """How many leases tenants may have at once."""

    # 0: any number; None: not known yet.
    most: Callable[[str], int | None] = lambda _tenant_id: 0
    # Also beside other transactions. What is not exact is decided at once.
    exact: bool = True


@dataclass(frozen=True, slots=True)
class LeaseRef:
    """A lease and the token under which the caller has it."""

    lease_id: str
    fencing_token: int
    # Of a release only.
    outcome: Outcome = Outcome.CONSUMED


@dataclass(frozen=True, slots=True)
class Renewal:
    """The answer to one renewal."""

    lease_id: str
    renewed: bool
    # None for a lease that this holder does not have.
    state: LeaseState | None
    ttl_us: int = 0
    draining: bool = False


@dataclass(frozen=True, slots=True)
class Command:
    """An order to an owner: hold longer when `hold_us` is set, else free now."""

    command_id: str
    worker_id: str
    epoch: int
    handle: Handle
    hold_us: int | None


@dataclass(frozen=True, slots=True)
class StreamView:
    """What a replica must know of a worker whose stream it has."""

    epoch: int
    stream_id: str
    commands: list[Command] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Page:
    """Where to go on: the sort key of the last row that was seen."""

    size: int
    after: tuple[int, str] | None = None


@dataclass(frozen=True, slots=True)
class Listed:
    """One page, newest first, and where the next one begins."""

    rows: list[Ownership] | list[Lease]
    next_after: tuple[int, str] | None
    now_us: int


@dataclass(frozen=True, slots=True)
class Swept:
    """What one sweeping transaction did."""

    ended_leases: int
    ended_ownerships: int
    # There may be more to do.
    more: bool
    effects: Effects


_NO_QUOTA = LeaseQuota()


class LeaseStore(Protocol):
    """Atomic transitions of ownerships, leases, epochs and commands."""

    async def now_us(self) -> int:
        """Return the deciding clock's time."""
        ...

    async def report(
        self,
        worker_id: str,
        epoch: int,
        sent_by_us: int,
        items: list[ReportedItem],
        stream_id: str | None = None,
    ) -> Reported:
        """Store what a worker holds.

        A live ownership gets a later hold deadline, or nothing; an ended one stays as it
        is, and one that was LOST is ordered to be freed. A hold that is over already is
        stored as EXPIRED. Held ownerships of a session that has a live one of a later
        turn become RELEASED and are ordered to be freed (not those for a decode), and so
        does what is reported of a session that has ended. The last of equal items in a
        call counts.

        Raises InvalidField when the id is live under another tenant or worker, and
        Unavailable when it came on a stream that is no longer the worker's newest.
        """
        ...

    async def withdraw(self, worker_id: str, epoch: int, handles: list[Handle]) -> Withdrawn:
        """End ownerships that their worker has freed, and their commands with them.

        A handle never reported is remembered, so that a late report cannot revive it;
        one of another worker is answered as if it had never been reported.
        """
        ...

    async def hello(
        self,
        worker_id: str,
        epoch: int,
        stream_id: str,
        number: int,
        held: list[Handle],
        hold_limit_blocks: int = 0,
    ) -> Welcomed:
        """Make `stream_id` the worker's stream, its `number`-th, and believe its inventory.

        `hold_limit_blocks` counts until its next hello or epoch; 0 is no limit.
        Live ownerships of the worker that are not in `held` are withdrawn. Held ones that
        have ended here are ordered to be freed, unless their read still drains.

        Raises Unavailable when the worker has opened a newer stream since: what it has
        pinned in between is not in `held`.
        """
        ...

    async def end_epoch(self, worker_id: str, current_epoch: int) -> tuple[int, int, Effects]:
        """End all epochs of a worker below `current_epoch`; return ownerships and leases lost.

        What it owned is LOST with its leases. Leases it held are LOST: unread ones put
        the ownership back to HELD, read ones drain until their deadline and the slack.
        """
        ...

    async def grant(
        self,
        order: GrantOrder,
        lease_id: str,
        *,
        final: bool,
        quota: LeaseQuota = _NO_QUOTA,
    ) -> Granted:
        """Give a lease, or refuse, and remember the answer under (tenant, request_id).

        What else could be given is refused as OVER_QUOTA to a tenant that has as many live
        leases as it may.

        Holds and unread leases whose time is over are ended first, swept or not. The same
        request again gets the same lease as it now is, or the same refusal.
        Unless `final`, an absence that a report could still fill is `pending` and not
        remembered.

        Raises InvalidField when request_id was used for another question.
        """
        ...

    async def begin_read(
        self, ref: LeaseRef, holder: Holder, ttl_us: int
    ) -> tuple[Lease, Ownership, Payload, int]:
        """Turn a lease into READING and return it with what to read, and the time.

        Raises what `domain.begin_read` raises.
        """
        ...

    async def renew(
        self, holder: Holder, refs: list[LeaseRef], ttl_us: int
    ) -> tuple[list[Renewal], Effects]:
        """Extend usable leases of this holder, answering each in the order given.

        Where the hold leaves less than the ttl, the owner is ordered to hold longer.
        """
        ...

    async def release(
        self, holder: Holder, refs: list[LeaseRef]
    ) -> tuple[list[LeaseState | None], Effects]:
        """End leases at their holder's word; None for one that it does not have.

        What is given back unread is held again, unless its session has a later turn by
        now: then it is freed.
        """
        ...

    async def revoke(self, tenant_id: str, lease_id: str) -> tuple[Lease, int, Effects]:
        """Take a lease away and return it, and the time.

        Raises NotFound, IllegalTransition.
        """
        ...

    async def free_session(self, tenant_id: str, session_id: str) -> tuple[int, int, Effects]:
        """Free what an ended session holds; return how many at once and how many drain.

        The end is remembered: what is reported of the session later is freed at once.
        """
        ...

    async def extend_hold(
        self, tenant_id: str, session_id: str, hold_us: int, command_ids: list[str]
    ) -> tuple[int, Effects]:
        """Order the owners of a session's live ownerships to hold them that long from now.

        A newer order replaces an older one; a hold that lasts long enough needs none.
        At most ``len(command_ids)`` owners are asked, the newest first.
        """
        ...

    async def acknowledge(
        self,
        worker_id: str,
        epoch: int,
        command_id: str,
        *,
        done: bool,
        sent_by_us: int,
        hold_us: int,
    ) -> Effects:
        """Take a command out of the outbox; an unknown one changes nothing.

        After a done HoldLonger the hold ends no earlier than min(now, sent_by) + hold.
        One that was not done means that the owner holds no such thing: a withdrawal.
        """
        ...

    async def sweep(self, rows: int) -> Swept:
        """End at most that many leases, and as many holds, whose deadline has passed.

        What may be being read ends `sweep_slack_s` after its lease's deadline. Live rows,
        however many, do not hide ended ones.
        """
        ...

    async def purge(self, rows: int, retention_us: int) -> int:
        """Delete rows that ended longer ago than `retention_us`, at most that many a table."""
        ...

    async def get_ownership(
        self, tenant_id: str, ownership_id: str
    ) -> tuple[Ownership, Payload, int]:
        """Return an ownership of the tenant, and the time. Raises NotFound."""
        ...

    async def list_ownerships(
        self,
        tenant_id: str,
        session_id: str,
        worker_id: str,
        states: list[OwnershipState],
        page: Page,
    ) -> Listed:
        """Return a tenant's ownerships, newest first; empty filters mean all."""
        ...

    async def get_lease(self, tenant_id: str, lease_id: str) -> tuple[Lease, int]:
        """Return a lease of the tenant, and the time. Raises NotFound."""
        ...

    async def list_leases(
        self,
        tenant_id: str,
        session_id: str,
        worker_id: str,
        states: list[LeaseState],
        page: Page,
    ) -> Listed:
        """Return a tenant's leases, newest first; `worker_id` is the holder's."""
        ...

    async def watch(self, worker_ids: list[str]) -> dict[str, StreamView]:
        """Return the newest epoch, stream and open commands of these workers."""
        ...
