"""Real engine processes, and engines inside the test."""

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, replace

import httpx
from kvplane.engine import sidechannel
from kvplane.engine.config import EngineConfig
from kvplane.engine.core import Engine, Request
from kvplane.engine.reuse import Reuse, Unmanaged
from kvplane.kernel.clock import SystemClock

CLOCK = SystemClock()
COLD = {"do_remote_decode": True, "do_remote_prefill": False}
FREE = EngineConfig(prefill_us_per_token=0, decode_us_per_token=0, num_blocks=512)


def tokens(seed: str, count: int) -> list[int]:
    """Some prompt that differs from any other seed's in its first block."""
    return list((f"{seed} went to the market and bought " * count).encode()[:count])


async def eventually(check: Callable[[], bool], seconds: float = 5.0) -> None:
    end = CLOCK.monotonic() + seconds
    while not check():
        assert CLOCK.monotonic() < end, "it did not happen in time"
        await CLOCK.sleep(0.01)


@dataclass
class Answer:
    status: int
    ids: list[int]
    text: str
    cached: int
    params: dict | None
    raw: dict


class EngineProcess:
    """One `python -m kvplane.engine`."""

    def __init__(self, *args: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "kvplane.engine", "--port", "0", "--debug", *args],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, "the engine did not start"
        self.about = json.loads(line)
        self.url = self.about["url"]
        self.http = httpx.Client(base_url=self.url, timeout=30)

    def stop(self) -> int:
        self.http.close()
        self.process.terminate()
        try:
            return self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(10)

    def state(self) -> dict:
        return self.http.get("/debug/state").json()

    def complete(self, prompt, params=None, max_tokens: int = 16, **more) -> Answer:
        body = {"prompt": prompt, "max_tokens": max_tokens, "return_token_ids": True, **more}
        if params is not None:
            body["kv_transfer_params"] = params
        answer = self.http.post("/v1/completions", json=body)
        raw = answer.json()
        if answer.status_code != 200:
            return Answer(answer.status_code, [], "", 0, None, raw)
        choice = raw["choices"][0]
        return Answer(
            200,
            choice["token_ids"],
            choice["text"],
            raw["usage"]["prompt_tokens_details"]["cached_tokens"],
            raw["kv_transfer_params"],
            raw,
        )

    def wait_held(self, count: int) -> None:
        wait_for(lambda: len(self.state()["held"]) == count)


def wait_for(check: Callable[[], bool], seconds: float = 5.0) -> None:
    asyncio.run(eventually(check, seconds))


@dataclass
class Pair:
    """A prefill and a decode engine, unmanaged, as plain vLLM."""

    prefill: EngineProcess
    decode: EngineProcess

    def turn(self, prompt: list[int], handle: dict | None = None, max_tokens: int = 16):
        """Play a turn's two legs; return both answers."""
        params = {**(handle or {}), **COLD}
        first = self.prefill.complete(prompt, params, 1)
        assert first.status == 200, first.raw
        second = self.decode.complete(prompt, first.params, max_tokens)
        assert second.status == 200, second.raw
        return first, second

    def reference(self, prompt: list[int], max_tokens: int = 16) -> list[int]:
        """What a cold engine says."""
        return self.prefill.complete(prompt, None, max_tokens).ids


@asynccontextmanager
async def engine(
    config: EngineConfig = FREE, reuse: Reuse | None = None, **changes
) -> AsyncIterator[Engine]:
    """An engine inside the test, with its side channel."""
    made = Engine(replace(config, **changes), CLOCK)
    made.attach(reuse or Unmanaged())
    channel = await sidechannel.serve("127.0.0.1", 0, made.transfer.introduction)
    made.kv_port = channel.sockets[0].getsockname()[1]
    serving = asyncio.create_task(made.run())
    try:
        yield made
    finally:
        channel.close()
        serving.cancel()
        results = await asyncio.gather(serving, return_exceptions=True)
        assert isinstance(results[0], asyncio.CancelledError), results


def request(ident: str, prompt: list[int], params=None, max_tokens: int = 8, **more) -> Request:
    return Request(ident, prompt, max_tokens, params=params, **more)


async def generate(on: Engine, wanted: Request) -> list[int]:
    async with aclosing(on.generate(wanted)) as produced:
        return [token async for token in produced]
