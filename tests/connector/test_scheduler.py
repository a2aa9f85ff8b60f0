"""The scheduler half against an engine of stubs: what is sent, what is not, what is told."""

import types
from typing import Any

import pytest
from connector.stubs import Engine, Output, Request, Status, install_status
from kvplane.worker.agent import FreeNow, HoldLonger, Pending, Permit, Refused

HANDLE = {
    "remote_engine_id": "owner",
    "remote_request_id": "owned",
    "remote_host": "h",
    "remote_port": 5600,
    "remote_block_ids": [list(range(20))],
    "tp_size": 1,
}
PERMIT = Permit(320, {**HANDLE, "remote_num_tokens": 320}, "lease-1")


@pytest.fixture(autouse=True)
def _status(monkeypatch: pytest.MonkeyPatch) -> None:
    install_status(monkeypatch)


def tag(**more: Any) -> dict[str, Any]:
    return {"tenant": "acme", "session": "s", "turn": 3, **more}


def prefill(request_id: str = "p", **more: Any) -> Request:
    params = {
        "do_remote_decode": True,
        "do_remote_prefill": False,
        "kvplane": tag(lease_id="lease-1", fencing_token=7),
    }
    return Request(request_id, params, **more)


def decode(request_id: str = "d", **more: Any) -> Request:
    params = {
        "do_remote_decode": False,
        "do_remote_prefill": True,
        "remote_num_tokens": 400,
        "kvplane": tag(),
        **HANDLE,
    }
    return Request(request_id, params, **more)


def reading(engine: Engine, request: Request) -> Request:
    engine.arrive(request)
    engine.agent.answers[request.request_id] = PERMIT
    assert engine.schedule(request) == 320
    reads, _ = engine.step()
    assert request.request_id in reads
    return request


# -- what is ours ------------------------------------------------------------------


def test_a_request_without_our_key_reads_nothing_and_holds_nothing() -> None:
    engine = Engine()
    request = engine.arrive(Request("x", {"do_remote_prefill": True, **HANDLE}))
    assert engine.schedule(request) == 0
    assert engine.step()[0] == {}
    assert engine.finish(request) is None
    assert engine.agent.held == []


@pytest.mark.parametrize("key", [1, "x", {}, {"tenant": ""}, {"tenant": 5}, None])
def test_a_wrong_key_is_no_key(key: Any) -> None:
    engine = Engine()
    request = engine.arrive(Request("x", {"do_remote_prefill": True, "kvplane": key, **HANDLE}))
    assert request.kv_transfer_params is None


def test_children_of_one_request_do_not_share_parameters() -> None:
    engine = Engine()
    shared = decode().kv_transfer_params
    assert shared is not None
    first, second = Request("0_x", shared), Request("1_x", shared)
    engine.arrive(first)
    engine.arrive(second)
    engine.agent.answers["0_x"] = Refused("no")
    assert engine.schedule(first) == 0
    assert first.kv_transfer_params["do_remote_prefill"] is False
    assert second.kv_transfer_params["do_remote_prefill"] is True
    assert shared["do_remote_prefill"] is True


def test_private_notes_of_an_engine_are_not_believed() -> None:
    engine = Engine()
    request = prefill()
    request.kv_transfer_params["_remote_blocks_processed"] = True
    engine.arrive(request)
    assert "_remote_blocks_processed" not in request.kv_transfer_params


def test_a_prefill_reads_only_what_the_lease_service_says() -> None:
    engine = Engine()
    request = prefill()
    request.kv_transfer_params.update(HANDLE)
    engine.arrive(request)
    assert not set(HANDLE) - {"tp_size"} & set(request.kv_transfer_params)
    assert engine.agent.asked["p"]["lease"] == ("lease-1", 7)
    assert engine.agent.asked["p"]["min_tokens"] == 64
    assert engine.agent.asked["p"]["tenant_id"] == "acme"


