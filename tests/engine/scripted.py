"""A WorkerAgent that answers what a test tells it to."""

from dataclasses import dataclass, field

from kvplane.worker.agent import Held, HoldLonger, Order, Pending, Permit, Refused


@dataclass
class ScriptedAgent:
    """Records what the engine says. `answers` are given one by one, the last one for ever."""

    answers: list = field(default_factory=lambda: [Refused("told so")])
    starts: bool = True
    valid: bool = True
    begun: list = field(default_factory=list)
    finished: list = field(default_factory=list)
    abandoned: list[str] = field(default_factory=list)
    held: list[Held] = field(default_factory=list)
    freed: list[str] = field(default_factory=list)
    orders: list[Order] = field(default_factory=list)
    done: list = field(default_factory=list)

    def begin_read(self, local_id, tokens, **how):
        self.begun.append((local_id, how))

    def poll_read(self, local_id):
        return self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]

    def read_started(self, local_id):
        return self.starts

    def still_valid(self, local_id):
        return self.valid

    def read_finished(self, local_id, *, sent, failed=False):
        self.finished.append((local_id, sent, failed))

    def abandon(self, local_id):
        self.abandoned.append(local_id)

    def report_held(self, held):
        self.held.append(held)

    def report_freed(self, request_ids):
        self.freed.extend(request_ids)

    def take_orders(self):
        orders, self.orders = self.orders, []
        return orders

    def order_done(self, order, *, done, hold_seconds=0.0):
        self.done.append((order, done, round(hold_seconds, 1)))

    def set_load(self, **load):
        self.load = load


__all__ = ["HoldLonger", "Pending", "Permit", "Refused", "ScriptedAgent"]
