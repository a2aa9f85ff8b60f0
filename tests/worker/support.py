"""Helpers of the agent's tests."""

import time
from collections.abc import Callable
from typing import Any

from kvplane.worker.agent import (
    Answer,
    Held,
    Pending,
    WorkerAgent,
    WorkerIdentity,
)

TOKENS = list(range(2000, 3000))


def until(condition: Callable[[], Any], seconds: float = 5.0) -> Any:
    """Poll until it is true; fail after that many seconds."""
    end = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.002)
    return value


def settled(agent: WorkerAgent, local_id: str) -> Answer:
    """Return the answer, as an engine that asks again and again."""
    return until(lambda: (a := agent.poll_read(local_id)) != Pending() and a)


def identity(worker_id: str, **more: Any) -> WorkerIdentity:
    values: dict[str, Any] = {
        "worker_id": worker_id,
        "role": "both",
        "url": f"http://{worker_id}:8000",
        "kv_host": worker_id,
        "kv_port": 5600,
        "engine_id": f"engine-{worker_id}",
        "model": "model",
        "block_size": 16,
    }
    return WorkerIdentity(**{**values, **more})


def held(worker_id: str, request_id: str, tokens: list[int] = TOKENS, **more: Any) -> Held:
    blocks = -(-len(tokens) // 16)
    params = {
        "do_remote_prefill": False,
        "do_remote_decode": True,
        "remote_block_ids": [list(range(blocks))],
        "remote_engine_id": f"engine-{worker_id}",
        "remote_request_id": request_id,
        "remote_host": worker_id,
        "remote_port": 5600,
        "remote_num_tokens": len(tokens),
        "kvplane": {"tenant": "acme"},
    }
    values: dict[str, Any] = {
        "request_id": request_id,
        "params": params,
        "tokens": tokens,
        "num_tokens": len(tokens),
        "hold_seconds": 480.0,
        "cuttable": True,
        "tenant_id": "acme",
        "session_id": "session",
        "turn": 1,
    }
    return Held(**{**values, **more})