def test_a_decode_asks_for_the_handle_at_the_address_of_its_request() -> None:
    engine = Engine()
    engine.arrive(decode())
    assert engine.agent.asked["d"]["handle"] == ("owner", "owned")
    assert engine.agent.asked["d"]["address"] == ("h", 5600)


def test_a_cold_prefill_asks_for_nothing_and_is_reported_for_the_decode() -> None:
    engine = Engine()
    request = prefill()
    del request.kv_transfer_params["kvplane"]["lease_id"]
    engine.arrive(request)
    assert engine.agent.asked == {}
    assert engine.schedule(request) == 0
    assert engine.step()[0] == {}
    engine.finish(request, output=1)
    (held,) = engine.agent.held
    assert held.for_decode
    assert held.num_tokens == 400


def test_a_prefill_that_is_not_bidirectional_never_reads() -> None:
    engine = Engine()
    engine.leases._bidirectional = False
    engine.arrive(prefill())
    assert engine.agent.asked == {}


@pytest.mark.parametrize(
    "unfit",
    [
        {"skip_reading_prefix_cache": True},
        {"prompt_embeds": object()},
        {"prompt_token_ids": None},
        {"resumable": True},
    ],
)
def test_what_cannot_be_proved_is_not_asked_for(unfit: dict[str, Any]) -> None:
    engine = Engine()
    request = engine.arrive(decode(**unfit))
    assert engine.agent.asked == {}
    assert engine.schedule(request) == 0
    assert engine.step()[0] == {}


def test_pictures_are_proved_by_their_content() -> None:
    def asked(picture: str) -> list[int]:
        engine = Engine()
        place = types.SimpleNamespace(offset=10, length=5)
        feature = types.SimpleNamespace(identifier=picture, mm_position=place)
        engine.arrive(decode(mm_features=[feature]))
        return list(engine.agent.asked["d"]["tokens"])

    cat, dog = asked("cat"), asked("dog")
    assert cat == asked("cat")
    assert [i for i in range(400) if cat[i] != dog[i]] == [10, 11, 12, 13, 14]


# -- a read ------------------------------------------------------------------------


def test_the_scheduler_is_told_to_ask_again_until_there_is_an_answer() -> None:
    engine = Engine()
    request = engine.arrive(prefill())
    engine.agent.answers["p"] = Pending()
    assert engine.schedule(request) is None
    assert engine.schedule(request) is None
    engine.agent.answers["p"] = PERMIT
    assert engine.schedule(request) == 320
    assert request.kv_transfer_params["remote_num_tokens"] == 320
    assert request.kv_transfer_params["do_remote_decode"] is True
    assert list(engine.step()[0]) == ["p"]
    engine.leases.outputs(Output(finished_recving={"p"}))
    assert engine.agent.finished == [("p", True, False)]


@pytest.mark.parametrize("make", [prefill, decode])
def test_what_the_local_cache_has_is_not_read(make: Any) -> None:
    engine = Engine()
    request = engine.arrive(make())
    engine.agent.answers[request.request_id] = PERMIT
    assert engine.schedule(request, local=96) == 224
    assert request.num_computed_tokens == 320


@pytest.mark.parametrize(("local", "external"), [(320, 0), (400, 0), (272, 0), (256, 64)])
def test_too_little_left_for_a_prefill_only_notifies_the_owner(local: int, external: int) -> None:
    engine = Engine()
    request = engine.arrive(prefill())
    engine.agent.answers["p"] = PERMIT
    assert engine.schedule(request, local=local) == external
    assert list(engine.step()[0]) == ["p"]  # the read, or the notification alone
    engine.step()
    # After a notification the owner's pin is gone, and nothing comes back.
    assert engine.agent.finished == ([] if external else [("p", True, False)])


