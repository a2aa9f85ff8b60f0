"""The demo's conversation by hand: two vLLMs, handles passed on, no control plane.

    PYTHONPATH=examples .venv/bin/python -m demo.by_hand

What it gets is what the demo is measured against. vLLM up to 0.32 returns handles only
from unary answers, so the time to the first token is measured as the prefill leg, timed in
each run, plus the decode leg's first token, timed on the streamed run without reuse.
"""

import json
import sys
from typing import Any

import aiohttp
from kvplane.kernel.clock import SystemClock

from demo.build_model import SHAPES, build
from demo.conversation import TURNS, Conversation
from demo.servers import free_port, stop_all, wait_for
from demo.vllm_worker import VllmWorker

COLD = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
_clock = SystemClock()


async def leg(
    session: aiohttp.ClientSession, url: str, body: dict[str, Any]
) -> tuple[dict[str, Any], float]:
    """Send one unary leg and return the answer and its seconds."""
    began = _clock.monotonic()
    async with session.post(f"{url}/v1/chat/completions", json=body) as answer:
        result: dict[str, Any] = await answer.json()
        if answer.status != 200:
            raise RuntimeError(f"{answer.status}: {result}")
    return result, _clock.monotonic() - began


async def first_token(session: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> float:
    """Send a streamed leg and return the seconds to its first token."""
    began, first = _clock.monotonic(), 0.0
    async with session.post(f"{url}/v1/chat/completions", json={**body, "stream": True}) as answer:
        async for line in answer.content:
            if not first and line.startswith(b"data: {") and _has_token(line):
                first = _clock.monotonic() - began
    return first


def _has_token(line: bytes) -> bool:
    choices = json.loads(line[6:])["choices"]
    return bool(choices and choices[0]["delta"].get("content"))


async def converse(prefill: str, decode: str, *, reuse: bool) -> list[dict[str, Any]]:
    """Hold the conversation and return what each turn took."""
    conversation, handle, turns = Conversation(), COLD, []
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=300)) as session:
        for _ in range(TURNS):
            body = conversation.request("demo")
            one = {**body, "max_tokens": 1, "kv_transfer_params": handle if reuse else COLD}
            first, prefill_s = await leg(session, prefill, one)
            decode_s = 0.0
            if not reuse:
                params = first["kv_transfer_params"]
                decode_s = await first_token(
                    session, decode, {**body, "kv_transfer_params": params}
                )
                first, _ = await leg(session, prefill, one)
            last, _ = await leg(
                session, decode, {**body, "kv_transfer_params": first["kv_transfer_params"]}
            )
            handle = last["kv_transfer_params"]
            choice, usage = last["choices"][0], first["usage"]
            turns.append(
                {
                    "prompt": usage["prompt_tokens"],
                    "cached": (usage["prompt_tokens_details"] or {}).get("cached_tokens", 0),
                    "held": handle["remote_num_tokens"],
                    "prefill_s": prefill_s,
                    "decode_s": decode_s,
                    "tokens": choice["token_ids"],
                }
            )
            conversation.answer(choice["message"]["content"])
    return turns


async def measure() -> bool:
    """Run both and print a line a turn; True when all tokens are equal."""
    model = build("demo")
    cache = 8192 * 6 * SHAPES["demo"].kv_bytes_per_token()
    servers = [
        VllmWorker(
            f"by-hand-{role}",
            model,
            free_port(),
            free_port(),
            kind,
            kv_cache_bytes=cache,
            prefix_caching=False,
            # The run without reuse leaves its holds to run out.
            connector_config={"decoder_kv_blocks_ttl": 30},
        ).server()
        for role, kind in (("prefill", "kv_producer"), ("decode", "kv_consumer"))
    ]
    try:
        for server in servers:
            server.start()
        wait_for(servers, say=print)
        prefill, decode = (server.url for server in servers)
        await converse(prefill, decode, reuse=True)  # warm-up
        without = await converse(prefill, decode, reuse=False)
        with_reuse = await converse(prefill, decode, reuse=True)
    finally:
        stop_all(servers)
    equal = True
    for turn, (a, b) in enumerate(zip(without, with_reuse, strict=True), 1):
        base, ttft = a["prefill_s"] + a["decode_s"], b["prefill_s"] + a["decode_s"]
        same = a["tokens"] == b["tokens"]
        equal = equal and same
        print(
            f"turn {turn}: prompt {b['prompt']}, reused {b['cached']}, prefill leg "
            f"{a['prefill_s'] * 1e3:.0f} -> {b['prefill_s'] * 1e3:.0f} ms "
            f"({a['prefill_s'] / b['prefill_s']:.2f}), first token {base * 1e3:.0f} -> "
            f"{ttft * 1e3:.0f} ms ({base / ttft:.2f}), tokens {'equal' if same else 'DIFFER'}"
        )
    return equal


if __name__ == "__main__":
    import asyncio

    sys.exit(0 if asyncio.run(measure()) else 1)
