"""Scheduler-thread time of the connector for a 128k-token prompt.

    python bench/connector_overhead.py [--tokens 131072] [--rounds 30] [--json FILE]

A real agent talks to a real `kvplane dev` in another process; the hooks are called in
vLLM's order, as the scheduler thread calls them, for a decode that reads a prefill's
blocks and then holds its own. "wait" is the time from the question to the answer, in
which an engine goes on with other requests. "stall" is the longest that the agent's
thread kept the interpreter from the scheduler's while it made digests.

The ceiling is the same proof made where the scheduler waits for it: the digests of the
prompt and of the report, and nothing else.
"""

import argparse
import json
import pathlib
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from time import perf_counter
from types import SimpleNamespace
from typing import Any

from kvplane.kernel.clock import sleep_blocking
from kvplane.kernel.digests import block_digests, digest_space
from kvplane.worker.agent import AgentConfig, Held, Pending, Permit, WorkerAgent, WorkerIdentity
from kvplane_vllm.scheduler import LeaseScheduler

BUDGET_MS = 2.0
SIZE = 16
PORT = 7790


class Nixl:
    """As much of NIXL's scheduler half as the hooks touch."""

    is_bidirectional_kv_xfer_enabled = True
    kv_recompute_threshold = 64
    block_size = SIZE

    def __init__(self) -> None:
        self._reqs_need_recv: dict[str, Any] = {}
        self._reqs_need_send: dict[str, float] = {}
        self._reqs_in_batch: set[str] = set()


