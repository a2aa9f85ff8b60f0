"""What the keeper should do with what is held, and what of it is counted."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from kvplane.kernel.limits import Limits, Quotas
from kvplane.lease.holds import Usage
from kvplane.lease.store import GrantOrder
from kvplane.lease.values import Lease, Ownership, OwnershipState, Refusal
from properties import keeping_calls as calls
from properties.explain import Mismatch, expect
from properties.keeping_choice import lost_by_tenant, lost_on_worker, total, within
from properties.lease_model import LeaseModel
from properties.lease_owners import Failed
from properties.lease_state import GIVEN, LIVE
from properties.replicas import Rows

NOBODY = ""


@dataclass(frozen=True)
class KeepingModel(LeaseModel):
    """The lease store's model, and its holds'."""

    # What workers let be held, in blocks.
    most: dict[str, int] = field(default_factory=dict)
    quotas: dict[str, Quotas] = field(default_factory=dict)
    # Tokens times microseconds, by tenant; of nobody, until when that is.
    counted: dict[str, int] = field(default_factory=dict)

    def after(self, call: Any, answer: Any, at_once: Rows | None) -> Iterable["KeepingModel"]:
        """See `explain.Model`."""
        states = super().after(call, answer, at_once)
        if at_once is None and getattr(answer, "crowded", False):
            raise Mismatch("nobody else was there")
        if at_once is None and isinstance(call, calls.Keep):
            live = {own.ownership_id for own in self.owns.values() if own.state in LIVE}
            for state in states:
                expect(answer, sum(state.owns[i].state not in LIVE for i in live), "freed")
        if at_once is None and isinstance(call, calls.Count):
            expect(answer, True, "counted")
        return states

    def end_epochs(self, worker: str, current: int) -> tuple[int, int]:
        if self.known_epoch(worker) < current:
            self.most[worker] = 0
        return super().end_epochs(worker, current)

    def limitedhello(self, call: calls.LimitedHello, answer: Any) -> Failed | None:
        failed = self.hello(call, answer)
        if failed is None:
            self.most[call.worker] = call.blocks
        return failed

    def limitedgrant(self, call: calls.LimitedGrant, answer: Any) -> Failed | None:
        self.quotas.update(call.quotas)
        if not getattr(answer, "crowded", False):
            return self.grant(call, answer)
        # Another transaction was giving this tenant a lease.
        self.reach_epoch(call.order.holder.worker_id, call.order.holder.epoch)
        own = self._target(call.order)
        if own is None or not self.quotas[own.tenant_id].hard.live_leases:
            raise Mismatch("there is no limit")
        return None

    def _decide(self, own: Ownership, order: GrantOrder, lease_id: str) -> Refusal | Lease:
        most = self.quotas[own.tenant_id].hard.live_leases
        live = [
            one
            for one in self.leases.values()
            if one.tenant_id == own.tenant_id and self.usable(one)
        ]
        if not 0 < most <= len(live):
            return super()._decide(own, order, lease_id)
        # Another reason is told first.
        given = LeaseModel._decide(self.copy(), own, order, lease_id)
        return Refusal.OVER_QUOTA if isinstance(given, Lease) else given

    def free(self, call: calls.Free, answer: Any) -> None:
        freed = []
        limits = Limits(held_tokens=call.bound.tokens, held_blocks=call.bound.blocks)
        for hold in call.chosen:
            own = self.owns.get(hold.ownership_id)
            held = total(self._held(call.bound.tenant_id, call.bound.worker_id))
            if within(held, limits):
                break
            if own is not None and own.state is OwnershipState.HELD:
                self.free_held(own)
                freed.append(own)
        if not isinstance(answer, Exception):
            expect(answer[0], [own.ownership_id for own in freed], "freed")
            expect(answer[1], {own.worker_id for own in freed}, "who is told")

    def count(self, call: calls.Count, answer: Any) -> None:
        since_us = self.counted.get(NOBODY, 0)
        for own in self.owns.values():
            end_us = self.now_us if own.state in LIVE else own.ended_us
            held_us = max(0, end_us - max(own.reported_us, since_us))
            if own.num_tokens * held_us:
                before = self.counted.get(own.tenant_id, 0)
                self.counted[own.tenant_id] = before + own.num_tokens * held_us
        self.counted[NOBODY] = self.now_us

    def usage(self, call: calls.Usage, answer: Any) -> None:
        held = total(self._held(call.tenant))
        leases = [one for one in self.leases.values() if one.tenant_id == call.tenant]
        seconds = self.counted.get(call.tenant, 0) / 1_000_000
        expect(
            answer,
            Usage(
                held,
                sum(one.state in GIVEN for one in leases),
                _same(answer.held_token_seconds, seconds),
            ),
            "usage",
        )

    def keep(self, call: calls.Keep, answer: Any) -> None:
        self.count(calls.Count(), True)
        for tenant in calls.TENANTS:
            hard = call.quotas[tenant].hard
            for own in lost_by_tenant(self._held(tenant), hard, self.now_us):
                self.free_held(own)
        soft = {tenant: call.quotas[tenant].soft for tenant in calls.TENANTS}
        for worker, most in sorted(self.most.items()):
            if most:
                held = {tenant: total(self._held(tenant)) for tenant in calls.TENANTS}
                on_it = self._held(worker=worker)
                for own in lost_on_worker(on_it, most, held, soft, self.now_us):
                    self.free_held(own)

    def _held(self, tenant: str = "", worker: str = "") -> list[Ownership]:
        """Return what is live for a tenant, or on a worker."""
        return [
            own
            for own in self.owns.values()
            if own.state in LIVE and tenant in {"", own.tenant_id} and worker in {"", own.worker_id}
        ]

    def compare(self, rows: Rows) -> None:
        """See `explain.Model`."""
        super().compare(rows)
        most = {row["worker_id"]: row["hold_limit_blocks"] for row in rows["worker_epochs"]}
        expect(most, {worker: self.most.get(worker, 0) for worker in self.workers}, "limits")
        counted = {row["tenant_id"]: row for row in rows["tenant_holds"]}
        expect(counted.keys(), self.counted.keys(), "counted tenants")
        for tenant, row in counted.items():
            if tenant == NOBODY:
                expect(row["counted_until_us"], self.counted[NOBODY], "counted until")
            else:
                seconds = self.counted[tenant] / 1_000_000
                held = row["held_token_seconds"]
                expect(held, _same(held, seconds), f"token-seconds of {tenant}")


def _same(counted: float, wanted: float) -> float:
    """Return `counted` where only a float's rounding is between the two."""
    return counted if math.isclose(counted, wanted, rel_tol=1e-9) else wanted
