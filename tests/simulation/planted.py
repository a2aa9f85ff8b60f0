"""Faults put into the product on purpose. A search that misses one of them has no teeth.

Each is a small patch of one decision. Those in a worker's agent are in `planted_workers`.
"""

from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

from kvplane.lease import domain, keeping
from kvplane.lease.domain import Change, LeaseState, Outcome, OwnershipState
from kvplane.lease.sql import epochs, grants, holders, owners, sessions, sweeping
from kvplane.lease.sql import keeping as sql_keeping
from kvplane.lease.sql.workspace import Workspace
from kvplane.lease.store import NO_EFFECTS
from kvplane.lease.values import Lease

from simulation.plane import Replica
from simulation.planted_workers import (
    digests_not_compared,
    hold_without_margin,
    ids_not_cut,
    late_read_used,
    lease_used_again,
    lease_used_twice,
    longer_acked_before_done,
    ttl_from_the_answer,
    unused_after_sent,
)
from simulation.planting import Plant, all_of, everywhere


def margin_removed() -> AbstractContextManager[Any]:
    """A lease may end when its hold does."""
    old = domain.lease_deadline
    return everywhere(old, lambda now, ttl, hold, config: min(now + ttl, hold))


def double_grant() -> AbstractContextManager[Any]:
    """A repeated grant, its first answer lost, gets a second lease."""
    granted = domain.grant

    def again(own: Any, *args: Any, **kwargs: Any) -> Any:
        if own.state is OwnershipState.LEASED:
            own = replace(own, state=OwnershipState.HELD)
        return granted(own, *args, **kwargs)

    return all_of(
        patch.object(grants, "_replay", lambda tx, order: None),
        patch.object(grants, "_remember", lambda *args: True),
        everywhere(granted, again),
    )


def epoch_ignored() -> AbstractContextManager[Any]:
    """The end of an epoch voids nothing, and late messages of it count."""

    def note(tx: Any, worker_id: str, epoch: int) -> None:
        tx.connection.exec_driver_sql(
            "INSERT INTO worker_epochs (worker_id, epoch, stream_id) VALUES (?, ?, '')"
            " ON CONFLICT (worker_id) DO UPDATE SET epoch = max(epoch, excluded.epoch)",
            (worker_id, epoch),
        )

    def ensure(tx: Any, worker_id: str, epoch: int, **_: Any) -> Any:
        note(tx, worker_id, epoch)
        return NO_EFFECTS

    def end(tx: Any, worker_id: str, epoch: int) -> Any:
        note(tx, worker_id, epoch)
        return 0, 0, NO_EFFECTS

    return all_of(everywhere(epochs.ensure_epoch, ensure), everywhere(epochs.end_epoch, end))


def drain_skipped() -> AbstractContextManager[Any]:
    """A revoked lease is freed at once, whoever is reading."""

    def revoke(own: Any, lease: Any, now_us: int) -> Any:
        if not lease.live:
            return Change(own, lease)
        ended = replace(lease, state=LeaseState.REVOKED, ended_us=now_us)
        return Change(domain._ended(own, OwnershipState.RELEASED, now_us), ended, free_now=True)

    return everywhere(domain.revoke, revoke)


def renew_revives() -> AbstractContextManager[Any]:
    """A lease past its deadline, not swept yet, is renewed."""
    return patch.object(Lease, "usable", lambda self, now_us: self.live)


def anchor_ignored() -> AbstractContextManager[Any]:
    """A hold is taken to begin when its report arrives."""
    return everywhere(domain.hold_deadline, lambda now_us, sent_by_us, hold_us: now_us + hold_us)


def expired_read_held_again() -> AbstractContextManager[Any]:
    """What a reader was reading when its lease ran out can be leased again."""
    old = domain.expire

    def expire(own: Any, lease: Any, now_us: int, config: Any) -> Any:
        over = lease is not None and lease.deadline_us <= now_us
        if over and lease.state is LeaseState.READING:
            ended = replace(lease, state=LeaseState.EXPIRED, ended_us=now_us)
            return Change(domain._held_again(own, now_us), ended)
        return old(own, lease, now_us, config)

    return everywhere(old, expire)