def handle(worker: str, request_id: str, tokens: int) -> dict[str, Any]:
    """Return kv_transfer_params of so many tokens."""
    return {
        "remote_block_ids": [list(range(-(-tokens // SIZE)))],
        "remote_engine_id": f"engine-{worker}",
        "remote_request_id": request_id,
        "remote_host": "127.0.0.1",
        "remote_port": 5600,
        "tp_size": 1,
        "remote_num_tokens": tokens,
    }


def agent(worker: str, role: str) -> WorkerAgent:
    """Return a connected agent."""
    address = f"127.0.0.1:{PORT}"
    made = WorkerAgent(
        WorkerIdentity(
            worker_id=worker, role=role, url="http://127.0.0.1:1", kv_host="127.0.0.1",
            kv_port=5600, engine_id=f"engine-{worker}", model="bench", block_size=SIZE,
        ),
        AgentConfig(routing=address, lease=address, grant_wait_seconds=5.0),
    )  # fmt: skip
    made.start()
    wait(lambda: made.away is None, 30)
    return made


def wait(condition: Callable[[], Any], seconds: float = 10.0) -> Any:
    """Poll until it is true."""
    end = perf_counter() + seconds
    while not (value := condition()):
        if perf_counter() > end:
            raise TimeoutError("the control plane did not answer")
        sleep_blocking(0.0005)
    return value


class Round:
    """One prompt through all hooks; the milliseconds of each."""

    def __init__(self, decode: WorkerAgent, number: int, tokens: list[int]) -> None:
        self.spent: dict[str, float] = {}
        self.wait_ms = self.stall_ms = 0.0
        self._decode, self._tokens = decode, tokens
        self._nixl = Nixl()
        self._leases = LeaseScheduler(self._nixl, decode, cuttable=True, tail_matters=False)
        self._leases.manager = SimpleNamespace(usage=0.5)
        params = {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "kvplane": {"tenant": "default", "session": f"s{number}", "turn": 1},
            **handle("p", f"p{number}", len(tokens)),
        }
        self._request = SimpleNamespace(
            request_id=f"d{number}", kv_transfer_params=params, prompt_token_ids=tokens,
            _all_token_ids=[*tokens, *range(100)], all_token_ids=[*tokens, *range(100)],
            num_prompt_tokens=len(tokens), num_computed_tokens=0, num_output_placeholders=0,
            cache_salt=None, lora_request=None, mm_features=[], prompt_embeds=None,
            skip_reading_prefix_cache=False, is_finished=lambda: False,
        )  # fmt: skip

    def timed(self, name: str, hook: Callable[..., Any], *args: Any) -> Any:
        """Call a hook and add up its time."""
        start = perf_counter()
        answer = hook(*args)
        self.spent[name] = self.spent.get(name, 0.0) + (perf_counter() - start) * 1e3
        return answer

    def meta(self) -> None:
        """Do what build_connector_meta does."""
        for act in self._leases.before_meta():
            act()

    def run(self) -> None:
        """Go through all hooks in vLLM's order."""
        leases, request, nixl = self._leases, self._request, self._nixl
        self.timed("on_new_request", lambda: (leases.adopt(request), leases.ask(request)))
        asked = last = perf_counter()
        while True:
            answer = self.timed("get_num_new_matched_tokens", leases.matched, request, 0)
            if answer[0] is not None:
                break
            # The scheduler thread at work: it notices when it does not get to run.
            now = perf_counter()
            self.stall_ms = max(self.stall_ms, (now - last) * 1e3)
            while (last := perf_counter()) < now + 0.0005:
                pass
        self.wait_ms = (perf_counter() - asked) * 1e3
        assert answer == (len(self._tokens), True), answer
        nixl._reqs_need_recv[request.request_id] = (request, [])
        self.timed("update_state_after_alloc", leases.after_alloc, request, answer[0])
        self.timed("build_connector_meta", self.meta)
        nixl._reqs_need_recv.clear()
        output = SimpleNamespace(finished_recving={request.request_id}, finished_sending=None)
        self.timed("update_connector_output", leases.outputs, output)
        request.num_computed_tokens = len(request._all_token_ids) - 1
        nixl._reqs_need_send[request.request_id] = perf_counter() + 480
        returned = handle("d", request.request_id, request.num_computed_tokens)
        self.timed("request_finished", leases.before_finish, request)
        self.timed("request_finished", leases.after_finish, request, True, returned)
        self.timed("build_connector_meta", self.meta)
        sent = SimpleNamespace(finished_recving=None, finished_sending={request.request_id})
        self.timed("update_connector_output", leases.outputs, sent)


def owned(prefill: WorkerAgent, number: int, tokens: list[int], probe: WorkerAgent) -> None:
    """Let the prefill hold the prompt; wait until the lease service knows."""
    prefill.report_held(
        Held(
            request_id=f"p{number}", params=handle("p", f"p{number}", len(tokens)), tokens=tokens,
            num_tokens=len(tokens), hold_seconds=300.0, cuttable=True, tenant_id="default",
            session_id=f"s{number}", turn=1, for_decode=True,
        )
    )  # fmt: skip
    probe.begin_read(f"probe{number}", tokens[:SIZE], handle=("engine-p", f"p{number}"))
    known = wait(lambda: (a := probe.poll_read(f"probe{number}")) != Pending() and a)
    assert isinstance(known, Permit), known
    probe.abandon(f"probe{number}")
    sleep_blocking(0.05)


def ceiling(tokens: list[int]) -> float:
    """Return the milliseconds of both proofs, made at once."""
    start = perf_counter()
    block_digests(tokens, SIZE, digest_space("bench"))
    block_digests([*tokens, *range(99)], SIZE, digest_space("bench"))
    return (perf_counter() - start) * 1e3


def measure(count: int, rounds: int) -> dict[str, Any]:
    """Return the medians of all rounds."""
    prefill, probe, decode = agent("p", "prefill"), agent("probe", "both"), agent("d", "decode")
    done: list[Round] = []
    inline: list[float] = []
    for number in range(rounds):
        tokens = [(number * 7919 + i * 31) % 150_000 for i in range(count)]
        owned(prefill, number, tokens, probe)
        one = Round(decode, number, tokens)
        one.run()
        done.append(one)
        inline.append(ceiling(tokens))
    for each in (decode, probe, prefill):
        each.close()
    names = list(done[0].spent)
    totals = sorted(sum(r.spent.values()) for r in done)
    return {
        "tokens": count,
        "hooks_ms": {name: statistics.median(r.spent[name] for r in done) for name in names},
        "total_ms": statistics.median(totals),
        "total_worst_ms": totals[-1],
        "wait_ms": statistics.median(r.wait_ms for r in done),
        "stall_ms": statistics.median(r.stall_ms for r in done),
        "ceiling_ms": statistics.median(inline),
    }


def main() -> int:
    """Run it; 0 when the hooks stay within the budget."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--tokens", type=int, default=131_072)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--json", type=pathlib.Path)
    options = parser.parse_args()
    with (
        tempfile.TemporaryDirectory() as directory,
        pathlib.Path(directory, "kvplane.log").open("w") as log,
    ):
        kvplane = pathlib.Path(sys.executable).with_name("kvplane")
        plane = subprocess.Popen(
            [kvplane, "dev", "--port", str(PORT), "--gateway-port", str(PORT + 1), "--database",
             f"sqlite+aiosqlite:///{directory}/kvplane.db"],
            stdout=log, stderr=log,
        )  # fmt: skip
        try:
            result = measure(options.tokens, options.rounds)
        finally:
            plane.terminate()
            plane.wait(20)
    print(f"{'hook':<30}{'ms (median)':>12}")
    for name, spent in result["hooks_ms"].items():
        print(f"{name:<30}{spent:>12.3f}")
    print(f"{'all hooks of one prompt':<30}{result['total_ms']:>12.3f}   budget {BUDGET_MS} ms")
    print(f"{'worst of all rounds':<30}{result['total_worst_ms']:>12.3f}")
    print(f"{'wait for the answer':<30}{result['wait_ms']:>12.3f}   other requests go on")
    print(f"{'longest stall meanwhile':<30}{result['stall_ms']:>12.3f}")
    print(f"{'ceiling: digests inline':<30}{result['ceiling_ms']:>12.3f}")
    print(f"hooks / ceiling: {result['total_ms'] / result['ceiling_ms']:.3f}")
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    return 0 if result["total_ms"] <= BUDGET_MS else 1


if __name__ == "__main__":
    sys.exit(main())
