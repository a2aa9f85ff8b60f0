"""The gateway against a bare two-leg streaming proxy, both before the same engines.

    python bench/gateway.py [--rounds 4] [--users 16]

The proxy does nothing but two legs: it parses the request, asks a prefill for one token,
parses the answer, puts its kv_transfer_params into the decode's request, and passes on the
bytes that come. aiohttp and orjson under uvloop, as the gateway.

    bare proxy       that
    gateway          `kvplane serve gateway`, with a `kvplane dev` behind it over gRPC
    kvplane dev      the gateway and the control plane in one process

The engines are trivial: answers made before, in one process. Each request is the first turn
of a new session and gets 24 events of a token each. "burst": the engine writes them as fast
as it can, and users ask again at once. "paced": an event every 5 ms, as tokens come from a
real engine; only the CPU time counts there. "cpu us" is the proxy process's for each
request, and "by cpu" the ratio of those: a busy machine disturbs it less than the rates.
"""

import argparse
import asyncio
import contextlib
import os
import pathlib
import sys
import tempfile
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, Final

import aiohttp
import grpc
import orjson
import psutil
import uvloop
from _bench import CLOCK, MODEL, Row, cpu_s, free_port, kvplane, program, register, report, until
from aiohttp import web

EVENTS: Final = 24
PATH: Final = "/v1/chat/completions"
AIM: Final = 0.8
PACE_S: Final = 0.005
TEXT: Final = "The next turn of a conversation starts where the last one has ended. " * 25
END: Final = b"0\r\n\r\n"


# -- engines ----------------------------------------------------------------------


