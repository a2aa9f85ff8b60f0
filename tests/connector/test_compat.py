"""Where vLLM versions differ."""

from types import SimpleNamespace

import pytest
from connector.stubs import Request, Status, install_status
from kvplane_vllm import compat


class Blocks:
    """A cache manager that knows the block ids of requests."""

    def get_block_ids(self, request_id: str) -> tuple[list[int], ...]:
        return {"a": ([1, 2, 3],), "b": ([4, 5],)}[request_id]


def test_failed_reads_are_named() -> None:
    output = SimpleNamespace(finished_recving={"a", "b"}, failed_recving={"b"})
    assert compat.failed_reads(output, Blocks()) == {"b"}


@pytest.mark.parametrize(("invalid", "failed"), [({5, 9}, {"b"}), (set(), set()), (None, set())])
def test_failed_reads_are_found_by_their_blocks(invalid: set[int] | None, failed: set[str]) -> None:
    output = SimpleNamespace(finished_recving={"a", "b"}, invalid_block_ids=invalid)
    assert compat.failed_reads(output, Blocks()) == failed


def test_an_engine_that_does_not_say_how_many_blocks_it_has() -> None:
    assert compat.num_blocks(SimpleNamespace(num_blocks=1234)) == 1234
    assert compat.num_blocks(SimpleNamespace(num_blocks=None)) == 0
    assert compat.num_blocks(SimpleNamespace()) == 0


class Group:
    """A group of 0.21: it cannot give blocks out without freeing them."""

    def __init__(self, first: int) -> None:
        self.req_to_blocks = {"r": [first, first + 1], "other": [9]}
        self.num_cached_block = {"r": 1, "other": 1}


def test_blocks_are_taken_out_without_freeing_them(monkeypatch: pytest.MonkeyPatch) -> None:
    install_status(monkeypatch)
    groups = [Group(1), Group(3)]
    manager = SimpleNamespace(coordinator=SimpleNamespace(single_type_managers=groups))
    request = Request("r", None, status=Status.WAITING_FOR_REMOTE_KVS, num_computed_tokens=64)
    assert compat.take_back(request, manager) == [1, 2, 3, 4]
    assert [group.req_to_blocks for group in groups] == [{"other": [9]}] * 2
    assert [group.num_cached_block for group in groups] == [{"other": 1}] * 2
    assert (request.status, request.num_computed_tokens) == (Status.WAITING, 0)


@pytest.mark.parametrize(("preemptions", "status"), [(0, Status.WAITING), (2, Status.PREEMPTED)])
def test_a_request_goes_back_to_the_queue_it_came_from(
    monkeypatch: pytest.MonkeyPatch, preemptions: int, status: Status
) -> None:
    install_status(monkeypatch)
    request = Request("r", None, status=Status.WAITING_FOR_REMOTE_KVS, num_preemptions=preemptions)
    compat.take_back(request, SimpleNamespace(pop_blocks_for_free=lambda _: ()))
    assert request.status is status


def test_a_request_that_is_not_parked_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    install_status(monkeypatch)
    request = Request("r", None, status=Status.RUNNING, num_computed_tokens=64)
    assert compat.take_back(request, None) == []
    assert (request.status, request.num_computed_tokens) == (Status.RUNNING, 64)


def test_the_scheduler_that_calls_is_found() -> None:
    class Connector:
        def bind_gpu_block_pool(self) -> object:
            return compat.manager_of_caller()

    class Scheduler:
        def __init__(self) -> None:
            self.kv_cache_manager = "manager"
            self.found = Connector().bind_gpu_block_pool()

    assert Scheduler().found == "manager"
    assert Connector().bind_gpu_block_pool() is None


def test_a_hook_that_this_version_lacks_is_skipped() -> None:
    assert compat.inherited(object(), "on_new_request", 1) is None
    assert compat.inherited([3], "count", 3) == 1