def ended_lease_begins() -> AbstractContextManager[Any]:
    """BeginRead takes a lease that has ended, with any token, of any epoch."""

    def begin(own: Any, lease: Any, holder: Any, token: int, **times: Any) -> Any:
        now_us, config = times["now_us"], times["config"]
        deadline = domain.renewed_deadline(
            lease, own.hold_deadline_us, times["ttl_us"], now_us, config
        )
        return replace(lease, state=LeaseState.READING, deadline_us=deadline)

    return everywhere(domain.begin_read, begin)


def cross_tenant() -> AbstractContextManager[Any]:
    """A session's newest ownership is looked for among all tenants'."""
    old = grants._lock_target

    def target(work: Any, order: Any) -> None:
        if not order.session_id:
            old(work, order)
            return
        rows = work.tx.connection.exec_driver_sql(
            "SELECT ownership_id FROM ownerships WHERE state <= 2 AND NOT for_decode"
        )
        work.lock([row[0] for row in rows.all()])

    return all_of(
        patch.object(grants, "_lock_target", target),
    )


def restart_forgets() -> AbstractContextManager[Any]:
    """A replica that starts throws away the leases that it finds."""
    old = Replica.start

    def start(self: Any, clock: Any) -> None:
        old(self, clock)
        if self._lives > 1:
            raw = self._store.raw
            raw.execute("DELETE FROM leases")
            raw.execute("UPDATE ownerships SET state = 1, lease_id = '' WHERE state = 2")

    return patch.object(Replica, "start", start)


def longer_counts_at_once() -> AbstractContextManager[Any]:
    """The hold moves when the order is given, not when the owner has agreed."""
    old = owners.extend_hold

    def extend(
        tx: Any, tenant_id: str, session_id: str, hold_us: int, command_ids: list[str]
    ) -> Any:
        answer = old(tx, tenant_id, session_id, hold_us, command_ids)
        tx.connection.exec_driver_sql(
            "UPDATE ownerships SET hold_deadline_us = max(hold_deadline_us, ?)"
            " WHERE tenant_id = ? AND session_id = ? AND state <= 2",
            (tx.now_us() + hold_us, tenant_id, session_id),
        )
        return answer

    return everywhere(old, extend)


def lost_holder_not_drained() -> AbstractContextManager[Any]:
    """A reader that is silent counts as dead: what it reads is freed at once."""
    old = domain.lose_holder

    def lose(own: Any, lease: Any, now_us: int) -> Any:
        if lease.state is LeaseState.READING:
            ended = replace(lease, state=LeaseState.LOST, ended_us=now_us)
            return Change(domain._ended(own, OwnershipState.RELEASED, now_us), ended, free_now=True)
        return old(own, lease, now_us)

    return everywhere(old, lose)


def newer_turn_frees_readers() -> AbstractContextManager[Any]:
    """A newer turn's report frees the older ones', leased or not."""

    def superseded(candidates: list[Any]) -> list[Any]:
        live = [own for own in candidates if own.live and not own.for_decode]
        newest = max((own.turn for own in live), default=0)
        return [replace(own, state=OwnershipState.HELD) for own in live if own.turn < newest]

    return everywhere(domain.superseded, superseded)


def any_holder_releases() -> AbstractContextManager[Any]:
    """A lease is released by whoever names it, read or not: it is held again."""
    old = domain.release

    def release(own: Any, lease: Any, outcome: Any, now_us: int) -> Any:
        return old(own, lease, Outcome.UNUSED, now_us)

    return all_of(
        everywhere(old, release), patch.object(holders, "_is_of", lambda lease, ref, holder: True)
    )


def begun_read_given_back() -> AbstractContextManager[Any]:
    """Who passed a lease on gives it back though its read has begun: it is held again."""
    old = domain.release

    def release(own: Any, lease: Any, outcome: Any, now_us: int) -> Any:
        never_begun = outcome is Outcome.NEVER_BEGUN
        return old(own, lease, Outcome.UNUSED if never_begun else outcome, now_us)

    return everywhere(old, release)