def _event(delta: dict[str, Any], finish: str | None = None) -> bytes:
    chunk = {
        "id": "chatcmpl-0123456789abcdef", "object": "chat.completion.chunk",
        "created": 1_700_000_000, "model": MODEL,
        "choices": [{"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}],
    }  # fmt: skip
    return b"data: " + orjson.dumps(chunk) + b"\n\n"


USAGE: Final = {"prompt_tokens": 400, "total_tokens": 424, "completion_tokens": EVENTS}
PREFILL_ANSWER: Final = orjson.dumps(
    {
        "id": "chatcmpl-0123456789abcdef", "object": "chat.completion", "model": MODEL,
        "choices": [
            {
                "index": 0, "finish_reason": "length",
                "message": {"role": "assistant", "content": "word "},
            }
        ],
        "usage": {**USAGE, "total_tokens": 401, "completion_tokens": 1},
        "kv_transfer_params": {
            "do_remote_prefill": True, "do_remote_decode": False,
            "remote_block_ids": [list(range(25))], "remote_engine_id": "engine-p",
            "remote_request_id": "chatcmpl-0123456789abcdef", "remote_host": "127.0.0.1",
            "remote_port": 5600, "tp_size": 1, "remote_num_tokens": 400,
        },
    }
)  # fmt: skip
USAGE_EVENT: Final = (
    b"data: "
    + orjson.dumps(
        {"id": "chatcmpl-0123456789abcdef", "model": MODEL, "choices": [], "usage": USAGE}
    )
    + b"\n\n"
)


def _chunked(part: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(part), part)


WORD: Final = _chunked(_event({"content": "word "}))
LAST_WORD: Final = _chunked(_event({"content": "word"}, "stop"))
STREAM_HEAD: Final = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\n"
    b"Transfer-Encoding: chunked\r\n\r\n"
)
WHOLE: Final = (
    b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%b"
    % (len(PREFILL_ANSWER), PREFILL_ANSWER)
)


class Engine(asyncio.Protocol):
    """One connection; it answers what the body asks for, and does little else."""

    def __init__(self) -> None:
        self._got = b""
        self._out: asyncio.Transport | None = None

    def connection_made(self, transport: Any) -> None:
        """Keep it."""
        self._out = transport

    def connection_lost(self, exc: Exception | None) -> None:
        """Write no more."""
        self._out = None

    def data_received(self, data: bytes) -> None:
        """Answer a request that is complete."""
        self._got += data
        head, separator, body = self._got.partition(b"\r\n\r\n")
        if not separator:
            return
        size = head.lower().partition(b"content-length:")[2].partition(b"\r\n")[0]
        if len(body) < int(size or 0):
            return
        self._got = b""
        assert self._out is not None
        if b'"max_tokens":1,' in body:
            self._out.write(WHOLE)
            return
        if b'"kv_transfer_params"' not in body:
            raise AssertionError("a decode without a prefill")
        parts = [WORD] * (EVENTS - 1) + [LAST_WORD]
        if b'"include_usage":true' in body:
            parts.append(_chunked(USAGE_EVENT))
        parts[0] = STREAM_HEAD + parts[0]
        parts.append(_chunked(b"data: [DONE]\n\n") + END)
        self._next(parts, 0, paced=b'"paced":true' in body)

    def _next(self, parts: list[bytes], number: int, *, paced: bool) -> None:
        """Write one event in each turn of the loop, as an engine's server does."""
        if self._out is None:
            return
        self._out.write(parts[number])
        if number + 1 == len(parts):
            return
        loop = asyncio.get_running_loop()
        if paced and number < EVENTS:
            loop.call_later(PACE_S, lambda: self._next(parts, number + 1, paced=True))
        else:
            loop.call_soon(lambda: self._next(parts, number + 1, paced=paced))


async def serve_engines(port: int) -> None:
    """Be all engines."""
    server = await asyncio.get_running_loop().create_server(Engine, "127.0.0.1", port)
    await server.serve_forever()


# -- the rival --------------------------------------------------------------------


async def serve_bare(port: int, engine: str) -> None:
    """Be the bare proxy."""
    session = aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=None),
        auto_decompress=False, cookie_jar=aiohttp.DummyCookieJar(),
    )  # fmt: skip
    url = engine + PATH
    headers = {"Content-Type": "application/json"}

    async def complete(http: web.Request) -> web.StreamResponse:
        body = orjson.loads(await http.read())
        prefill = {**body, "stream": False, "max_tokens": 1}
        prefill["kv_transfer_params"] = {"do_remote_decode": True, "do_remote_prefill": False}
        async with session.post(url, data=orjson.dumps(prefill), headers=headers) as answer:
            body["kv_transfer_params"] = orjson.loads(await answer.read())["kv_transfer_params"]
        async with session.post(url, data=orjson.dumps(body), headers=headers) as answer:
            response = web.StreamResponse(headers={"Content-Type": answer.headers["Content-Type"]})
            await response.prepare(http)
            async for chunk in answer.content.iter_any():
                await response.write(chunk)
            await response.write_eof()
        return response

    app = web.Application()
    app.router.add_post(PATH, complete)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    await asyncio.Event().wait()


# -- users ------------------------------------------------------------------------


