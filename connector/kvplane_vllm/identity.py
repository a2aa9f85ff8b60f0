"""Who this engine is, read from vLLM's configuration."""

from typing import Any

from kvplane.worker.identity import WorkerIdentity

from kvplane_vllm import compat
from kvplane_vllm.config import PluginConfig

_ROLES = {"kv_producer": "prefill", "kv_consumer": "decode", "kv_both": "both"}


def identity_of(
    vllm_config: Any,
    nixl: Any,
    config: PluginConfig,
    version: str,
    kv_layout: str,
    num_blocks: int,
) -> WorkerIdentity:
    """Return what the worker registers as. One DP rank is one worker."""
    model = vllm_config.model_config
    parallel = vllm_config.parallel_config
    rank = parallel.data_parallel_index if parallel.data_parallel_size > 1 else None
    served = model.served_model_name
    names = (served,) if isinstance(served, str) else tuple(served or ())
    return WorkerIdentity(
        worker_id=config.worker_id + (f"-dp{rank}" if rank is not None else ""),
        role=_ROLES[vllm_config.kv_transfer_config.kv_role],
        url=config.url,
        kv_host=nixl.side_channel_host,
        kv_port=nixl.side_channel_port,
        engine_id=nixl.engine_id,
        model=model.model,
        revision=model.revision or "",
        block_size=nixl.block_size,
        kv_layout=kv_layout,
        kv_dtype=f"{vllm_config.cache_config.cache_dtype}/{model.dtype}",
        engine_version=version,
        served_models=config.served_models or names or (model.model,),
        data_parallel_rank=rank,
        bidirectional=bool(nixl.is_bidirectional_kv_xfer_enabled),
        max_model_len=model.max_model_len,
        recompute_threshold=nixl.kv_recompute_threshold,
        num_blocks=num_blocks,
    )


def cuttable(vllm_config: Any, kv_cache_config: Any, full_attention: Any) -> bool:
    """Return whether the first n blocks of a request can be read alone.

    Every group must be full attention in blocks of the scheduler's size, and a block
    must lie on one rank.
    """
    parallel = vllm_config.parallel_config
    spread = getattr(parallel, "decode_context_parallel_size", 1) * getattr(
        parallel, "prefill_context_parallel_size", 1
    )
    size = vllm_config.cache_config.block_size
    return spread == 1 and all(
        isinstance(group.kv_cache_spec, full_attention) and group.kv_cache_spec.block_size == size
        for group in compat.transfer_groups(kv_cache_config)
    )