@pytest.mark.parametrize("make", [prefill, decode])
def test_refused_means_nothing_is_read_and_nobody_is_notified(make: Any) -> None:
    engine = Engine()
    request = engine.arrive(make())
    engine.agent.answers[request.request_id] = Refused("no")
    assert engine.schedule(request) == 0
    assert engine.step()[0] == {}
    assert engine.agent.finished == []
    assert engine.agent.abandoned == [request.request_id]
    assert engine.nixl.heartbeats_stopped == [request.request_id]


def test_a_read_that_was_refused_still_lets_its_own_blocks_be_held() -> None:
    engine = Engine()
    request = engine.arrive(decode())
    engine.agent.answers["d"] = Refused("no")
    engine.schedule(request)
    # Or vLLM's worker half would hold the blocks for ever.
    assert "d" in engine.nixl._reqs_in_batch


def test_a_permit_for_more_than_the_prompt_is_not_used() -> None:
    engine = Engine()
    request = engine.arrive(prefill(prompt_token_ids=list(range(319))))
    engine.agent.answers["p"] = PERMIT
    assert engine.schedule(request) == 0
    assert engine.step()[0] == {}


def test_a_permit_that_ran_out_before_it_was_scheduled_is_not_used() -> None:
    engine = Engine()
    request = engine.arrive(prefill())
    engine.agent.answers["p"] = PERMIT
    assert engine.leases.matched(request, 0) == (320, True)  # no blocks were free
    engine.agent.answers["p"] = Refused("the lease ran out")
    assert engine.schedule(request) == 0
    assert engine.step()[0] == {}


def test_a_permit_that_runs_out_before_the_read_is_posted_is_taken_back() -> None:
    engine = Engine()
    request = engine.arrive(prefill())
    engine.agent.answers["p"] = PERMIT
    assert engine.schedule(request) == 320
    engine.agent.startable = False
    assert engine.step()[0] == {}
    assert (request.status, request.num_computed_tokens) == (Status.WAITING, 0)
    assert engine.manager.freed == ["p-b"]
    assert engine.schedule(request) == 0  # computed


def test_a_notification_is_not_sent_without_its_lease() -> None:
    engine = Engine()
    request = engine.arrive(prefill())
    engine.agent.answers["p"] = PERMIT
    assert engine.schedule(request, local=320) == 0
    engine.agent.startable = False
    assert engine.step()[0] == {}
    assert request.status is Status.RUNNING
    assert engine.manager.freed == []


def test_a_scheduler_that_takes_another_number_of_tokens_reads_nothing() -> None:
    engine = Engine()
    request = engine.arrive(prefill())
    engine.agent.answers["p"] = PERMIT
    assert engine.leases.matched(request, 0) == (320, True)
    engine.nixl.update_state_after_alloc(request, 288)
    engine.leases.after_alloc(request, 288)
    request.status = Status.WAITING_FOR_REMOTE_KVS
    assert engine.step()[0] == {}
    assert request.status is Status.WAITING


def test_an_engine_that_queues_no_read_does_not_wait_for_one() -> None:
    """As vLLM does with a host buffer: it would park the request for ever."""
    engine = Engine()
    request = engine.arrive(prefill())
    engine.agent.answers["p"] = PERMIT
    assert engine.schedule(request) == 320
    engine.nixl._reqs_need_recv.clear()
    engine.step()
    assert request.status is Status.WAITING


def test_a_read_that_failed_is_computed_and_not_offered_again() -> None:
    engine = Engine()
    request = reading(engine, prefill())
    engine.leases.outputs(Output(finished_recving={"p"}, failed_recving={"p"}))
    assert engine.agent.finished == [("p", True, True)]
    request.num_computed_tokens = 0
    assert engine.schedule(request) == 0
    assert engine.step()[0] == {}


def test_a_preempted_request_is_computed() -> None:
    engine = Engine()
    request = reading(engine, prefill())
    engine.leases.outputs(Output(finished_recving={"p"}))
    request.num_computed_tokens, request.num_preemptions = 0, 1
    assert engine.schedule(request) == 0
    assert engine.step()[0] == {}


