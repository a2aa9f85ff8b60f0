"""An engine of stubs: as much of vLLM as the scheduler half looks at."""

import sys
import types
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

from kvplane.worker.agent import AgentConfig, Answer, Held, Order, Refused
from kvplane_vllm.scheduler import LeaseScheduler

SIZE = 16


class Status(IntEnum):
    WAITING = 0
    WAITING_FOR_REMOTE_KVS = 1
    RUNNING = 2
    PREEMPTED = 3
    FINISHED_STOPPED = 4
    FINISHED_ABORTED = 5


def install_status(monkeypatch: Any) -> None:
    """Stand in for vllm.v1.request, which takes seconds to import."""
    module = types.ModuleType("vllm.v1.request")
    module.RequestStatus = Status  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm.v1.request", module)


@dataclass
class Request:
    request_id: str
    kv_transfer_params: dict[str, Any] | None
    prompt_token_ids: list[int] | None = field(default_factory=lambda: list(range(400)))
    _all_token_ids: list[int] = field(default_factory=list)
    num_computed_tokens: int = 0
    num_output_placeholders: int = 0
    num_preemptions: int = 0
    status: Status = Status.WAITING
    cache_salt: str | None = None
    lora_request: Any = None
    mm_features: list[Any] = field(default_factory=list)
    prompt_embeds: Any = None
    skip_reading_prefix_cache: bool = False
    resumable: bool = False

    def __post_init__(self) -> None:
        if not self._all_token_ids:
            self._all_token_ids = list(self.prompt_token_ids or [])

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids or [])

    @property
    def all_token_ids(self) -> list[int]:
        return self._all_token_ids

    def is_finished(self) -> bool:
        return self.status >= Status.FINISHED_STOPPED


@dataclass
class Output:
    finished_sending: set[str] | None = None
    finished_recving: set[str] | None = None
    failed_recving: set[str] | None = None


class Manager:
    """The KV-cache manager: which blocks belong to whom."""

    usage = 0.25

    def __init__(self) -> None:
        self.blocks: dict[str, list[str]] = {}
        self.freed: list[str] = []
        self.block_pool = self

    def pop_blocks_for_free(self, request: Request) -> list[str]:
        return self.blocks.pop(request.request_id, [])

    def free_blocks(self, blocks: Any) -> None:
        self.freed.extend(blocks)


class Nixl:
    """NIXL's scheduler half: the queues, and the rules of vLLM for filling them."""

    is_bidirectional_kv_xfer_enabled = True
    kv_recompute_threshold = 64
    block_size = SIZE

    def __init__(self) -> None:
        self._reqs_need_recv: dict[str, Any] = {}
        self._reqs_need_send: dict[str, float] = {}
        self._reqs_in_batch: set[str] = set()
        self.heartbeats_stopped: list[str] = []

    def _stop_heartbeat(self, request_id: str) -> None:
        self.heartbeats_stopped.append(request_id)

    def update_state_after_alloc(self, request: Request, external: int) -> None:
        params = request.kv_transfer_params
        if not params:
            return
        reads = params.get("do_remote_prefill") or (
            params.get("do_remote_decode") and not params.get("_remote_blocks_processed")
        )
        if reads:
            if params.get("remote_block_ids"):
                self._reqs_need_recv[request.request_id] = (request, external)
            else:
                assert external == 0
            params["do_remote_prefill"] = False
            params["_remote_blocks_processed"] = True

    def metadata(self) -> tuple[dict[str, Any], dict[str, float]]:
        sent = self._reqs_need_recv, self._reqs_need_send
        self._reqs_need_recv, self._reqs_need_send = {}, {}
        return sent


