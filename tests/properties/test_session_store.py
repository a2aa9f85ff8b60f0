"""The session store is what its docstrings say, whatever is called in whichever order."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule, run_state_machine_as_test
from kvplane.session.store_sql import SqlSessionStore
from kvplane.session.tables import session_history, sessions, tenant_usage, turns, unheld_turns
from properties import session_calls as calls
from properties.machine import TIMEOUT_S, StoreMachine, replica_numbers
from properties.replicas import Replicas, Rows
from properties.session_model import CONFIG, SessionModel

on = replica_numbers


class SessionMachine(StoreMachine):
    """Calls of the session store."""

    def __init__(self) -> None:
        super().__init__()
        self.model = SessionModel(self.replicas.now_us)
        self.known = calls.Known()

    def learn(self, rows: Rows) -> None:
        made = sorted((s.create_us, s.session_id) for s in self.model.sessions.values())
        self.known.sessions += [one for one in made if one not in self.known.sessions]

    @initialize(made=calls.beginnings)
    def begin_with(self, made):
        for call in made:
            self.make(call, 0)

    @rule(call=calls.begins(), replica=on)
    def begin(self, call, replica):
        self.make(call, replica)

    @rule(call=calls.completes(), replica=on)
    def complete(self, call, replica):
        self.make(call, replica)

    @rule(call=calls.creates(), replica=on)
    def create(self, call, replica):
        self.make(call, replica)

    @rule(call=calls.referring(calls.Get), replica=on)
    def get(self, call, replica):
        self.make(call, replica)

    @rule(call=calls.referring(calls.End), replica=on)
    def end(self, call, replica):
        self.make(call, replica)

    @rule(call=calls.lists(), replica=on)
    def list_sessions(self, call, replica):
        self.make(call, replica)

    @rule(call=calls.changes(), replica=on)
    def changes(self, call, replica):
        self.make(call, replica)

    @rule(call=calls.freed(), replica=on)
    def freed(self, call, replica):
        self.make(call, replica)

    @rule(call=calls.sweeping(calls.ExpireIdle), replica=on)
    def expire_idle(self, call, replica):
        self.make(call, replica)

    @rule(call=calls.sweeping(calls.ClaimFrees), replica=on)
    def claim_frees(self, call, replica):
        self.make(call, replica)

    @rule(call=calls.sweeping(calls.ForgetEnded), replica=on)
    def forget_ended(self, call, replica):
        self.make(call, replica)

    @rule(group=st.lists(st.tuples(calls.anything, on), min_size=2, max_size=4))
    def at_once(self, group):
        self.make_at_once(group)

    @rule(seconds=st.sampled_from([0.001, 1, 2, 5, 300, 600, 43_200, 86_400, 7 * 86_400]))
    def time_passes(self, seconds):
        self.pass_time(seconds)


@pytest.mark.timeout(TIMEOUT_S)
def test_session_store(url: str, machine_settings: settings) -> None:
    replicas = Replicas(
        url,
        [sessions, turns, session_history, tenant_usage, unheld_turns],
        lambda database: SqlSessionStore(database, CONFIG),
    )

    class Machine(SessionMachine):
        pass

    Machine.replicas = replicas
    try:
        run_state_machine_as_test(Machine, settings=machine_settings)
    finally:
        replicas.close()
