"""Tenants begin what their limits let them, and pay once, whatever is called in whichever order."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule, run_state_machine_as_test
from kvplane.session import tables
from kvplane.session.domain import SessionState
from kvplane.session.store_sql import SqlSessionStore
from properties import limits_calls as calls
from properties.limits_model import LimitsModel, let_in_too_much
from properties.machine import TIMEOUT_S, StoreMachine, replica_numbers
from properties.replicas import Replicas, Rows
from properties.session_calls import TENANTS
from properties.session_model import CONFIG
from sqlalchemy import Table

on = replica_numbers


class LimitsMachine(StoreMachine):
    """Calls of the session store by tenants with limits."""

    def __init__(self) -> None:
        super().__init__()
        self.model = LimitsModel(self.replicas.now_us)
        self.known = calls.KnownTurns()
        # How much was let in before the present limits.
        self.before = dict.fromkeys(TENANTS, 0)
        self.active = dict.fromkeys(TENANTS, 0)

    def learn(self, rows: Rows) -> None:
        made = sorted((s.create_us, s.session_id) for s in self.model.sessions.values())
        self.known.sessions += [one for one in made if one not in self.known.sessions]
        self.known.look(rows)
        for tenant in TENANTS:
            hard = self.known.quotas[tenant].hard
            active = sum(
                row["tenant_id"] == tenant and row["state"] == SessionState.ACTIVE
                for row in rows["sessions"]
            )
            most = max(self.active[tenant], hard.sessions)
            assert not hard.sessions or active <= most, "no more sessions than it may have"
            self.active[tenant] = active
            entries = self.let_in(tenant)[self.before[tenant] :]
            wrong = let_in_too_much(entries, hard.requests_per_second, hard.tokens_per_second)
            assert not wrong, wrong

    def let_in(self, tenant: str) -> list[tuple[int, int, int]]:
        return [entry for key, entry in self.model.let_in.items() if key[0] == tenant]

    @initialize(some=calls.quotas, others=calls.quotas)
    def begin_with(self, some, others):
        self.known.quotas = dict(zip(TENANTS, (some, others), strict=True))

    @rule(call=calls.begins(), replica=on)
    def begin(self, call, replica):
        self.make(call, replica)

    @rule(call=calls.begins(), replica=on)
    def begin_more(self, call, replica):
        self.make(call, replica)

    @rule(call=calls.creates(), replica=on)
    def create(self, call, replica):
        self.make(call, replica)

    @rule(call=calls.completes(), replica=on)
    def complete(self, call, replica):
        self.make(call, replica)

    @rule(call=calls.completes(), replica=on, again=on)
    def complete_twice(self, call, replica, again):
        self.make(call, replica)
        self.make(call, again)

    @rule(call=st.one_of(calls.ends, calls.usages), replica=on)
    def end_or_ask(self, call, replica):
        self.make(call, replica)

    @rule(call=st.one_of(calls.forgets, calls.expiries), replica=on)
    def sweep(self, call, replica):
        self.make(call, replica)

    @rule(tenant=calls.tenants, quotas=calls.quotas)
    def limit(self, tenant, quotas):
        self.known.quotas[tenant] = quotas
        self.before[tenant] = len(self.let_in(tenant))

    @rule(group=calls.groups)
    def at_once(self, group):
        self.make_at_once(group)

    @rule(some=st.tuples(*[calls.begins(1)] * 3), call=calls.completes(), replica=on)
    def complete_late(self, some, call, replica):
        """Others have begun since, and more do."""
        first, second, third = some
        self.make(first, replica)
        self.pass_time(2)
        self.make(second, replica)
        self.make(call, replica)
        self.make(third, replica)

    @rule(group=calls.bursts)
    def burst(self, group):
        self.make_at_once(group)

    @rule(seconds=st.sampled_from([0.25, 1, 2, 5, 5, 10, 40, 601, 86_400]))
    def time_passes(self, seconds):
        self.pass_time(seconds)


@pytest.mark.timeout(TIMEOUT_S)
def test_limits_store(url: str, fewer: settings) -> None:
    stored = [table for table in vars(tables).values() if isinstance(table, Table)]
    replicas = Replicas(url, stored, lambda database: SqlSessionStore(database, CONFIG))

    class Machine(LimitsMachine):
        pass

    Machine.replicas = replicas
    try:
        run_state_machine_as_test(Machine, settings=fewer)
    finally:
        replicas.close()