class Agent:
    """Answers as a test says, and keeps what it was told."""

    config = AgentConfig(routing="r:1", lease="l:1")

    def __init__(self) -> None:
        self.answers: dict[str, Answer] = {}
        self.asked: dict[str, dict[str, Any]] = {}
        self.startable = self.valid = True
        self.finished: list[tuple[str, bool, bool]] = []
        self.abandoned: list[str] = []
        self.held: list[Held] = []
        self.freed: list[str] = []
        self.orders: list[Order] = []
        self.done: list[tuple[Order, bool, float]] = []
        self.load: tuple[int, int, float] | None = None

    def begin_read(self, local_id: str, tokens: Any, **how: Any) -> None:
        self.asked[local_id] = {"tokens": tokens, **how}

    def poll_read(self, local_id: str) -> Answer:
        return self.answers.get(local_id, Refused("unknown"))

    def read_started(self, local_id: str) -> bool:
        return self.startable

    def still_valid(self, local_id: str) -> bool:
        return self.valid

    def read_finished(self, local_id: str, *, sent: bool, failed: bool = False) -> None:
        self.finished.append((local_id, sent, failed))

    def abandon(self, local_id: str) -> None:
        self.abandoned.append(local_id)

    def report_held(self, held: Held) -> None:
        self.held.append(held)

    def report_freed(self, ids: list[str]) -> None:
        self.freed.extend(ids)

    def take_orders(self) -> list[Order]:
        orders, self.orders = self.orders, []
        return orders

    def order_done(self, order: Order, *, done: bool, hold_seconds: float = 0.0) -> None:
        self.done.append((order, done, hold_seconds))

    def set_load(self, *, running: int, waiting: int, kv_usage: float) -> None:
        self.load = (running, waiting, kv_usage)


class Engine:
    """The scheduler's part: it calls the hooks in vLLM's order."""

    def __init__(self, *, cuttable: bool = True, tail_matters: bool = False) -> None:
        self.nixl, self.agent, self.manager = Nixl(), Agent(), Manager()
        self.now = 1000.0
        self.leases = LeaseScheduler(
            self.nixl,
            self.agent,  # type: ignore[arg-type]
            cuttable=cuttable,
            tail_matters=tail_matters,
            now=lambda: self.now,
        )
        self.leases.manager = self.manager

    def arrive(self, request: Request) -> Request:
        self.leases.adopt(request)
        self.leases.ask(request)
        return request

    def schedule(self, request: Request, local: int = 0) -> int | None:
        """Return the external tokens that are loaded, None while pending."""
        external, parked = 0, False
        if request.kv_transfer_params and self.leases.knows(request):
            count, parked = self.leases.matched(request, local)
            if count is None:
                return None
            external = count
        self.manager.blocks[request.request_id] = [f"{request.request_id}-b"]
        self.nixl.update_state_after_alloc(request, external)
        self.leases.after_alloc(request, external)
        request.num_computed_tokens = local + external
        request.status = Status.WAITING_FOR_REMOTE_KVS if parked else Status.RUNNING
        return external

    def step(self) -> tuple[dict[str, Any], dict[str, float]]:
        """Return the reads and the deadlines that go to the worker half."""
        for act in self.leases.before_meta():
            act()
        return self.nixl.metadata()

    def finish(
        self, request: Request, status: Status = Status.FINISHED_STOPPED, output: int = 10
    ) -> dict[str, Any] | None:
        """End it; return the parameters that the engine gives out."""
        tokens = request._all_token_ids
        if status is Status.FINISHED_STOPPED:
            tokens.extend(range(5000, 5000 + output))
            request.num_computed_tokens = len(tokens) - 1
        request.status = status
        self.leases.before_finish(request)
        asked = request.kv_transfer_params
        params = None
        if asked and asked.get("do_remote_prefill"):
            self.nixl._reqs_need_recv[request.request_id] = (request, [])
        elif asked and status is Status.FINISHED_STOPPED:
            self.nixl._reqs_need_send[request.request_id] = self.now + 480.0
            blocks = -(-request.num_computed_tokens // SIZE)
            params = {
                "do_remote_prefill": bool(asked.get("do_remote_decode")),
                "do_remote_decode": not asked.get("do_remote_decode"),
                "remote_block_ids": (list(range(blocks)),),
                "remote_engine_id": "me",
                "remote_request_id": request.request_id,
                "remote_host": "h",
                "remote_port": 1,
                "remote_num_tokens": request.num_computed_tokens,
            }
        self.leases.after_finish(request, params is not None, params)
        return params
