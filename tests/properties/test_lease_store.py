"""The lease store is what its docstrings say, whatever is called in whichever order."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule, run_state_machine_as_test
from kvplane.lease.sql import tables
from kvplane.lease.store_sql import SqlLeaseStore
from properties import lease_drawn as drawn
from properties.lease_model import LeaseModel
from properties.lease_state import CONFIG, check_change, check_rows
from properties.machine import TIMEOUT_S, StoreMachine, replica_numbers
from properties.replicas import Replicas, Rows
from sqlalchemy import Table

on = replica_numbers


class LeaseMachine(StoreMachine):
    """Calls of the lease store."""

    def __init__(self) -> None:
        super().__init__()
        self.model = LeaseModel(self.replicas.now_us)
        self.known = drawn.Known(now_us=self.replicas.now_us)
        self.rows = self.replicas.rows()

    def learn(self, rows: Rows) -> None:
        check_rows(rows)
        check_change(self.rows, rows)
        self.rows = rows
        self.known.look(rows)

    @initialize(made=drawn.beginnings)
    def begin_with(self, made):
        for call in made:
            self.make(call, 0)

    @rule(call=drawn.reports(), replica=on)
    def report(self, call, replica):
        self.make(call, replica)

    @rule(call=drawn.withdrawals(), replica=on)
    def withdraw(self, call, replica):
        self.make(call, replica)

    @rule(call=drawn.hellos(), replica=on)
    def hello(self, call, replica):
        self.make(call, replica)

    @rule(call=drawn.epoch_ends(), replica=on)
    def end_epoch(self, call, replica):
        self.make(call, replica)

    @rule(call=drawn.grants(), replica=on)
    def grant(self, call, replica):
        self.make(call, replica)

    @rule(call=drawn.grants(), replica=on)
    def grant_more(self, call, replica):
        self.make(call, replica)

    @rule(call=drawn.begins(), replica=on)
    def begin_read(self, call, replica):
        self.make(call, replica)

    @rule(call=drawn.renewals(), replica=on)
    def renew(self, call, replica):
        self.make(call, replica)

    @rule(call=drawn.releases(), replica=on)
    def release(self, call, replica):
        self.make(call, replica)

    @rule(call=drawn.revocations(), replica=on)
    def revoke(self, call, replica):
        self.make(call, replica)

    @rule(call=drawn.session_ends(), replica=on)
    def free_session(self, call, replica):
        self.make(call, replica)

    @rule(call=drawn.extensions(), replica=on)
    def extend_hold(self, call, replica):
        self.make(call, replica)

    @rule(call=drawn.acknowledgements(), replica=on)
    def acknowledge(self, call, replica):
        self.make(call, replica)

    @rule(call=drawn.sweeps, replica=on)
    def sweep(self, call, replica):
        self.make(call, replica)

    @rule(call=drawn.purges, replica=on)
    def purge(self, call, replica):
        self.make(call, replica)

    @rule(call=drawn.lookups(), replica=on)
    def look_up(self, call, replica):
        self.make(call, replica)

    @rule(group=drawn.groups)
    def at_once(self, group):
        self.make_at_once(group)

    @rule(group=drawn.groups)
    def at_once_again(self, group):
        self.make_at_once(group)

    @rule(seconds=st.sampled_from([0.1, 0.4, 1, 1, 3, 8, 10, 30, 60, 480, 601]))
    def time_passes(self, seconds):
        self.pass_time(seconds)
        self.known.now_us = self.replicas.now_us

    @rule(edge=st.sampled_from([0, 0.499999, 0.5, -0.000001]), call=drawn.at_the_edge, replica=on)
    def comes_at_the_end(self, edge, call, replica):
        """Go to where the lease that ends next ends, or nearly, and use it."""
        ends = [one.deadline_us for one in self.known.leases if not one.ended_us]
        seconds = (min(ends, default=0) - self.replicas.now_us) / 1e6 + edge
        if seconds > 0:
            self.time_passes(seconds)
        self.make(call, replica)


@pytest.mark.timeout(TIMEOUT_S)
def test_lease_store(url: str, machine_settings: settings) -> None:
    stored = [table for table in vars(tables).values() if isinstance(table, Table)]
    replicas = Replicas(url, stored, lambda database: SqlLeaseStore(database, CONFIG))

    class Machine(LeaseMachine):
        pass

    Machine.replicas = replicas
    try:
        run_state_machine_as_test(Machine, settings=machine_settings)
    finally:
        replicas.close()
