"""What owners say and are told, by the model."""

from dataclasses import dataclass, replace
from typing import Any

from kvplane.kernel.errors import InvalidField, StaleEpoch, Unavailable
from kvplane.lease.values import Ownership, OwnershipState
from properties import lease_calls as calls
from properties.explain import expect
from properties.lease_lookups import Lookups
from properties.lease_state import CONFIG, LIVE, Order, micros

HELD = OwnershipState.HELD
Failed = type[Exception]


@dataclass(frozen=True)
class Owners(Lookups):
    """Calls of owners, and those that concern them."""

    def report(self, call: calls.Report, answer: Any) -> Failed | None:
        tenants: dict[str, str] = {}
        for item in call.items:
            own = item.ownership
            known = self.owns.get(own.ownership_id)
            if known is not None and known.state in LIVE:
                tenants.setdefault(own.ownership_id, known.tenant_id)
                if known.worker_id != call.worker:
                    return InvalidField
            if tenants.setdefault(own.ownership_id, own.tenant_id) != own.tenant_id:
                return InvalidField
        if self.known_epoch(call.worker) > call.epoch:
            return StaleEpoch
        self.reach_epoch(call.worker, call.epoch)
        if call.stream is not None and self.workers[call.worker][1] != call.stream:
            return Unavailable
        last = {item.ownership.ownership_id: item for item in call.items}
        for ident, item in last.items():
            hold_us = micros(CONFIG.unknown_hold_s) if item.hold_us is None else item.hold_us
            hold_us = min(hold_us, micros(CONFIG.max_hold_s))
            until_us = min(self.now_us, call.sent_by_us) + hold_us
            known = self.owns.get(ident)
            if known is None:
                self._report_new(item.ownership, until_us)
            elif known.state in LIVE:
                until_us = max(until_us, known.hold_deadline_us)
                self.owns[ident] = replace(known, hold_deadline_us=until_us)
            elif (
                known.state is OwnershipState.LOST
                and not known.lease_id
                and known.worker_id == call.worker
            ):
                self.order_free(known, call.epoch)
        self.free_outdated()
        if not isinstance(answer, Exception):
            stored = [self.owns[item.ownership.ownership_id] for item in call.items]
            expect(
                [(o.state, o.hold_deadline_us, o.lease_id) for o in answer.ownerships],
                [(o.state, o.hold_deadline_us, o.lease_id) for o in stored],
                "reported",
            )
            expect(answer.now_us, self.now_us, "time")
        return None

    def _report_new(self, own: Ownership, until_us: int) -> None:
        over = until_us <= self.now_us
        own = replace(
            own,
            state=OwnershipState.EXPIRED if over else HELD,
            hold_deadline_us=until_us,
            reported_us=self.now_us,
            ended_us=self.now_us if over else 0,
        )
        self.owns[own.ownership_id] = own
        if not over and own.session_id and (own.tenant_id, own.session_id) in self.ended:
            self.free_held(own)

    def withdraw(self, call: calls.Withdraw, answer: Any) -> Failed | None:
        if self.known_epoch(call.worker) > call.epoch:
            return StaleEpoch
        self.reach_epoch(call.worker, call.epoch)
        states: dict[str, OwnershipState | None] = {}
        for handle in call.handles:
            ident = handle.ownership_id
            if ident in states:
                continue
            own = self.owns.get(ident)
            states[ident] = None
            if own is None:
                self.owns[ident] = calls.never_reported(
                    call.worker, call.epoch, handle, self.now_us
                )
            elif own.tenant_id and own.worker_id == call.worker:
                states[ident] = self.withdrawn(own)
        if not isinstance(answer, Exception):
            wanted = [states[handle.ownership_id] for handle in call.handles]
            expect(answer.states, wanted, "withdrawn")
        return None

    def hello(self, call: calls.Hello, answer: Any) -> Failed | None:
        if self.known_epoch(call.worker) > call.epoch:
            return StaleEpoch
        self.reach_epoch(call.worker, call.epoch)
        stream = self.workers[call.worker][1]
        if call.stream != stream and call.number <= calls.stream_number(stream):
            return Unavailable
        self.workers[call.worker] = (call.epoch, call.stream)
        named = {handle.ownership_id for handle in call.held}
        for ident, own in list(self.owns.items()):
            if own.worker_id != call.worker or not own.tenant_id:
                continue
            if own.state in LIVE and ident not in named:
                self.withdrawn(own)
            elif own.state not in LIVE and ident in named and not own.lease_id:
                self.order_free(own, call.epoch)
        return None

    def endepoch(self, call: calls.EndEpoch, answer: Any) -> Failed | None:
        owned, held = self.end_epochs(call.worker, call.current)
        if not isinstance(answer, Exception):
            expect(answer[:2], (owned, held), "lost")
        return None

    def extendhold(self, call: calls.ExtendHold, answer: Any) -> Failed | None:
        until_us = self.now_us + call.hold_us
        found = self.of_session(call.tenant, call.session, with_for_decode=True)
        short = [own for own in found if own.hold_deadline_us < until_us]
        asked = sorted(short, key=age, reverse=True)[: len(call.command_ids)]
        for own, ident in zip(asked, call.command_ids, strict=False):
            self.forget_orders(own.ownership_id)
            order = Order(own.worker_id, until_us, self.now_us, until_us)
            self.commands[own.ownership_id, own.epoch, ident] = order
        if not isinstance(answer, Exception):
            expect(answer[0], len(asked), "asked")
            expect(answer[1].commanded, {own.worker_id for own in asked}, "commanded")
        return None

    def acknowledge(self, call: calls.Acknowledge, answer: Any) -> Failed | None:
        if self.known_epoch(call.worker) > call.epoch:
            return StaleEpoch
        self.reach_epoch(call.worker, call.epoch)
        order = self.commands.get(call.command)
        if order is None or order.worker_id != call.worker:
            return None
        del self.commands[call.command]
        own = self.owns.get(call.command[0])
        if own is not None and order.hold_until_us:
            until_us = min(self.now_us, call.sent_by_us) + call.hold_us
            if not call.done:
                self.withdrawn(own, and_orders=False)
            elif own.state in LIVE and until_us > own.hold_deadline_us:
                self.owns[own.ownership_id] = replace(own, hold_deadline_us=until_us)
        return None


def age(own: Ownership) -> tuple[int, int, str]:
    return own.turn, own.reported_us, own.ownership_id
