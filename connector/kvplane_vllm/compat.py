"""Where vLLM versions differ, each difference with a name. vLLM is imported lazily."""

import inspect
from typing import Any


def is_finished(request: Any) -> bool:
    """Return whether the engine has ended the request."""
    return bool(request.is_finished())


def failed_reads(output: Any, manager: Any) -> set[str]:
    """Return the finished reads that failed.

    0.32 names them. Before, their blocks are named, and still theirs at this point.
    """
    named = getattr(output, "failed_recving", None)
    if named is not None:
        return set(named)
    invalid = getattr(output, "invalid_block_ids", None)
    if not invalid or manager is None:
        return set()
    return {
        request_id
        for request_id in output.finished_recving or ()
        if any(not invalid.isdisjoint(group) for group in manager.get_block_ids(request_id))
    }


def stop_heartbeat(nixl: Any, request_id: str) -> None:
    """Stop extending a prefill's hold (0.21 does not)."""
    stop = getattr(nixl, "_stop_heartbeat", None)
    if stop is not None:
        stop(request_id)


def take_back(request: Any, manager: Any) -> list[Any]:
    """Make the scheduler compute a request that it parked for a read.

    Returns its blocks, not freed: the caller frees them when nothing writes into them
    any more (`free_blocks`). A request that is not parked is left alone.
    """
    from vllm.v1.request import RequestStatus  # noqa: PLC0415

    if request.status != RequestStatus.WAITING_FOR_REMOTE_KVS:
        return []
    blocks = _pop_blocks(request, manager)
    request.num_computed_tokens = 0
    request.status = RequestStatus.PREEMPTED if request.num_preemptions else RequestStatus.WAITING
    return blocks


def _pop_blocks(request: Any, manager: Any) -> list[Any]:
    pop = getattr(manager, "pop_blocks_for_free", None)
    if pop is not None:
        return list(pop(request))
    blocks: list[Any] = []
    for group in manager.coordinator.single_type_managers:  # 0.21
        blocks += group.req_to_blocks.pop(request.request_id, [])
        group.num_cached_block.pop(request.request_id, None)
    return blocks


def free_blocks(blocks: list[Any], manager: Any) -> None:
    """Give blocks back to the pool, the last ones to be evicted first."""
    manager.block_pool.free_blocks(reversed(blocks))


def kv_usage(manager: Any) -> float:
    """Return the used share of the KV cache."""
    return float(manager.usage) if manager is not None else 0.0


def num_blocks(kv_cache_config: Any) -> int:
    """Return how many blocks the engine's pool has, 0 where it does not say."""
    return int(getattr(kv_cache_config, "num_blocks", None) or 0)


def transfer_groups(kv_cache_config: Any) -> list[Any]:
    """Return the KV-cache groups that are transferred (0.21 transfers all)."""
    groups = getattr(kv_cache_config, "transfer_groups", None)
    return list(groups if groups is not None else kv_cache_config.kv_cache_groups)


def manager_of_caller() -> Any:
    """Return the KV-cache manager of the scheduler that is calling the connector.

    Before 0.32 vLLM hands over the block pool only.
    """
    frame = inspect.currentframe()
    caller = frame.f_back.f_back if frame is not None and frame.f_back is not None else None
    owner = caller.f_locals.get("self") if caller is not None else None
    return getattr(owner, "kv_cache_manager", None)


def inherited(parent: Any, hook: str, *args: Any) -> Any:
    """Call vLLM's own hook where this version has it."""
    method = getattr(parent, hook, None)
    return method(*args) if method is not None else None