@dataclass
class Rival:
    """One of those that are compared."""

    name: str
    port: int
    process: psutil.Process
    rates: dict[str, list[float]] = field(default_factory=dict)
    cpu_us: dict[str, list[float]] = field(default_factory=dict)
    _requests: int = 0

    async def alive(self) -> bool:
        """Tell whether a request comes through."""
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        except OSError:
            return False
        try:
            await self._ask(reader, writer, "burst")
        except (AssertionError, OSError, asyncio.IncompleteReadError):
            return False
        finally:
            writer.close()
        return True

    async def measure(self, mode: str, users: int, seconds: float) -> None:
        """Let the users ask for so long; keep the rate and the CPU time."""
        before, start = cpu_s(self.process), perf_counter()
        counts = await asyncio.gather(*(self._user(mode, start + seconds) for _ in range(users)))
        done, spent = sum(counts), perf_counter() - start
        self.rates.setdefault(mode, []).append(done / spent)
        self.cpu_us.setdefault(mode, []).append((cpu_s(self.process) - before) / done * 1e6)

    async def _user(self, mode: str, end: float) -> int:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        count = 0
        while perf_counter() < end:
            await self._ask(reader, writer, mode)
            count += 1
        writer.close()
        return count

    async def _ask(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, mode: str
    ) -> None:
        self._requests += 1
        body = orjson.dumps(
            {
                "model": MODEL, "stream": True, "paced": mode == "paced",
                "messages": [
                    {"role": "system", "content": TEXT}, {"role": "user", "content": "Go on."},
                ],
            }
        )  # fmt: skip
        head = (
            f"POST {PATH} HTTP/1.1\r\nHost: bench\r\nContent-Type: application/json\r\n"
            f"X-Session-Id: {self.port}-{self._requests}\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        writer.write(head.encode() + body)
        status = await reader.readuntil(b"\r\n\r\n")
        assert status.startswith(b"HTTP/1.1 200"), status
        answer = b""
        while not answer.endswith(END):
            part = await reader.read(1 << 16)
            if not part:
                raise asyncio.IncompleteReadError(answer, None)
            answer += part
        assert answer.count(b"data: ") == EVENTS + 1, answer


@contextlib.asynccontextmanager
async def running() -> AsyncIterator[list[Rival]]:
    """Start everything."""
    async with contextlib.AsyncExitStack() as stack:
        folder = pathlib.Path(
            stack.enter_context(tempfile.TemporaryDirectory(prefix="kvplane-bench-"))
        )
        engines, bare, gateway, plane, alone, alone_grpc = (free_port() for _ in range(6))
        stack.enter_context(program(__file__, "--serve-engines", str(engines)))
        rival = stack.enter_context(
            program(__file__, "--serve-bare", str(bare), f"http://127.0.0.1:{engines}")
        )
        grpc_ports = []
        processes = []
        for name, port, http in (("plane", plane, free_port()), ("alone", alone_grpc, alone)):
            database = f"sqlite:///{folder}/{name}.db"
            process = stack.enter_context(
                kvplane(
                    folder / f"{name}.log", "dev", "--port", str(port), "--gateway-port",
                    str(http), "--database", database, KVPLANE_GRPC_STATUS_PORT="0",
                )
            )  # fmt: skip
            grpc_ports.append(port)
            processes.append(process)
        behind = f"127.0.0.1:{plane}"
        front = stack.enter_context(
            kvplane(
                folder / "gateway.log", "serve", "gateway", "--port", str(gateway),
                KVPLANE_ROUTING_ADDRESS=behind, KVPLANE_SESSION_ADDRESS=behind,
                KVPLANE_LEASE_ADDRESS=behind,
            )
        )  # fmt: skip
        for port in grpc_ports:
            async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
                await register(channel, engines, engines)
        rivals = [
            Rival("bare proxy", bare, rival),
            Rival("gateway", gateway, front),
            Rival("kvplane dev", alone, processes[1]),
        ]
        for one in rivals:
            await until(one.alive, one.name)
        yield rivals


async def measure(rounds: int, users: int, seconds: float) -> list[Row]:
    """Go round."""
    async with running() as rivals:
        for one in rivals:
            await one.measure("burst", users, 0.5)
            one.rates.clear()
            one.cpu_us.clear()
        for number in range(rounds):
            turned = rivals[number % 3 :] + rivals[: number % 3]
            for mode in ("burst", "paced"):
                for one in turned:
                    await one.measure(mode, users, seconds)
                    await CLOCK.sleep(0.1)
    rows = []
    for mode in ("burst", "paced"):
        best: Row | None = None
        for one in rivals:
            row = Row(
                f"{one.name}, {mode}", "requests/s", one.rates[mode], one.cpu_us[mode],
                ceiling=best, aim=AIM if best is not None and mode == "burst" else 0.0,
            )  # fmt: skip
            best = best or row
            rows.append(row)
    return rows


def main() -> int:
    """Run it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--users", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=1.2, help="of each measurement")
    parser.add_argument("--serve-engines", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--serve-bare", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve_engines:
        uvloop.run(serve_engines(options.serve_engines))
    if options.serve_bare:
        port, engine = options.serve_bare
        uvloop.run(serve_bare(int(port), engine))
    before = os.getloadavg()
    table = uvloop.run(measure(options.rounds, options.users, options.seconds))
    title = f"kvplane gateway, {options.users} users, {EVENTS} events, {options.rounds} rounds"
    report("gateway", title, table, before)
    return 0


if __name__ == "__main__":
    sys.exit(main())
