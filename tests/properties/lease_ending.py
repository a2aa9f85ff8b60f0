"""How ownerships and leases end in the model."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any, Self

from kvplane.lease.values import Lease, LeaseState, Ownership, OwnershipState
from properties.explain import Mismatch, expect
from properties.lease_state import CONFIG, GIVEN, LIVE, LeaseRows, Order, command_key, micros
from properties.replicas import Rows

HELD, LEASED = OwnershipState.HELD, OwnershipState.LEASED
GRANTED, READING = LeaseState.GRANTED, LeaseState.READING


@dataclass(frozen=True)
class Ending(LeaseRows):
    """Changes the rows in place; a call works on a copy."""

    def usable(self, lease: Lease) -> bool:
        return lease.state in GIVEN and self.now_us < lease.deadline_us

    def of_session(
        self, tenant: str, session: str, *, with_for_decode: bool = False
    ) -> list[Ownership]:
        """Return what is live of a session."""
        return [
            own
            for own in self.owns.values()
            if (own.tenant_id, own.session_id) == (tenant, session)
            and own.state in LIVE
            and (with_for_decode or not own.for_decode)
        ]

    def end(self, own: Ownership, state: OwnershipState, lease_id: str = "") -> None:
        self.owns[own.ownership_id] = replace(
            own, state=state, lease_id=lease_id, ended_us=self.now_us
        )

    def end_lease(self, lease: Lease, state: LeaseState, *, draining: bool = False) -> None:
        self.leases[lease.lease_id] = replace(
            lease, state=state, draining=draining, ended_us=self.now_us
        )

    def give_back(self, own: Ownership) -> None:
        """Make it HELD again, if its owner still holds it."""
        if own.hold_deadline_us <= self.now_us:
            self.end(own, OwnershipState.EXPIRED)
        else:
            self.owns[own.ownership_id] = replace(own, state=HELD, lease_id="")

    def order_free(self, own: Ownership, epoch: int) -> None:
        """Order it freed, once."""
        until_us = max(self.now_us, own.hold_deadline_us) + micros(60)
        order = Order(own.worker_id, 0, self.now_us, until_us)
        self.commands.setdefault((own.ownership_id, epoch, ""), order)

    def forget_orders(self, ownership_id: str) -> None:
        for key in [key for key in self.commands if key[0] == ownership_id]:
            del self.commands[key]

    def free_held(self, own: Ownership) -> None:
        self.end(own, OwnershipState.RELEASED)
        self.order_free(own, own.epoch)

    def free_outdated(self) -> None:
        """Free what is held of a session that has a live later turn."""
        for own in list(self.owns.values()):
            if own.state is not HELD or own.for_decode or not own.session_id:
                continue
            live = self.of_session(own.tenant_id, own.session_id)
            if any(other.turn > own.turn for other in live):
                self.free_held(own)

    def withdrawn(self, own: Ownership, *, and_orders: bool = True) -> OwnershipState:
        """Believe the owner that it is free, whoever reads it."""
        if and_orders:
            self.forget_orders(own.ownership_id)
        lease = self.leases.get(own.lease_id)
        if own.state is HELD:
            self.end(own, OwnershipState.EXPIRED)
        elif lease is not None and lease.state is GRANTED:
            self.end(own, OwnershipState.EXPIRED)
            self.end_lease(lease, LeaseState.REVOKED)
        elif lease is not None and lease.state is READING:
            self.end(own, OwnershipState.CONSUMED)
            self.end_lease(lease, LeaseState.CONSUMED)
        elif lease is not None:
            self.drained(own, lease, OwnershipState.CONSUMED)
        return self.owns[own.ownership_id].state

    def drained(self, own: Ownership, lease: Lease, state: OwnershipState) -> int:
        """End a drain; return in which epoch the owner is to be told."""
        self.leases[lease.lease_id] = replace(lease, draining=False)
        if own.state in LIVE:
            self.end(own, state)
            return own.epoch
        self.owns[own.ownership_id] = replace(own, lease_id="")
        return self.known_epoch(own.worker_id)

    def released(self, lease: Lease, *, consumed: bool) -> None:
        """Take the holder's word for what it did."""
        own = self.owns[lease.ownership_id]
        if lease.state in GIVEN:
            self.end_lease(lease, LeaseState.CONSUMED if consumed else LeaseState.RELEASED)
            if consumed:
                self.end(own, OwnershipState.CONSUMED)
            else:
                self.give_back(own)
        elif lease.draining:
            state = OwnershipState.CONSUMED if consumed else OwnershipState.RELEASED
            self.order_free(own, self.drained(own, lease, state))
        elif (
            consumed
            and lease.state is not LeaseState.CONSUMED
            and own.state is HELD
            and own.fencing_token == lease.fencing_token
        ):
            # Read after all, and nobody has got it since.
            self.end(own, OwnershipState.CONSUMED)
            self.order_free(own, own.epoch)

    def revoked(self, lease: Lease) -> None:
        own = self.owns[lease.ownership_id]
        if lease.state is READING:
            self.end_lease(lease, LeaseState.REVOKED, draining=True)
        else:
            self.end_lease(lease, LeaseState.REVOKED)
            self.free_held(own)

    def known_epoch(self, worker: str) -> int:
        return self.workers.get(worker, (0, ""))[0]

    def reach_epoch(self, worker: str, epoch: int) -> None:
        """Take note of an epoch that is not older than the known one."""
        if worker not in self.workers:
            self.workers[worker] = (epoch, "")
        elif self.known_epoch(worker) < epoch:
            self.end_epochs(worker, epoch)

    def end_epochs(self, worker: str, current: int) -> tuple[int, int]:
        """End what it owned and held before; return how many of each."""
        if self.known_epoch(worker) < current:
            self.workers[worker] = (current, "")
        for key, order in list(self.commands.items()):
            if order.worker_id == worker and key[1] < current:
                del self.commands[key]
        lost = [
            own
            for own in self.owns.values()
            if own.worker_id == worker and own.epoch < current and own.state in LIVE
        ]
        leases: set[str] = set()
        for own in lost:
            lease = self.leases.get(own.lease_id)
            if lease is not None and lease.state in GIVEN:
                self.end_lease(lease, LeaseState.LOST, draining=lease.state is READING)
                leases.add(lease.lease_id)
            drains = lease is not None and self.leases[lease.lease_id].draining
            self.end(own, OwnershipState.LOST, own.lease_id if drains else "")
        for lease in list(self.leases.values()):
            mine = lease.holder_worker_id == worker and lease.holder_epoch < current
            if not mine or lease.state not in GIVEN:
                continue
            self.end_lease(lease, LeaseState.LOST, draining=lease.state is READING)
            leases.add(lease.lease_id)
            if lease.state is GRANTED:
                self.give_back(self.owns[lease.ownership_id])
        self.free_outdated()
        return len(lost), len(leases)

    def overdue(self, own: Ownership) -> bool:
        """Tell whether a sweep would end something of it."""
        lease = self.leases.get(own.lease_id)
        if lease is None:
            return own.state is HELD and own.hold_deadline_us <= self.now_us
        slack_us = 0 if lease.state is GRANTED else micros(CONFIG.sweep_slack_s)
        return lease.deadline_us + slack_us <= self.now_us

    def end_overdue(self, ownership_id: str) -> None:
        """End what time has ended of it."""
        own = self.owns.get(ownership_id)
        if own is None or not self.overdue(own):
            return
        lease = self.leases.get(own.lease_id)
        if lease is None:
            self.end(own, OwnershipState.EXPIRED)
        elif lease.state is GRANTED:
            self.end_lease(lease, LeaseState.EXPIRED)
            self.give_back(own)
            self.free_outdated()
        elif lease.state is READING:
            self.end_lease(lease, LeaseState.EXPIRED)
            self.free_held(own)
        else:
            self.order_free(own, self.drained(own, lease, OwnershipState.RELEASED))

    def swept(self, call: Any, answer: Any, at_once: Rows | None) -> Iterable[Self]:
        leases, holds = self._due()
        if isinstance(answer, Exception):
            raise Mismatch(f"failed: {answer!r}")
        if at_once is None:
            expect(answer.ended_leases, min(call.rows, len(leases)), "ended leases")
            expect(answer.ended_ownerships, min(call.rows, len(holds)), "ended holds")
            full = call.rows <= max(len(leases), len(holds))
            expect(answer.more, full, "more")
        for some in combinations(leases, answer.ended_leases):
            for others in combinations(holds, answer.ended_ownerships):
                if at_once is None and not (_oldest(leases, some) and _oldest(holds, others)):
                    continue
                copy = self.copy()
                for _, ident in (*some, *others):
                    copy.end_overdue(ident)
                yield copy

    def _due(self) -> tuple[list[tuple[int, str]], list[tuple[int, str]]]:
        """Return ownerships with an overdue lease, and overdue holds, each with when."""
        leases, holds = [], []
        for ident, own in self.owns.items():
            if not self.overdue(own):
                continue
            if own.lease_id:
                leases.append((self.leases[own.lease_id].deadline_us, ident))
            else:
                holds.append((own.hold_deadline_us, ident))
        return leases, holds

    def purge(self, call: Any, answer: Any, at_once: Rows | None) -> None:
        """Delete what is old; at once with others, what of it is there no more."""
        old_us = self.now_us - call.retention_us
        left = _keys(at_once) if at_once is not None else set()
        count = 0

        def purged(rows: dict[Any, Any], old: Any) -> None:
            nonlocal count
            for key, row in list(rows.items()):
                at_us = old(row)
                if at_us is not None and (key, at_us) not in left:
                    del rows[key]
                    count += 1

        purged(self.leases, lambda r: _old(r.ended_us, old_us) if not r.draining else None)
        purged(self.owns, lambda r: _old(r.ended_us, old_us) if not r.lease_id else None)
        purged(self.requests, lambda r: _old(r.answered_us, old_us))
        purged(self.ended, lambda at_us: _old(at_us, old_us))
        purged(self.commands, lambda r: _old(r.expire_us, self.now_us))
        if at_once is None:
            expect(answer, count, "purged")


def _old(at_us: int, old_us: int) -> int | None:
    return at_us if 0 < at_us <= old_us else None


def _oldest(due: list[tuple[int, str]], taken: tuple[tuple[int, str], ...]) -> bool:
    """Tell whether nothing older was passed over."""
    newest_us = max((at_us for at_us, _ in taken), default=0)
    return not taken or all(at_us >= newest_us for at_us, ident in set(due) - set(taken))


def _keys(rows: Rows) -> set[tuple[Any, int]]:
    """Return what is there, each with the time that its age is counted from."""
    found: set[tuple[Any, int]] = set()
    found |= {(r["lease_id"], r["ended_us"]) for r in rows["leases"]}
    found |= {(r["ownership_id"], r["ended_us"]) for r in rows["ownerships"]}
    found |= {((r["tenant_id"], r["request_id"]), r["answered_us"]) for r in rows["lease_requests"]}
    found |= {((r["tenant_id"], r["session_id"]), r["ended_us"]) for r in rows["ended_sessions"]}
    found |= {(command_key(r), r["expire_us"]) for r in rows["lease_commands"]}
    return found