def test_what_was_read_under_a_lost_lease_is_dropped() -> None:
    engine = Engine()
    request = reading(engine, decode())
    engine.agent.valid = False
    output = Output(finished_recving={"d", "other"})
    engine.leases.outputs(output)
    assert output.finished_recving == {"other"}
    assert (request.status, request.num_computed_tokens) == (Status.WAITING, 0)
    assert engine.manager.freed == ["d-b"]
    assert engine.schedule(request) == 0


def test_a_lease_lost_during_the_read_frees_the_request_but_not_the_blocks() -> None:
    engine = Engine()
    request = reading(engine, prefill())
    engine.agent.valid = False
    engine.step()
    assert (request.status, request.num_computed_tokens) == (Status.WAITING, 0)
    assert engine.agent.finished == [("p", True, True)]
    # The transfer may still write into them.
    assert engine.manager.freed == []
    assert engine.leases.busy
    engine.agent.valid = True
    assert engine.schedule(request) == 0  # computed in new blocks
    output = Output(finished_recving={"p"})
    engine.leases.outputs(output)
    assert output.finished_recving == set()  # the scheduler would not understand it
    assert engine.manager.freed == ["p-b"]
    assert not engine.leases.busy


def test_the_blocks_of_a_given_up_read_outlive_its_request() -> None:
    engine = Engine()
    request = reading(engine, prefill())
    engine.agent.valid = False
    engine.step()
    engine.schedule(request)
    engine.finish(request, output=1)
    output = Output(finished_recving={"p"}, failed_recving={"p"})
    engine.leases.outputs(output)
    assert output.finished_recving == set()
    assert engine.manager.freed == ["p-b"]


def test_nothing_is_ever_sent_without_a_lease() -> None:
    engine = Engine()
    request = Request("stranger", {"do_remote_prefill": True, **HANDLE})
    engine.nixl._reqs_need_recv["stranger"] = (request, [])
    assert engine.step()[0] == {}


# -- the end -----------------------------------------------------------------------


@pytest.mark.parametrize("answer", [Pending(), PERMIT])
@pytest.mark.parametrize("make", [prefill, decode])
def test_aborted_before_the_read_nothing_is_sent(make: Any, answer: Any) -> None:
    engine = Engine()
    request = engine.arrive(make())
    engine.agent.answers[request.request_id] = answer
    engine.leases.matched(request, 0)
    engine.finish(request, Status.FINISHED_ABORTED)
    assert engine.step()[0] == {}
    assert request.request_id in engine.agent.abandoned
    assert engine.agent.finished == []


def test_aborted_during_the_read_the_lease_is_kept_to_its_end() -> None:
    engine = Engine()
    request = reading(engine, prefill())
    engine.finish(request, Status.FINISHED_ABORTED)
    engine.agent.valid = False
    engine.step()
    assert engine.manager.freed == []  # vLLM frees them itself when the read is over
    output = Output(finished_recving={"p"})
    engine.leases.outputs(output)
    assert output.finished_recving == {"p"}
    assert engine.agent.finished == [("p", True, False)]


def test_a_decode_is_reported_under_its_session() -> None:
    engine = Engine()
    request = reading(engine, decode())
    engine.leases.outputs(Output(finished_recving={"d"}))
    params = engine.finish(request)
    (held,) = engine.agent.held
    assert params is not None
    assert (held.tenant_id, held.session_id, held.turn) == ("acme", "s", 3)
    assert held.num_tokens == held.params["remote_num_tokens"] == 409
    assert held.tokens[:409] == request._all_token_ids[:409]
    assert held.hold_seconds == 480.0
    assert held.cuttable
    assert not held.for_decode
    engine.leases.outputs(Output(finished_sending={"d", "stranger"}))
    assert engine.agent.freed == ["d"]


