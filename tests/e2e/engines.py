"""What an engine says of itself, and a crowd that keeps it busy."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import httpx
from e2e.cluster import MODEL
from e2e.waiting import eventually

# An engine runs so many requests at once; the others queue, the first one first.
AT_ONCE = 8

_NAMES = {
    "vllm:num_requests_running": "running",
    "vllm:num_requests_waiting": "waiting",
    "vllm:kv_cache_usage_perc": "usage",
    "vllm:nixl_bytes_transferred_sum": "bytes_read",
    "vllm:nixl_num_kv_expired_reqs_total": "ran_out",
    "vllm:nixl_num_notifications_after_expiry_total": "read_too_late",
    "vllm:prompt_tokens_total": "prompt_tokens",
    "vllm:prefix_cache_hits_total": "cache_hits",
}


@dataclass
class Figures:
    """An engine's own metrics; counters are since it started."""

    running: int = 0
    # Those whose KV is on its way too.
    waiting: int = 0
    # The share of the KV cache that requests have or that is held, 0 to 1.
    usage: float = 0.0
    bytes_read: int = 0
    # Holds that ended without a read: by time, or because the engine was told to free.
    ran_out: int = 0
    # Reads that ended when the engine held the blocks no more.
    read_too_late: int = 0
    # Tokens that were in the prefix cache.
    cache_hits: int = 0
    # Of requests whose prompt is done.
    prompt_tokens: int = 0
    # Requests that ended with their last token.
    answered: int = 0

    @property
    def at_rest(self) -> bool:
        """It does nothing and holds nothing."""
        return not (self.running or self.waiting or self.usage)


async def figures(url: str) -> Figures:
    """Ask an engine."""
    now = Figures()
    async with httpx.AsyncClient(timeout=10) as http:
        answer = await http.get(f"{url}/metrics")
    for line in answer.text.splitlines():
        name, _, rest = line.partition("{")
        labels, _, value = rest.rpartition(" ")
        field = _NAMES.get(name)
        if name == "vllm:request_success_total" and 'finished_reason="length"' in labels:
            field = "answered"
        if field is not None:
            old = getattr(now, field)
            setattr(now, field, old + type(old)(float(value)))
    return now


@asynccontextmanager
async def crowd(url: str, size: int) -> AsyncIterator[None]:
    """Keep an engine busy with `size` requests that do not end before this does.

    Who comes later queues behind all of them, if `size` is `AT_ONCE` or more.
    """
    body = {
        "model": MODEL,
        "prompt": "One of many",
        "max_tokens": 8000,
        "ignore_eos": True,
        "temperature": 0,
    }
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(timeout=None, limits=limits) as http:
        posts = [
            asyncio.create_task(http.post(f"{url}/v1/completions", json=body)) for _ in range(size)
        ]
        try:

            async def all_there() -> bool:
                now = await figures(url)
                return now.running + now.waiting >= size

            await eventually(all_there)
            yield
            assert not any(post.done() for post in posts)
        finally:
            for post in posts:
                post.cancel()
            await asyncio.gather(*posts, return_exceptions=True)
