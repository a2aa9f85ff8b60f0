"""Counters of one engine, and their Prometheus text under vLLM's names."""

from dataclasses import dataclass


@dataclass(slots=True)
class Stats:
    """What has happened since the start."""

    running: int = 0
    waiting: int = 0
    # Reads under way that a request waits for.
    reading: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    requests: int = 0
    aborted: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    external_queries: int = 0
    external_hits: int = 0
    nixl_reads: int = 0
    nixl_bytes: int = 0
    nixl_seconds: float = 0.0
    nixl_failed: int = 0
    nixl_failed_notifications: int = 0
    kv_expired: int = 0
    late_notifications: int = 0
    # Reads that a lost lease cut off, permits that had run out, and decodes that got none.
    reads_dropped: int = 0
    reads_refused: int = 0
    reads_denied: int = 0
    # Reads under way whose request went away.
    reads_abandoned: int = 0
    # Orders of the control plane that were carried out.
    freed_by_order: int = 0
    held_longer: int = 0


def exposition(stats: Stats, model: str, held: int, used: int, total: int, parked: int) -> str:
    """Return the Prometheus text format."""
    labels = f'{{engine="0",model_name="{model}"}}'
    rows: list[tuple[str, str, float]] = [
        ("vllm:num_requests_running", "gauge", stats.running),
        ("vllm:num_requests_waiting", "gauge", stats.waiting),
        ("vllm:kv_cache_usage_perc", "gauge", used / total),
        ("vllm:prompt_tokens_total", "counter", stats.prompt_tokens),
        ("vllm:generation_tokens_total", "counter", stats.generation_tokens),
        ("vllm:prefix_cache_queries_total", "counter", stats.prefix_queries),
        ("vllm:prefix_cache_hits_total", "counter", stats.prefix_hits),
        ("vllm:external_prefix_cache_queries_total", "counter", stats.external_queries),
        ("vllm:external_prefix_cache_hits_total", "counter", stats.external_hits),
        ("vllm:nixl_bytes_transferred_sum", "counter", stats.nixl_bytes),
        ("vllm:nixl_bytes_transferred_count", "counter", stats.nixl_reads),
        ("vllm:nixl_xfer_time_seconds_sum", "counter", stats.nixl_seconds),
        ("vllm:nixl_xfer_time_seconds_count", "counter", stats.nixl_reads),
        ("vllm:nixl_num_failed_transfers_total", "counter", stats.nixl_failed),
        (
            "vllm:nixl_num_failed_notifications_total",
            "counter",
            stats.nixl_failed_notifications,
        ),
        ("vllm:nixl_num_kv_expired_reqs_total", "counter", stats.kv_expired),
        ("vllm:nixl_num_notifications_after_expiry_total", "counter", stats.late_notifications),
        ("kvplane_engine_requests_total", "counter", stats.requests),
        ("kvplane_engine_requests_aborted_total", "counter", stats.aborted),
        ("kvplane_engine_reads_dropped_total", "counter", stats.reads_dropped),
        ("kvplane_engine_reads_refused_total", "counter", stats.reads_refused),
        ("kvplane_engine_reads_denied_total", "counter", stats.reads_denied),
        ("kvplane_engine_reads_abandoned_total", "counter", stats.reads_abandoned),
        ("kvplane_engine_freed_by_order_total", "counter", stats.freed_by_order),
        ("kvplane_engine_held_longer_total", "counter", stats.held_longer),
        ("kvplane_engine_held_requests", "gauge", held),
        ("kvplane_engine_blocks_in_use", "gauge", used),
        ("kvplane_engine_blocks_total", "gauge", total),
        ("kvplane_engine_blocks_quarantined", "gauge", parked),
    ]
    lines = []
    for name, kind, value in rows:
        lines.append(f"# TYPE {name} {kind}")
        lines.append(f"{name}{labels} {value}")
    return "\n".join(lines) + "\n"
