"""The agent of an engine against a control plane, over real gRPC."""

import time
from collections.abc import Callable

import pytest
from kvplane.api.lease.v1 import lease_pb2 as lease
from kvplane.kernel.errors import StaleFencingToken
from kvplane.worker.agent import FreeNow, HoldLonger, Pending, Permit, Refused, WorkerAgent
from worker.plane import PlaneThread
from worker.support import TOKENS, held, settled, until

Make = Callable[..., WorkerAgent]
HANDLE = ("engine-d", "r1")
PROMPT = TOKENS + [1] * 40


def own(plane: PlaneThread, request_id: str = "r1") -> lease.Ownership | None:
    return plane.plane.owned.get(("engine-d", request_id))


def report(plane: PlaneThread, agent: WorkerAgent, request_id: str = "r1", **more: object) -> None:
    agent.report_held(held("d", request_id, **more))
    until(lambda: own(plane, request_id))


def outcome(plane: PlaneThread) -> int:
    return until(lambda: list(plane.plane.released.values()))[-1]


def elapsed(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def test_a_report_says_what_is_held(plane: PlaneThread, make_agent: Make) -> None:
    report(plane, make_agent("d"))
    owned = own(plane)
    assert owned is not None
    assert (owned.tenant_id, owned.session_id, owned.turn) == ("acme", "session", 1)
    assert (owned.worker_id, owned.epoch, owned.num_tokens) == ("d", 1, 1000)
    assert len(owned.digests) == 63 * 16
    # The engine holds a little longer than it says.
    assert 477 <= owned.hold.seconds < 479
    assert not owned.params.extra_json  # our own key stays out of the handle


@pytest.mark.parametrize(("blocks", "share", "limit"), [(100, 0.75, 75), (1, 0.5, 1), (0, 0.5, 0)])
def test_hello_says_how_many_blocks_may_be_held(
    plane: PlaneThread, make_agent: Make, blocks: int, share: float, limit: int
) -> None:
    make_agent("d", identity={"num_blocks": blocks}, max_held_share=share)
    assert [hello.hold_limit_blocks for hello in plane.plane.hellos] == [limit]


def test_what_nobody_can_come_back_to_is_freed_and_not_reported(
    plane: PlaneThread, make_agent: Make
) -> None:
    """The session registry was away, so the turn has no session."""
    agent = make_agent("d")
    agent.report_held(held("d", "r0", session_id="", turn=0))
    assert agent.take_orders() == [FreeNow("r0")]
    agent.order_done(FreeNow("r0"), done=True)
    report(plane, agent, session_id="", turn=0, for_decode=True)
    assert agent.take_orders() == []
    assert own(plane, "r0") is None


def test_digests_of_what_nobody_comes_back_to_are_forgotten(
    plane: PlaneThread, make_agent: Make
) -> None:
    """A decode that read, of a turn without a session: what it compared stayed for ever."""
    owner, reader = make_agent("d"), make_agent("p")
    report(plane, owner)
    reader.begin_read("x", PROMPT, handle=HANDLE, tenant_id="acme")
    assert isinstance(settled(reader, "x"), Permit)
    assert reader.read_started("x")
    reader.read_finished("x", sent=True)
    assert reader._reading._digests
    reader.report_held(held("p", "x", tokens=PROMPT, session_id="", turn=0))
    assert not reader._reading._digests


def test_a_decode_gets_its_own_lease_and_gives_it_back(
    plane: PlaneThread, make_agent: Make
) -> None:
    owner, reader = make_agent("d"), make_agent("p")
    report(plane, owner)
    reader.begin_read("x", PROMPT, handle=HANDLE, tenant_id="acme")
    permit = settled(reader, "x")
    assert isinstance(permit, Permit)
    assert permit.num_tokens == 1000
    assert reader.read_started("x")
    assert reader.still_valid("x")
    reader.read_finished("x", sent=True)
    assert outcome(plane) == lease.READ_OUTCOME_CONSUMED
    assert reader.poll_read("x") == Refused("unknown")


@pytest.mark.parametrize("address", [("d", 5600), ("d", None), (None, 5600)])
def test_an_owner_is_read_at_the_address_that_the_request_names(
    plane: PlaneThread, make_agent: Make, address: tuple[str | None, int | None]
) -> None:
    owner, reader = make_agent("d"), make_agent("p")
    report(plane, owner)
    reader.begin_read("x", PROMPT, handle=HANDLE, address=address)
    permit = settled(reader, "x")
    assert isinstance(permit, Permit)
    assert (permit.params["remote_host"], permit.params["remote_port"]) == ("d", 5600)


def test_the_lease_of_the_router_is_checked_before_the_read(
    plane: PlaneThread, make_agent: Make
) -> None:
    owner, reader = make_agent("d"), make_agent("p")
    report(plane, owner)
    owned = own(plane)
    granted = plane.do(plane.plane.grant, owned, lease.Holder(worker_id="p", epoch=1), read=False)
    key = (granted.lease_id, granted.fencing_token)
    reader.begin_read("x", PROMPT, lease=key)
    assert isinstance(settled(reader, "x"), Permit)
    reader.begin_read("y", PROMPT, lease=(key[0], key[1] - 1))
    answer = settled(reader, "y")
    assert isinstance(answer, Refused)
    assert "fencing" in answer.reason


def test_a_lease_is_for_one_request_also_when_its_answer_comes_late(
    plane: PlaneThread, make_agent: Make
) -> None:
    """A client that repeats itself brings the same lease twice: one gave back what the other read.

    The first one's question was late, so it computed; its answer came while the second one read.
    """
    owner, reader = make_agent("d"), make_agent("p", begin_wait_seconds=0.1)
    report(plane, owner)
    granted = plane.do(
        plane.plane.grant, own(plane), lease.Holder(worker_id="p", epoch=1), read=False
    )
    key = (granted.lease_id, granted.fencing_token)
    plane.plane.hang.add("BeginRead")
    reader.begin_read("first", PROMPT, lease=key)
    assert settled(reader, "first") == Refused("no answer in time")
    reader.read_finished("first", sent=False)
    plane.plane.hang.clear()
    reader.begin_read("second", PROMPT, lease=key)
    assert settled(reader, "second") == Refused("another request has this lease")
    assert outcome(plane) == lease.READ_OUTCOME_UNUSED


def test_a_decode_waits_for_a_report_that_is_under_way(
    plane: PlaneThread, make_agent: Make
) -> None:
    owner, reader = make_agent("d"), make_agent("p")
    reader.begin_read("x", PROMPT, handle=HANDLE)
    assert reader.poll_read("x") == Pending()
    owner.report_held(held("d", "r1"))
    assert isinstance(settled(reader, "x"), Permit)


@pytest.mark.parametrize(
    ("why", "prompt", "more"),
    [
        ("tenant", PROMPT, {"tenant_id": "evil"}),
        ("tokens", [5, *PROMPT], {}),
        ("salt", PROMPT, {"salt": "s"}),
        ("adapter", PROMPT, {"adapter": "lora"}),
        ("threshold", TOKENS[:40], {"min_tokens": 64}),
        ("host", PROMPT, {"address": ("other", 5600)}),
        ("port", PROMPT, {"address": ("d", 5601)}),
        ("port alone", PROMPT, {"address": (None, 5601)}),
        ("a port that is none", PROMPT, {"address": ("d", "5600")}),
    ],
)
def test_what_must_not_be_read_is_given_back_unused(
    plane: PlaneThread, make_agent: Make, why: str, prompt: list[int], more: dict[str, object]
) -> None:
    owner, reader = make_agent("d"), make_agent("p")
    report(plane, owner)
    reader.begin_read("x", prompt, handle=HANDLE, **more)
    assert isinstance(settled(reader, "x"), Refused), why
    assert outcome(plane) == lease.READ_OUTCOME_UNUSED
    assert not reader.read_started("x")


def test_an_incompatible_owner_is_refused(plane: PlaneThread, make_agent: Make) -> None:
    owner, reader = make_agent("d"), make_agent("p", identity={"kv_layout": "other"})
    report(plane, owner)
    reader.begin_read("x", PROMPT, handle=HANDLE)
    assert isinstance(settled(reader, "x"), Refused)
    assert outcome(plane) == lease.READ_OUTCOME_UNUSED


def test_abandoned_while_pending_is_given_back_unused(plane: PlaneThread, make_agent: Make) -> None:
    owner, reader = make_agent("d"), make_agent("p")
    report(plane, owner)
    plane.plane.hang.add("GrantLease")
    reader.begin_read("x", PROMPT, handle=HANDLE)
    until(lambda: plane.plane.calls.get("GrantLease"))
    reader.abandon("x")
    plane.plane.hang.clear()
    assert outcome(plane) == lease.READ_OUTCOME_UNUSED


def test_abandoned_with_a_permit_is_given_back_unused(plane: PlaneThread, make_agent: Make) -> None:
    owner, reader = make_agent("d"), make_agent("p")
    report(plane, owner)
    reader.begin_read("x", PROMPT, handle=HANDLE)
    assert isinstance(settled(reader, "x"), Permit)
    reader.abandon("x")
    assert outcome(plane) == lease.READ_OUTCOME_UNUSED


def test_a_running_read_keeps_its_lease_when_its_request_ends(
    plane: PlaneThread, make_agent: Make
) -> None:
    owner, reader = make_agent("d"), make_agent("p")
    report(plane, owner)
    reader.begin_read("x", PROMPT, handle=HANDLE)
    settled(reader, "x")
    assert reader.read_started("x")
    reader.abandon("x")
    assert reader.still_valid("x")
    reader.read_finished("x", sent=True)
    assert outcome(plane) == lease.READ_OUTCOME_CONSUMED


def test_no_answer_in_time_means_compute_and_the_late_lease_goes_back(
    plane: PlaneThread, make_agent: Make
) -> None:
    owner, reader = make_agent("d"), make_agent("p", grant_wait_seconds=0.1)
    report(plane, owner)
    plane.plane.hang.add("GrantLease")
    reader.begin_read("x", PROMPT, handle=HANDLE)
    waited = elapsed(lambda: settled(reader, "x"))
    assert 0.05 < waited < 0.3
    assert reader.poll_read("x") == Refused("no answer in time")
    plane.plane.hang.clear()
    assert outcome(plane) == lease.READ_OUTCOME_UNUSED


def test_a_dead_control_plane_is_noticed_and_reads_are_refused_at_once(
    plane: PlaneThread, make_agent: Make
) -> None:
    reader = make_agent("p")
    plane.stop()
    until(lambda: reader.away)
    reader.begin_read("x", PROMPT, handle=HANDLE)
    assert isinstance(reader.poll_read("x"), Refused)
    plane.start()
    until(lambda: reader.away is None, 10)


def test_a_silent_control_plane_is_away(plane: PlaneThread, make_agent: Make) -> None:
    reader = make_agent("p")
    plane.plane.hang.update(("Tick", "Connect"))
    assert "silent" in until(lambda: reader.away, 10)


def test_after_an_outage_everything_still_held_is_sent_again(
    plane: PlaneThread, make_agent: Make
) -> None:
    owner = make_agent("d")
    report(plane, owner, "r1")
    report(plane, owner, "r2")
    plane.stop()
    until(lambda: owner.away)
    owner.report_held(held("d", "r3"))
    owner.report_freed(["r1"])
    plane.plane.owned.clear()
    plane.start()
    until(lambda: own(plane, "r2") and own(plane, "r3"), 10)
    assert own(plane, "r1") is None
    assert {h.request_id for h in plane.plane.hellos[-1].held} == {"r2", "r3"}


def test_what_is_freed_while_a_stream_opens_is_withdrawn(
    plane: PlaneThread, make_agent: Make
) -> None:
    owner = make_agent("d")
    report(plane, owner)
    plane.stop()
    until(lambda: owner.away)
    plane.plane.hang.add("Welcome")
    plane.start()
    until(lambda: len(plane.plane.hellos) > 1, 10)
    owner.report_freed(["r1"])  # Hello has named it already
    plane.plane.hang.clear()
    # On a slow machine the stream may have been given up; the next Hello leaves it out then.
    until(lambda: plane.plane.withdrawn == ["r1"] or not plane.plane.hellos[-1].held, 10)


def test_a_forgotten_worker_registers_again_and_frees_nothing_by_itself(
    plane: PlaneThread, make_agent: Make
) -> None:
    owner = make_agent("d")
    report(plane, owner)
    plane.do(plane.plane.workers.clear)
    until(lambda: owner.epoch == 2)
    until(lambda: owner.away is None and plane.plane.hellos[-1].epoch == 2)
    # Somebody may still be reading it: the lease service says when it may go.
    assert [h.request_id for h in plane.plane.hellos[-1].held] == ["r1"]
    assert owner.take_orders() == []
    owner.report_held(held("d", "r2"))
    assert until(lambda: own(plane, "r2")).epoch == 2


def test_a_new_epoch_ends_running_reads(plane: PlaneThread, make_agent: Make) -> None:
    owner, reader = make_agent("d"), make_agent("p")
    report(plane, owner)
    reader.begin_read("x", PROMPT, handle=HANDLE)
    settled(reader, "x")
    assert reader.read_started("x")
    plane.do(plane.plane.workers.pop, "p")
    until(lambda: not reader.still_valid("x"))


def test_leases_are_renewed_in_one_call(plane: PlaneThread, make_agent: Make) -> None:
    plane.plane.ttl = 0.6
    owner, reader = make_agent("d"), make_agent("p", lease_ttl_seconds=0.6)
    for name in ("r1", "r2"):
        report(plane, owner, name)
        reader.begin_read(name, PROMPT, handle=("engine-d", name))
        settled(reader, name)
        assert reader.read_started(name)
    calls = plane.plane.calls
    until(lambda: calls.get("RenewLeases", 0) >= 5)  # 5 x 0.2 s: longer than the ttl
    assert reader.still_valid("r1")
    assert reader.still_valid("r2")
    assert calls["RenewLeases"] < 10


def test_a_lease_that_is_not_renewed_ends_the_read(plane: PlaneThread, make_agent: Make) -> None:
    plane.plane.ttl = 0.6
    owner, reader = make_agent("d"), make_agent("p", lease_ttl_seconds=0.6)
    report(plane, owner)
    plane.plane.renewals = lease.RenewResult(renewed=False, state=lease.LEASE_STATE_LOST)
    reader.begin_read("x", PROMPT, handle=HANDLE)
    settled(reader, "x")
    assert reader.read_started("x")
    until(lambda: not reader.still_valid("x"))


def test_without_the_control_plane_a_read_ends_with_its_lease(
    plane: PlaneThread, make_agent: Make
) -> None:
    plane.plane.ttl = 0.6
    owner, reader = make_agent("d"), make_agent("p", lease_ttl_seconds=0.6)
    report(plane, owner)
    reader.begin_read("x", PROMPT, handle=HANDLE)
    settled(reader, "x")
    assert reader.read_started("x")
    plane.stop()
    until(lambda: not reader.still_valid("x"), 2)
    plane.start()


def test_a_draining_read_may_end_but_a_draining_permit_may_not_begin(
    plane: PlaneThread, make_agent: Make
) -> None:
    owner, reader = make_agent("d"), make_agent("p", lease_ttl_seconds=0.3)
    for name in ("r1", "r2"):
        report(plane, owner, name)
        reader.begin_read(name, PROMPT, handle=("engine-d", name))
        settled(reader, name)
    assert reader.read_started("r1")
    plane.plane.renewals = lease.RenewResult(
        renewed=False, state=lease.LEASE_STATE_REVOKED, draining=True
    )
    until(lambda: isinstance(reader.poll_read("r2"), Refused))
    assert reader.still_valid("r1")
    assert not reader.read_started("r2")


def test_a_failed_read_is_left_to_run_out(plane: PlaneThread, make_agent: Make) -> None:
    owner, reader = make_agent("d"), make_agent("p")
    for name in ("r1", "r2"):
        report(plane, owner, name)
        reader.begin_read(name, PROMPT, handle=("engine-d", name))
        settled(reader, name)
        assert reader.read_started(name)
    reader.read_finished("r1", sent=True, failed=True)
    reader.read_finished("r2", sent=True)
    until(lambda: plane.plane.released)
    assert list(plane.plane.released) == ["lease-2"]


def command(ident: str, request_id: str, hold: int = 0) -> lease.Command:
    handle = lease.OwnedHandle(engine_id="engine-d", request_id=request_id)
    if hold:
        longer = lease.HoldLonger()
        longer.hold.seconds = hold
        return lease.Command(command_id=ident, handle=handle, hold_longer=longer)
    return lease.Command(command_id=ident, handle=handle, free_now=lease.FreeNow())


def test_orders_reach_the_engine_and_its_answer_comes_back(
    plane: PlaneThread, make_agent: Make
) -> None:
    owner = make_agent("d")
    report(plane, owner)
    plane.do(plane.plane.order, "d", command("c1", "r1", hold=900))
    (order,) = until(owner.take_orders)
    assert isinstance(order, HoldLonger)
    assert 899 < order.seconds <= 900
    owner.order_done(order, done=True, hold_seconds=901)
    (ack,) = until(lambda: list(plane.plane.acks))
    assert (ack.command_id, ack.done) == ("c1", True)
    assert 899 <= ack.hold.seconds <= 900
    assert ack.time_anchor.anchor


def test_a_repeated_order_is_carried_out_once_and_answered_again(
    plane: PlaneThread, make_agent: Make
) -> None:
    owner = make_agent("d")
    report(plane, owner)
    plane.do(plane.plane.order, "d", command("c1", "r1"))
    (order,) = until(owner.take_orders)
    plane.do(plane.plane.order, "d", command("c1", "r1"))
    assert order == FreeNow("r1", "c1")
    owner.order_done(order, done=True)
    plane.do(plane.plane.order, "d", command("c1", "r1"))
    until(lambda: len(plane.plane.acks) >= 2)
    assert owner.take_orders() == []
    assert all(ack.done for ack in plane.plane.acks)


def test_an_order_for_what_is_not_held_is_answered_without_the_engine(
    plane: PlaneThread, make_agent: Make
) -> None:
    owner = make_agent("d")
    plane.do(plane.plane.order, "d", command("c1", "r9"))
    (ack,) = until(lambda: list(plane.plane.acks))
    assert not ack.done
    assert owner.take_orders() == []


def test_what_was_freed_is_withdrawn_after_its_report(plane: PlaneThread, make_agent: Make) -> None:
    owner = make_agent("d")
    report(plane, owner)
    owner.report_freed(["r1", "never-reported"])
    until(lambda: plane.plane.withdrawn)
    assert plane.plane.withdrawn == ["r1"]


def test_what_was_freed_before_it_was_reported_is_never_reported(
    plane: PlaneThread, make_agent: Make
) -> None:
    owner = make_agent("d")
    owner.report_held(held("d", "r1"))
    owner.report_freed(["r1"])
    report(plane, owner, "r2")
    named = [o.params.remote_request_id for r in plane.plane.reports for o in r.ownerships]
    if "r1" in named:  # it was on its way already: then it is withdrawn, in this order
        until(lambda: plane.plane.withdrawn == ["r1"])


def test_what_cannot_be_reported_does_not_stop_the_rest(
    plane: PlaneThread, make_agent: Make
) -> None:
    owner = make_agent("d")
    owner.report_held(held("d", "bad", [-1] * 100))
    report(plane, owner, "r2")
    assert own(plane, "bad") is None


def test_load_goes_with_the_heartbeat(plane: PlaneThread, make_agent: Make) -> None:
    owner = make_agent("d")
    report(plane, owner)
    owner.set_load(running=3, waiting=2, kv_usage=0.5)
    beat = until(lambda: (b := plane.plane.beats.get("d")) and b.running == 3 and b)
    assert (beat.waiting, beat.kv_usage, beat.held) == (2, 0.5, 1)


def test_the_engines_thread_never_waits(plane: PlaneThread, make_agent: Make) -> None:
    """128k tokens: no call takes as long as one of its digests' chunks would block."""
    owner, reader = make_agent("d"), make_agent("p")
    long = list(range(131_072))
    assert elapsed(lambda: owner.report_held(held("d", "r1", long))) < 0.02
    until(lambda: own(plane), 20)
    assert elapsed(lambda: reader.begin_read("x", long, handle=HANDLE)) < 0.02
    permit = settled(reader, "x")
    assert isinstance(permit, Permit | Refused)


def test_an_agent_without_a_control_plane_does_nothing_and_ends(
    plane: PlaneThread, make_agent: Make
) -> None:
    plane.stop()
    agent = make_agent("d", wait=False)
    agent.begin_read("x", PROMPT, handle=HANDLE)
    assert isinstance(agent.poll_read("x"), Refused)
    agent.report_held(held("d", "r1"))
    assert agent.take_orders() == []
    assert elapsed(agent.close) < 2.5
    plane.start()


def test_it_says_goodbye(plane: PlaneThread, make_agent: Make) -> None:
    make_agent("d").close()
    assert plane.plane.calls.get("DeregisterWorker") == 1


def test_a_stale_token_is_told_as_such(plane: PlaneThread, make_agent: Make) -> None:
    reader = make_agent("p")
    plane.plane.fail["BeginRead"] = StaleFencingToken("lease-1")
    reader.begin_read("x", PROMPT, lease=("lease-1", 1))
    answer = settled(reader, "x")
    assert isinstance(answer, Refused)
    assert "fencing" in answer.reason
    assert reader.away is None  # an answer, not an outage


def test_a_lease_that_is_cut_short_is_renewed_at_once_and_before_it_ends(
    plane: PlaneThread, make_agent: Make
) -> None:
    """The first renewal has the owner asked to hold longer, the next ones find that it does."""
    plane.plane.ttl = 1.2
    owner, reader = make_agent("d"), make_agent("p")
    report(plane, owner)
    reader.begin_read("x", PROMPT, handle=HANDLE)
    settled(reader, "x")
    calls = plane.plane.calls
    assert elapsed(lambda: until(lambda: calls.get("RenewLeases", 0) >= 1)) < 0.3
    until(lambda: calls["RenewLeases"] >= 5)  # 4 x 0.4 s: longer than the lease
    assert isinstance(reader.poll_read("x"), Permit)
    assert calls["RenewLeases"] < 10
