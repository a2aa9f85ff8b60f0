"""/v1/models: what the workers serve."""

from collections.abc import Iterable
from typing import Any

from kvplane.api.routing.v1 import routing_pb2 as routing
from kvplane.gateway.workers import served_names


def models(workers: Iterable[routing.Worker]) -> list[dict[str, Any]]:
    """Return OpenAI's model objects, one for each name that a living worker serves."""
    longest: dict[str, int] = {}
    roots: dict[str, str] = {}
    for worker in workers:
        if worker.state == routing.WORKER_STATE_LOST:
            continue
        names = served_names(worker)
        for name in names:
            roots.setdefault(name, worker.compatibility.model)
            known = longest.get(name, 0)
            # The shortest limit holds for whatever worker answers; 0 is not known.
            longest[name] = min(known, worker.max_model_len) if known else worker.max_model_len
    return [
        {
            "id": name,
            "object": "model",
            "created": 0,
            "owned_by": "kvplane",
            "root": roots[name],
            "max_model_len": length or None,
        }
        for name, length in sorted(longest.items())
    ]