def no_slack() -> AbstractContextManager[Any]:
    """What a reader may be reading is freed when its lease ends, however slow its clock is."""
    expire, sweep = domain.expire, sweeping.sweep

    def strict(config: Any) -> Any:
        return replace(config, sweep_slack_s=0.0)

    return all_of(
        everywhere(sweep, lambda tx, config, rows: sweep(tx, strict(config), rows)),
        everywhere(
            expire, lambda own, lease, now_us, config: expire(own, lease, now_us, strict(config))
        ),
    )


def late_report_of_ended_session_held() -> AbstractContextManager[Any]:
    """A report that comes after its session's end is held."""
    return everywhere(sessions.ended, lambda tx, named: set())


def newer_turn_frees_nothing() -> AbstractContextManager[Any]:
    """Older turns of a session stay held when a newer one is reported, or when they come late."""
    return everywhere(domain.superseded, lambda candidates: [])


def outdated_turn_held_again() -> AbstractContextManager[Any]:
    """An older turn that is given back unread after a newer one's report stays held."""
    return everywhere(sessions.free_outdated, lambda work, now_us: None)


def free_now_never_sent() -> AbstractContextManager[Any]:
    """Owners are not told to free what is over: they hold it for its whole time."""
    return patch.object(Workspace, "order_free", lambda self, own, epoch: None)


def _frees_readers(of: str) -> AbstractContextManager[Any]:
    """What is beyond a limit `of` a worker or tenant is freed, whoever reads it."""
    free_holds = sql_keeping.free_holds

    def free(own: Any, _lease: Any, now_us: int) -> Any:
        return Change(domain._ended(own, OwnershipState.RELEASED, now_us), free_now=True)

    def frees(tx: Any, bound: Any, chosen: Any) -> Any:
        if not getattr(bound, of):
            return free_holds(tx, bound, chosen)
        with (
            patch.object(sql_keeping, "_is_idle", lambda own: own.live),
            patch.object(sql_keeping, "free", free),
        ):
            return free_holds(tx, bound, chosen)

    return all_of(
        everywhere(keeping.may_go, lambda hold, now_us, config: True),
        everywhere(free_holds, frees),
    )


def keeper_frees_readers() -> AbstractContextManager[Any]:
    """A worker short of blocks frees what is cheapest, whoever reads it."""
    return _frees_readers("worker_id")


def quota_frees_readers() -> AbstractContextManager[Any]:
    """A tenant beyond its hard limit loses what is cheapest, whoever reads it."""
    return _frees_readers("tenant_id")


PLANTED: dict[str, Plant] = {
    plant.__name__: plant
    for plant in (
        margin_removed, double_grant, epoch_ignored, drain_skipped, renew_revives,
        digests_not_compared, ids_not_cut, ttl_from_the_answer, anchor_ignored,
        expired_read_held_again, unused_after_sent, ended_lease_begins, cross_tenant,
        restart_forgets, longer_acked_before_done, longer_counts_at_once,
        lost_holder_not_drained, late_read_used, newer_turn_frees_readers,
        hold_without_margin, any_holder_releases, begun_read_given_back, no_slack,
        late_report_of_ended_session_held, newer_turn_frees_nothing, outdated_turn_held_again,
        free_now_never_sent, keeper_frees_readers, quota_frees_readers, lease_used_twice,
        lease_used_again,
    )
}  # fmt: skip

# Seeds that are tried first, so that a test of all does not take minutes.
CAUGHT_AT: dict[str, int] = {
    "anchor_ignored": 24,
    "begun_read_given_back": 6,
    "double_grant": 2,
    "expired_read_held_again": 2,
    "lease_used_again": 205,
    "lease_used_twice": 12,
    "lost_holder_not_drained": 63,
    "newer_turn_frees_readers": 5,
    "no_slack": 43,
    "outdated_turn_held_again": 14,
    "renew_revives": 12,
}
