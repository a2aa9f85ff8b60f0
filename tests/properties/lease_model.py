"""What the lease store should do, in plain Python, written from docs/protocol.md.

It shares the product's values and none of its rules.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from kvplane.kernel.errors import (
    IllegalTransition,
    InvalidField,
    NotFound,
    StaleEpoch,
    StaleFencingToken,
)
from kvplane.kernel.ids import derived
from kvplane.lease.store import GrantOrder, Renewal
from kvplane.lease.values import (
    Holder,
    Lease,
    LeaseState,
    Outcome,
    Ownership,
    OwnershipState,
    Refusal,
)
from properties import lease_calls as calls
from properties.explain import Mismatch, expect
from properties.lease_owners import Failed, Owners, age
from properties.lease_state import CONFIG, GIVEN, LIVE, Order, Remembered, micros
from properties.replicas import Rows

HELD, LEASED = OwnershipState.HELD, OwnershipState.LEASED


@dataclass(frozen=True)
class LeaseModel(Owners):
    """Each call is answered by the method of its name."""

    def after(self, call: Any, answer: Any, at_once: Rows | None) -> Iterable["LeaseModel"]:
        """See `explain.Model`."""
        if isinstance(call, calls.Sweep):
            return self.swept(call, answer, at_once)
        copy: LeaseModel = self.copy()
        if isinstance(call, calls.Purge):
            copy.purge(call, answer, at_once)
            return [copy]
        result = getattr(copy, type(call).__name__.lower())(call, answer)
        if isinstance(result, type):
            expect(type(answer), result, "answer")
        elif isinstance(answer, Exception):
            raise Mismatch(f"failed: {answer!r}")
        return [copy]

    def grant(self, call: calls.Grant, answer: Any) -> Failed | None:
        order = call.order
        holder = order.holder
        asked = (order.ownership_id, order.session_id, holder.worker_id, holder.epoch)
        key = (order.tenant_id or "", order.request_id)
        known = self.requests.get(key)
        if known is not None and known.asked != asked:
            return InvalidField
        if known is not None:
            self._granted_before(known, answer)
            return None
        if self.known_epoch(holder.worker_id) > holder.epoch:
            return StaleEpoch
        self.reach_epoch(holder.worker_id, holder.epoch)
        own = self._target(order)
        given: Refusal | Lease | None
        if own is None:
            given = self._absence(order, getattr(answer, "refusal", None)) if call.final else None
        else:
            given = self._decide(own, order, call.lease_id)
        if given is not None:
            lease_id = given.lease_id if isinstance(given, Lease) else ""
            refusal = None if isinstance(given, Lease) else given
            self.requests[key] = Remembered(asked, lease_id, refusal, self.now_us)
        if isinstance(answer, Exception):
            return None
        lease = given if isinstance(given, Lease) else None
        expect(answer.pending, given is None, "pending")
        expect(answer.lease, lease, "lease")
        expect(answer.refusal, None if lease else given, "refusal")
        expect(answer.ownership, self.owns[lease.ownership_id] if lease else None, "ownership")
        if lease:
            expect(bool(answer.payload.params), True, "params")
            expect(bool(answer.payload.digests), order.begin_read, "digests")
        return None

    def _granted_before(self, known: Remembered, answer: Any) -> None:
        if isinstance(answer, Exception):
            return
        lease = self.leases.get(known.lease_id)
        if lease is None:
            expect(answer.lease, None, "lease")
            expect(answer.refusal, known.refusal or Refusal.NOT_HELD, "refusal")
            return
        expect(answer.lease, lease, "lease")
        own = self.owns[lease.ownership_id] if self.usable(lease) else None
        expect(answer.ownership, own, "ownership")
        expect(answer.refusal, None, "refusal")

    def _target(self, order: GrantOrder) -> Ownership | None:
        """End what is over, and not being read, of what is asked for; return what may be read."""
        if not order.session_id:
            self._end_unread(order.ownership_id)
            own = self.owns.get(order.ownership_id)
            if own is None or not own.tenant_id:
                return None
            return own if order.tenant_id in {None, own.tenant_id} else None
        tenant_id = order.tenant_id or ""
        for own in self.of_session(tenant_id, order.session_id):
            self._end_unread(own.ownership_id)
        live = [
            own
            for own in self.of_session(tenant_id, order.session_id)
            if own.hold_deadline_us > self.now_us
        ]
        held = [own for own in live if own.state is HELD]
        return max(held or live, key=age, default=None)

    def _end_unread(self, ownership_id: str) -> None:
        own = self.owns.get(ownership_id)
        lease = self.leases.get(own.lease_id) if own is not None else None
        if lease is None or lease.state is LeaseState.GRANTED:
            self.end_overdue(ownership_id)

    def _absence(self, order: GrantOrder, answered: Refusal | None) -> Refusal:
        found = [
            own
            for own in self.owns.values()
            if (own.tenant_id, own.session_id) == (order.tenant_id, order.session_id)
            and order.session_id
            and not own.for_decode
        ]
        newest = max(((own.turn, own.reported_us) for own in found), default=None)
        lost = {
            own.state is OwnershipState.LOST
            for own in found
            if (own.turn, own.reported_us) == newest
        }
        # Of several equally new ones any may count.
        if answered is Refusal.OWNER_LOST or lost == {True}:
            return Refusal.OWNER_LOST if True in lost else Refusal.NOT_HELD
        return Refusal.NOT_HELD

    def _decide(self, own: Ownership, order: GrantOrder, lease_id: str) -> Refusal | Lease:
        if own.state is OwnershipState.LOST:
            return Refusal.OWNER_LOST
        if own.state not in LIVE or own.hold_deadline_us <= self.now_us:
            return Refusal.NOT_HELD
        if own.state is LEASED:
            return Refusal.ALREADY_LEASED
        if own.compatibility != order.holder.compatibility:
            return Refusal.INCOMPATIBLE
        if own.num_tokens < order.min_tokens:
            return Refusal.BELOW_THRESHOLD
        deadline_us = self._latest(_ttl(order.ttl_us), own.hold_deadline_us)
        if deadline_us < self.now_us + micros(CONFIG.min_ttl_s):
            return Refusal.EXPIRING
        lease = Lease(
            lease_id,
            own.tenant_id,
            own.session_id,
            own.ownership_id,
            own.fencing_token + 1,
            order.holder.worker_id,
            order.holder.epoch,
            self.now_us,
            LeaseState.READING if order.begin_read else LeaseState.GRANTED,
            deadline_us,
        )
        self.leases[lease_id] = lease
        self.owns[own.ownership_id] = replace(
            own, state=LEASED, lease_id=lease_id, fencing_token=lease.fencing_token
        )
        return lease

    def _latest(self, ttl_us: int, hold_deadline_us: int) -> int:
        return min(self.now_us + ttl_us, hold_deadline_us - micros(CONFIG.margin_s))

    def beginread(self, call: calls.BeginRead, answer: Any) -> Failed | None:
        lease = self.leases.get(call.ref.lease_id)
        own = self.owns.get(lease.ownership_id) if lease else None
        if lease is None or own is None or lease.holder_worker_id != call.holder.worker_id:
            return NotFound
        if lease.holder_epoch != call.holder.epoch:
            return StaleEpoch
        if not call.ref.fencing_token == lease.fencing_token == own.fencing_token:
            return StaleFencingToken
        if own.compatibility != call.holder.compatibility:
            return InvalidField
        if not self.usable(lease):
            return IllegalTransition
        deadline_us = max(lease.deadline_us, self._latest(_ttl(call.ttl_us), own.hold_deadline_us))
        lease = replace(lease, state=LeaseState.READING, deadline_us=deadline_us)
        self.leases[lease.lease_id] = lease
        if not isinstance(answer, Exception):
            expect(answer[:2], (lease, own), "begun")
            expect(bool(answer[2].params and answer[2].digests), True, "payload")
        return None

    def renew(self, call: calls.Renew, answer: Any) -> Failed | None:
        ttl_us = _ttl(call.ttl_us)
        answers = []
        for ref in call.refs:
            lease = self._of(ref, call.holder)
            if lease is None:
                answers.append(Renewal(ref.lease_id, renewed=False, state=None))
                continue
            if not self.usable(lease):
                state = LeaseState.EXPIRED if lease.state in GIVEN else lease.state
                answers.append(
                    Renewal(ref.lease_id, renewed=False, state=state, draining=lease.draining)
                )
                continue
            own = self.owns[lease.ownership_id]
            deadline_us = max(lease.deadline_us, self._latest(ttl_us, own.hold_deadline_us))
            self.leases[lease.lease_id] = replace(lease, deadline_us=deadline_us)
            if deadline_us < self.now_us + ttl_us:
                self._ask_to_hold(own, ttl_us)
            answers.append(
                Renewal(
                    ref.lease_id,
                    renewed=True,
                    state=lease.state,
                    ttl_us=deadline_us - self.now_us,
                )
            )
        if not isinstance(answer, Exception):
            expect(answer[0], answers, "renewed")
        return None

    def _ask_to_hold(self, own: Ownership, ttl_us: int) -> None:
        until_us = self.now_us + min(
            3 * ttl_us + micros(CONFIG.margin_s), micros(CONFIG.max_hold_s)
        )
        if own.hold_deadline_us < until_us:
            order = Order(own.worker_id, until_us, self.now_us, until_us)
            # Once for each end of the hold, which is what the id says.
            ident = derived("hold", own.ownership_id, str(own.hold_deadline_us))
            self.commands.setdefault((own.ownership_id, own.epoch, ident), order)

    def release(self, call: calls.Release, answer: Any) -> Failed | None:
        states: list[LeaseState | None] = []
        for ref in call.refs:
            lease = self._of(ref, call.holder)
            begun = lease is not None and lease.state is not LeaseState.GRANTED
            void = begun and ref.outcome is Outcome.NEVER_BEGUN
            if lease is not None and lease.ownership_id in self.owns and not void:
                self.released(lease, consumed=ref.outcome is Outcome.CONSUMED)
            states.append(self.leases[lease.lease_id].state if lease else None)
        self.free_outdated()
        if not isinstance(answer, Exception):
            expect(answer[0], states, "released")
        return None

    def revoke(self, call: calls.Revoke, answer: Any) -> Failed | None:
        lease = self.leases.get(call.lease_id)
        if lease is None or lease.tenant_id != call.tenant or lease.ownership_id not in self.owns:
            return NotFound
        if lease.state in GIVEN:
            self.revoked(lease)
        elif lease.state is not LeaseState.REVOKED:
            return IllegalTransition
        if not isinstance(answer, Exception):
            expect(answer[0], self.leases[call.lease_id], "revoked")
        return None

    def freesession(self, call: calls.FreeSession, answer: Any) -> Failed | None:
        self.ended.setdefault((call.tenant, call.session), self.now_us)
        freed = draining = 0
        for own in self.of_session(call.tenant, call.session, with_for_decode=True):
            lease = self.leases.get(own.lease_id)
            if own.state is HELD:
                self.free_held(own)
            elif lease is not None and lease.state in GIVEN:
                self.revoked(lease)
            still = self.owns[own.ownership_id].state in LIVE
            draining += still
            freed += not still
        if not isinstance(answer, Exception):
            expect(answer[:2], (freed, draining), "freed and draining")
        return None

    def _of(self, ref: Any, holder: Holder) -> Lease | None:
        lease = self.leases.get(ref.lease_id)
        if lease is None or lease.fencing_token != ref.fencing_token:
            return None
        mine = (lease.holder_worker_id, lease.holder_epoch) == (holder.worker_id, holder.epoch)
        return lease if mine else None


def _ttl(asked_us: int) -> int:
    wanted_us = asked_us or micros(CONFIG.ttl_s)
    return max(micros(CONFIG.min_ttl_s), min(wanted_us, micros(CONFIG.max_ttl_s)))
