"""Ownerships and leases: the only ways in which they change.

Every function here is pure: values and an instant in, values out. An ownership has at
most one *current* lease, named by `lease_id`: it is live, or it drains. Instants are
microseconds on the clock that all replicas share.
"""

from dataclasses import dataclass, replace

from kvplane.kernel.errors import (
    IllegalTransition,
    InvalidField,
    NotFound,
    StaleEpoch,
    StaleFencingToken,
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


@dataclass(frozen=True, slots=True)
class LeaseConfig:
    """Limits of the lease manager; seconds unless the name says otherwise."""

    ttl_s: float = 10.0
    min_ttl_s: float = 1.0
    max_ttl_s: float = 60.0
    # A lease ends at least this long before its ownership's hold.
    margin_s: float = 2.0
    # A read may go on so long after its lease's end, by a reader whose clock is slow: what
    # it reads is freed only then.
    sweep_slack_s: float = 0.5
    # What a report without a hold is taken to mean; 0 lets nobody read it.
    unknown_hold_s: float = 0.0
    max_hold_s: float = 86_400.0
    max_wait_s: float = 1.0
    sweep_interval_s: float = 1.0
    # Nothing is swept until holders had this long to come back after a start.
    restart_grace_s: float = 10.0
    # Rows that one sweeping transaction touches at most.
    sweep_rows: int = 500
    # How likely a session's return is halves in each of these since its last turn.
    return_half_life_s: float = 120.0
    # A decode asks for its prefill's blocks within this; they are not freed before.
    handover_s: float = 10.0
    # Ended rows stay this long, to answer repeats and questions.
    retention_s: float = 600.0
    tick_interval_s: float = 1.0
    # How often a replica looks for what other replicas have done.
    poll_interval_s: float = 0.2
    report_poll_interval_s: float = 0.05

    def __post_init__(self) -> None:
        """Raise ValueError naming a field that makes no sense."""
        for name in self.__dataclass_fields__:
            if getattr(self, name) < 0:
                raise ValueError(f"{name}: must not be negative")
        for name in ("min_ttl_s", "sweep_interval_s", "sweep_rows", "tick_interval_s",
                     "poll_interval_s", "report_poll_interval_s",
                     "return_half_life_s"):  # fmt: skip
            if not getattr(self, name):
                raise ValueError(f"{name}: must be more than 0")
        if not self.min_ttl_s <= self.ttl_s <= self.max_ttl_s:
            raise ValueError("ttl_s: must be from min_ttl_s to max_ttl_s")
        if self.sweep_slack_s > self.margin_s:
            raise ValueError("sweep_slack_s: must be at most margin_s, or the hold ends first")


def hold_deadline(now_us: int, sent_by_us: int, hold_us: int) -> int:
    """Return the end of a hold that its owner counted from when it sent the report.

    `sent_by_us` is anchor + elapsed: the report was sent no earlier. An anchor of the
    future counts as now.
    """
    return min(now_us, sent_by_us) + hold_us


def clamp_ttl(asked_us: int, config: LeaseConfig) -> int:
    """Return the ttl that a lease gets for the one asked for; 0 asks for the default."""
    wanted = asked_us or micros(config.ttl_s)
    return max(micros(config.min_ttl_s), min(wanted, micros(config.max_ttl_s)))


def lease_deadline(now_us: int, ttl_us: int, hold_deadline_us: int, config: LeaseConfig) -> int:
    """Return when a lease ends that is given now: before the hold does, by the margin."""
    return min(now_us + ttl_us, hold_deadline_us - micros(config.margin_s))


def grant(
    own: Ownership,
    lease_id: str,
    holder: Holder,
    *,
    ttl_us: int,
    min_tokens: int,
    begin_read: bool,
    now_us: int,
    config: LeaseConfig,
) -> Change | Refusal:
    """Give `holder` a lease, or say why not."""
    if own.state is OwnershipState.LOST:
        return Refusal.OWNER_LOST
    if not own.live or now_us >= own.hold_deadline_us:
        return Refusal.NOT_HELD
    if own.state is OwnershipState.LEASED:
        return Refusal.ALREADY_LEASED
    if own.compatibility != holder.compatibility:
        return Refusal.INCOMPATIBLE
    if own.num_tokens < min_tokens:
        return Refusal.BELOW_THRESHOLD
    deadline = lease_deadline(now_us, ttl_us, own.hold_deadline_us, config)
    if deadline - now_us < micros(config.min_ttl_s):
        return Refusal.EXPIRING
    token = own.fencing_token + 1
    lease = Lease(
        lease_id=lease_id,
        tenant_id=own.tenant_id,
        session_id=own.session_id,
        ownership_id=own.ownership_id,
        fencing_token=token,
        holder_worker_id=holder.worker_id,
        holder_epoch=holder.epoch,
        granted_us=now_us,
        state=LeaseState.READING if begin_read else LeaseState.GRANTED,
        deadline_us=deadline,
    )
    leased = replace(own, state=OwnershipState.LEASED, fencing_token=token, lease_id=lease_id)
    return Change(leased, lease)


def newest_readable(candidates: list[Ownership], now_us: int) -> Ownership | None:
    """Return what a session's next turn should read: the newest one held, else one leased."""
    live = [own for own in candidates if own.live and now_us < own.hold_deadline_us]
    held = [own for own in live if own.state is OwnershipState.HELD]
    return max(held or live, key=age_order, default=None)


def age_order(own: Ownership) -> tuple[int, int, str]:
    """Return a key that sorts a session's ownerships from old to new."""
    return (own.turn, own.reported_us, own.ownership_id)


def superseded(candidates: list[Ownership]) -> list[Ownership]:
    """Return the held ownerships of one session that a newer turn has replaced."""
    live = [own for own in candidates if own.live and not own.for_decode]
    newest = max((own.turn for own in live), default=0)
    return [own for own in live if own.state is OwnershipState.HELD and own.turn < newest]


def begin_read(
    own: Ownership,
    lease: Lease,
    holder: Holder,
    fencing_token: int,
    *,
    ttl_us: int,
    now_us: int,
    config: LeaseConfig,
) -> Lease:
    """Return the lease as READING. The same holder may ask again.

    Raises NotFound for another worker's lease, StaleEpoch, StaleFencingToken,
    IllegalTransition when it has ended, InvalidField for an incompatible reader.
    """
    if lease.holder_worker_id != holder.worker_id:
        raise NotFound("lease", lease.lease_id)
    if lease.holder_epoch != holder.epoch:
        raise StaleEpoch(holder.worker_id, min(holder.epoch, lease.holder_epoch))
    if lease.fencing_token != fencing_token or own.fencing_token != fencing_token:
        raise StaleFencingToken(lease.lease_id)
    if own.compatibility != holder.compatibility:
        raise InvalidField("holder.compatibility", "differs from the owner's")
    if not lease.usable(now_us):
        state = LeaseState.EXPIRED if lease.live else lease.state
        raise IllegalTransition("lease", lease.lease_id, state.name, "begin a read")
    deadline = renewed_deadline(lease, own.hold_deadline_us, ttl_us, now_us, config)
    return replace(lease, state=LeaseState.READING, deadline_us=deadline)


def renewed_deadline(
    lease: Lease, hold_deadline_us: int, ttl_us: int, now_us: int, config: LeaseConfig
) -> int:
    """Return the deadline of a usable lease after a renewal: never an earlier one."""
    return max(lease.deadline_us, lease_deadline(now_us, ttl_us, hold_deadline_us, config))


def release(own: Ownership, lease: Lease, outcome: Outcome, now_us: int) -> Change:
    """End a lease at its holder's word. A second release changes nothing."""
    if outcome is Outcome.NEVER_BEGUN and lease.state is not LeaseState.GRANTED:
        return Change(own, lease)
    if own.lease_id == lease.lease_id:
        if lease.live:
            return _release_live(own, lease, outcome, now_us)
        return _drained(own, lease, now_us, consumed=outcome is Outcome.CONSUMED)
    late_read = outcome is Outcome.CONSUMED and lease.state is not LeaseState.CONSUMED
    untouched = own.state is OwnershipState.HELD and own.fencing_token == lease.fencing_token
    if late_read and untouched:
        # It was sent back to be leased again, but its one use is gone.
        return Change(_ended(own, OwnershipState.CONSUMED, now_us), lease, free_now=True)
    return Change(own, lease)


def _release_live(own: Ownership, lease: Lease, outcome: Outcome, now_us: int) -> Change:
    if outcome is Outcome.CONSUMED:
        consumed = _ended(own, OwnershipState.CONSUMED, now_us)
        return Change(consumed, _end(lease, LeaseState.CONSUMED, now_us))
    return Change(_held_again(own, now_us), _end(lease, LeaseState.RELEASED, now_us))


def revoke(own: Ownership, lease: Lease, now_us: int) -> Change:
    """Take a lease away: at once when nothing was read, else it drains.

    Raises IllegalTransition for a lease that ended in another way.
    """
    if lease.state is LeaseState.REVOKED:
        return Change(own, lease)
    if not lease.live:
        raise IllegalTransition("lease", lease.lease_id, lease.state.name, "revoke it")
    if lease.state is LeaseState.READING:
        return Change(own, replace(lease, state=LeaseState.REVOKED, draining=True, ended_us=now_us))
    released = _ended(own, OwnershipState.RELEASED, now_us)
    return Change(released, _end(lease, LeaseState.REVOKED, now_us), free_now=True)


def free(own: Ownership, lease: Lease | None, now_us: int) -> Change:
    """Give blocks back before their time; a running read drains first."""
    if own.state is OwnershipState.HELD:
        return Change(_ended(own, OwnershipState.RELEASED, now_us), free_now=True)
    if lease is not None and lease.live:
        return revoke(own, lease, now_us)
    return Change(own, lease)


def withdraw(own: Ownership, lease: Lease | None, now_us: int) -> Change:
    """Accept the owner's word that the blocks are free."""
    if own.state is OwnershipState.HELD:
        return Change(_ended(own, OwnershipState.EXPIRED, now_us))
    if lease is None:
        return Change(own)
    if lease.state is LeaseState.GRANTED:
        expired = _ended(own, OwnershipState.EXPIRED, now_us)
        return Change(expired, _end(lease, LeaseState.REVOKED, now_us))
    if lease.state is LeaseState.READING:
        consumed = _ended(own, OwnershipState.CONSUMED, now_us)
        return Change(consumed, _end(lease, LeaseState.CONSUMED, now_us))
    return replace(_drained(own, lease, now_us, consumed=True), free_now=False)


def expire(own: Ownership, lease: Lease | None, now_us: int, config: LeaseConfig) -> Change | None:
    """Return what the passing of time has ended, if anything.

    What may be being read ends `sweep_slack_s` late: no call of its holder's succeeds any
    more, but the holder counts on a clock of its own and may not know yet.
    """
    if lease is None:
        over = own.state is OwnershipState.HELD and own.hold_deadline_us <= now_us
        return Change(_ended(own, OwnershipState.EXPIRED, now_us)) if over else None
    if lease.state is LeaseState.GRANTED:
        if lease.deadline_us > now_us:
            return None
        return Change(_held_again(own, now_us), _end(lease, LeaseState.EXPIRED, now_us))
    if lease.deadline_us + micros(config.sweep_slack_s) > now_us:
        return None
    if lease.state is LeaseState.READING:
        # A read may have been sent: nobody else may read what it has freed.
        released = _ended(own, OwnershipState.RELEASED, now_us)
        return Change(released, _end(lease, LeaseState.EXPIRED, now_us), free_now=True)
    return _drained(own, lease, now_us, consumed=False)


def lose_owner(own: Ownership, lease: Lease | None, now_us: int) -> Change:
    """End what a worker owned, because its epoch has ended."""
    if not own.live:
        return Change(own, lease)
    if lease is not None and lease.live:
        lease = _lost(lease, now_us)
    lost = _ended(own, OwnershipState.LOST, now_us)
    if lease is not None and lease.draining:
        lost = replace(lost, lease_id=lease.lease_id)
    return Change(lost, lease)


def lose_holder(own: Ownership, lease: Lease, now_us: int) -> Change:
    """End what a worker held, because its epoch has ended.

    A worker that is thought dead may still be reading, so a read drains until the
    deadline that the holder itself keeps.
    """
    if lease.state is LeaseState.GRANTED:
        return Change(_held_again(own, now_us), _lost(lease, now_us))
    if lease.state is LeaseState.READING:
        return Change(own, _lost(lease, now_us))
    return Change(own, lease)


def hold_until(own: Ownership, deadline_us: int) -> Ownership:
    """Move a hold's end. It never moves back."""
    if not own.live or deadline_us <= own.hold_deadline_us:
        return own
    return replace(own, hold_deadline_us=deadline_us)


def _drained(own: Ownership, lease: Lease, now_us: int, *, consumed: bool) -> Change:
    if not lease.draining:
        return Change(own, lease)
    lease = replace(lease, draining=False)
    if not own.live:  # lost with its worker, which may be back and pin it still
        return Change(replace(own, lease_id=""), lease, free_now=True)
    state = OwnershipState.CONSUMED if consumed else OwnershipState.RELEASED
    return Change(_ended(own, state, now_us), lease, free_now=True)


def _held_again(own: Ownership, now_us: int) -> Ownership:
    if now_us >= own.hold_deadline_us:
        return _ended(own, OwnershipState.EXPIRED, now_us)
    return replace(own, state=OwnershipState.HELD, lease_id="")


def _ended(own: Ownership, state: OwnershipState, now_us: int) -> Ownership:
    return replace(own, state=state, lease_id="", ended_us=now_us)


def _end(lease: Lease, state: LeaseState, now_us: int) -> Lease:
    return replace(lease, state=state, ended_us=now_us)


def _lost(lease: Lease, now_us: int) -> Lease:
    reading = lease.state is LeaseState.READING
    return replace(lease, state=LeaseState.LOST, draining=reading, ended_us=now_us)
