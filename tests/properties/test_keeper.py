"""What is held stays within limits, and is counted, whatever is called in whichever order."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule, run_state_machine_as_test
from kvplane.lease.sql import tables
from properties import keeping_calls as calls
from properties import lease_drawn as drawn
from properties.keeping_model import KeepingModel
from properties.lease_state import check_change, check_rows
from properties.machine import TIMEOUT_S, StoreMachine, replica_numbers
from properties.replicas import Replicas, Rows
from sqlalchemy import Table

on = replica_numbers


class KeeperMachine(StoreMachine):
    """Calls of the lease store that limits and sums are about, and the keeper's rounds."""

    def __init__(self) -> None:
        super().__init__()
        self.model = KeepingModel(self.replicas.now_us)
        self.known = calls.KnownHolds(now_us=self.replicas.now_us)
        self.rows = self.replicas.rows()

    def learn(self, rows: Rows) -> None:
        check_rows(rows)
        check_change(self.rows, rows)
        counted = {row["tenant_id"]: row["held_token_seconds"] for row in rows["tenant_holds"]}
        for row in self.rows["tenant_holds"]:
            assert counted[row["tenant_id"]] >= row["held_token_seconds"], "it only grows"
        self.rows = rows
        self.known.look(rows)

    @initialize(made=calls.beginnings, quotas=st.lists(calls.quotas, min_size=3, max_size=3))
    def begin_with(self, made, quotas):
        self.known.quotas = dict(zip(calls.TENANTS, quotas, strict=True))
        for call in made:
            self.make(call, 0)

    @rule(call=calls.reports(), replica=on)
    def report(self, call, replica):
        self.make(call, replica)

    @rule(call=st.one_of(calls.hellos(), calls.withdrawals(), calls.epoch_ends()), replica=on)
    def owner_says(self, call, replica):
        self.make(call, replica)

    @rule(some=st.lists(calls.grants(), min_size=1, max_size=4), replica=on)
    def grant(self, some, replica):
        for call in some:
            self.make(call, replica)

    @rule(call=calls.reads, replica=on)
    def read(self, call, replica):
        self.make(call, replica)

    @rule(call=st.one_of(drawn.sweeps, drawn.purges), replica=on)
    def sweep(self, call, replica):
        self.make(call, replica)

    @rule(call=calls.usages, replica=on)
    def usage(self, call, replica):
        self.make(call, replica)

    @rule(call=st.one_of(calls.frees(), calls.counts), replica=on)
    def free_or_count(self, call, replica):
        self.make(call, replica)

    @rule(tenant=calls.tenants, quotas=calls.quotas)
    def limit(self, tenant, quotas):
        self.known.quotas[tenant] = quotas

    @rule(call=calls.keeps, replica=on)
    def keep(self, call, replica):
        self.make(call, replica)

    @rule(call=calls.keeps, tenant=calls.tenants, quotas=calls.quotas, replica=on)
    def limit_and_keep(self, call, tenant, quotas, replica):
        self.known.quotas[tenant] = quotas
        self.make(call, replica)

    @rule(call=calls.keeps)
    def keep_at_both(self, call):
        self.make_at_once([(call, 0), (call, 1)])

    @rule(group=calls.groups)
    def at_once(self, group):
        self.make_at_once(group)

    @rule(group=calls.bursts)
    def grants_at_once(self, group):
        self.make_at_once(group)

    @rule(seconds=st.sampled_from([0.5, 1, 3, 9.5, 11, 60, 120, 601]))
    def time_passes(self, seconds):
        self.pass_time(seconds)
        self.known.now_us = self.replicas.now_us


@pytest.mark.timeout(TIMEOUT_S)
def test_keeper(url: str, fewer: settings) -> None:
    stored = [table for table in vars(tables).values() if isinstance(table, Table)]
    replicas = Replicas(url, stored, calls.KeptStore)

    class Machine(KeeperMachine):
        pass

    Machine.replicas = replicas
    try:
        run_state_machine_as_test(Machine, settings=fewer)
    finally:
        replicas.close()