def test_steps_in_flight_do_not_count_as_computed() -> None:
    engine = Engine()
    request = engine.arrive(decode())
    engine.schedule(request)
    request._all_token_ids.extend(range(10))
    request.num_computed_tokens, request.num_output_placeholders = 410, 1
    request.status = Status.FINISHED_STOPPED
    engine.nixl._reqs_need_send["d"] = engine.now + 480
    engine.leases.before_finish(request)
    params = {"remote_num_tokens": 410, "remote_block_ids": ([0] * 26,)}
    engine.leases.after_finish(request, True, params)
    assert engine.agent.held[0].num_tokens == 409
    assert engine.agent.held[0].params["remote_num_tokens"] == 409


@pytest.mark.parametrize(
    ("counted", "tail_matters", "reported"),
    [(409, True, True), (410, True, False), (410, False, True), (417, False, False)],
)
def test_blocks_that_cannot_be_cut_end_at_the_last_token(
    counted: int, tail_matters: bool, reported: bool
) -> None:
    engine = Engine(cuttable=False, tail_matters=tail_matters)
    request = engine.arrive(decode())
    engine.schedule(request)
    request._all_token_ids.extend(range(10))
    request.num_computed_tokens = 409
    engine.nixl._reqs_need_send["d"] = engine.now + 480
    params = {"remote_num_tokens": counted, "remote_block_ids": ([0] * 26,)}
    engine.leases.after_finish(request, True, params)
    assert bool(engine.agent.held) is reported


# -- orders ------------------------------------------------------------------------


def held_decode(engine: Engine) -> None:
    engine.finish(reading(engine, decode()))
    engine.step()


def test_hold_longer_moves_the_end_and_never_shortens() -> None:
    engine = Engine()
    held_decode(engine)
    engine.agent.orders = [HoldLonger("d", 900.0, "c1"), HoldLonger("d", 10.0, "c2")]
    _, deadlines = engine.step()
    assert deadlines == {"d": engine.now + 901.0}
    assert [(o.command_id, done, hold) for o, done, hold in engine.agent.done] == [
        ("c1", True, 901.0),
        ("c2", True, 901.0),
    ]


def test_free_now_ends_the_hold_now_and_for_good() -> None:
    engine = Engine()
    held_decode(engine)
    engine.agent.orders = [FreeNow("d", "c1")]
    assert engine.step()[1] == {"d": engine.now}
    engine.agent.orders = [HoldLonger("d", 900.0, "c2")]
    assert engine.step()[1] == {}
    assert [done for _, done, _ in engine.agent.done] == [True, False]


def test_an_order_never_touches_a_request_that_is_not_held() -> None:
    """A deadline in the past for a running request ends the engine."""
    engine = Engine()
    reading(engine, decode())
    engine.agent.orders = [FreeNow("d", "c1"), HoldLonger("d", 9.0, "c2")]
    assert engine.step()[1] == {}
    assert [done for _, done, _ in engine.agent.done] == [False, False]


def test_a_hold_that_may_have_ended_is_not_extended() -> None:
    engine = Engine()
    held_decode(engine)
    engine.now += 479.5
    engine.agent.orders = [HoldLonger("d", 900.0, "c1")]
    assert engine.step()[1] == {}
    assert engine.agent.done[0][1] is False


def test_load_is_told() -> None:
    engine = Engine()
    reading(engine, decode("a"))
    engine.arrive(decode("b"))
    engine.now += 1
    engine.step()
    assert engine.agent.load == (1, 1, 0.25)


def test_an_engine_that_has_nothing_to_do_says_so() -> None:
    engine = Engine()
    engine.finish(reading(engine, decode()))
    assert engine.agent.load == (0, 0, 0.25)


def test_a_request_that_the_engine_never_announced_notifies_nobody() -> None:
    """As 0.21 does for one that is aborted before it is scheduled."""
    engine = Engine()
    engine.finish(decode(), Status.FINISHED_ABORTED)
    assert engine.step()[0] == {}
