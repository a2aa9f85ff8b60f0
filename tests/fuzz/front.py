"""The gateway before reference engines, as strangers reach it, and what must be left after them."""

import asyncio
import json
import os
import secrets
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final
from unittest.mock import patch

import aiohttp
from kvplane.api.session.v1 import session_pb2 as session
from kvplane.api.tenant.v1 import tenant_pb2 as tenant
from kvplane.cli.front import gateway_config
from kvplane.client import Channels, session_api, tenant_api
from kvplane.db import migrate
from kvplane.gateway.main import GatewayPart
from kvplane.kernel.clock import SystemClock
from kvplane.runtime.settings import load

from fuzz.findings import Finding
from fuzz.markers import Markers
from fuzz.world import TOKEN, composed

MODEL: Final = "tiny"
_clock: Final = SystemClock()
_START_S: Final = 60.0
_END_S: Final = 20.0


@dataclass
class Engine:
    """A process of the reference engine."""

    name: str
    process: asyncio.subprocess.Process
    url: str = ""


@dataclass
class Front:
    """The running gateway, keys for it, and what strangers must not see."""

    port: int
    address: str
    gateway: GatewayPart
    engines: list[Engine]
    http: aiohttp.ClientSession
    channels: Channels = field(default_factory=Channels)
    tenants: dict[str, str] = field(default_factory=dict)
    keys: dict[str, str] = field(default_factory=dict)
    # "ours" only: theirs is the stranger.
    markers: Markers = field(default_factory=lambda: Markers(set()))
    # Names of sessions of each tenant.
    sessions: dict[str, list[str]] = field(default_factory=dict)
    # Words that tell of the inside: addresses, ids of workers and of what they hold.
    inside: list[bytes] = field(default_factory=list)

    @property
    def url(self) -> str:
        """Where the gateway listens."""
        return f"http://127.0.0.1:{self.port}"

    # -- what is there before -----------------------------------------------------

    async def plant(self) -> None:
        """Make two tenants with a conversation each; remember the first one's secrets."""
        api = tenant_api(self.address, token=TOKEN, channels=self.channels)
        secret: set[bytes | int] = set()
        for name in ("ours", "theirs"):
            tenant_id = self.tenants[name] = f"tenant-{secrets.token_hex(6)}"
            display = f"Called {secrets.token_hex(8)}"
            await api.CreateTenant(
                tenant.CreateTenantRequest(tenant_id=tenant_id, display_name=display)
            )
            made = await api.CreateApiKey(tenant.CreateApiKeyRequest(tenant_id=tenant_id))
            self.keys[name] = made.secret
            resolved = await api.ResolveApiKey(tenant.ResolveApiKeyRequest(secret=made.secret))
            named = f"conversation-{secrets.token_hex(8)}"
            self.sessions[name] = [named]
            told = f"remember {secrets.token_hex(12)}"
            session_ids = await self._talk(name, named, told)
            if name == "ours":
                secret |= {
                    text.encode()
                    for text in (
                        tenant_id, display, made.secret, made.api_key.key_id, named, told,
                        resolved.cache_salt, *session_ids,
                    )
                }  # fmt: skip
        self.markers = Markers({value for value in secret if value})
        for engine in self.engines:
            self.inside += [engine.name.encode(), engine.url.encode()]
        self.inside.append(TOKEN.encode())

    async def _talk(self, name: str, session_name: str, text: str) -> set[str]:
        """Play two turns; return the ids that the answers named."""
        ids = set()
        messages = [{"role": "user", "content": f"{text} {text} {text}"}]
        for _ in range(2):
            async with self.http.post(
                f"{self.url}/v1/chat/completions",
                json={"model": MODEL, "messages": messages, "session_id": session_name,
                      "max_tokens": 8},
                headers={"Authorization": f"Bearer {self.keys[name]}"},
            ) as answer:  # fmt: skip
                assert answer.status == 200, await answer.text()
                ids.add(answer.headers.get("X-Kvplane-Session-Id", ""))
                choice = (await answer.json())["choices"][0]["message"]
            messages += [
                {"role": "assistant", "content": choice["content"]},
                {"role": "user", "content": "go on"},
            ]
        return ids - {""}

    async def wait_for_workers(self) -> None:
        """Wait until the gateway knows both."""
        end = _clock.monotonic() + _START_S
        while True:
            async with self.http.get(f"{self.url}/readyz") as answer:
                found = await answer.json()
            if found.get("workers", 0) >= len(self.engines):
                return
            assert _clock.monotonic() < end, f"no workers: {found}"
            await _clock.sleep(0.05)

    # -- what is left -------------------------------------------------------------

    async def check_all_given_back(self) -> None:
        """End all sessions; nothing may be held, leased or under way then. Raises Finding."""
        end = _clock.monotonic() + _END_S
        while left := await self._left():
            if _clock.monotonic() > end:
                raise Finding("half_stored", f"still there {_END_S} s later: {'; '.join(left)}")
            await self._end_sessions()
            await _clock.sleep(0.1)

    async def _end_sessions(self) -> None:
        for tenant_id in self.tenants.values():
            api = session_api(self.address, tenant=tenant_id, token=TOKEN, channels=self.channels)
            active = await api.ListSessions(
                session.ListSessionsRequest(states=[session.SESSION_STATE_ACTIVE], page_size=1000)
            )
            for one in active.sessions:
                await api.EndSession(session.EndSessionRequest(session_id=one.session_id))

    async def _left(self) -> list[str]:
        left = [
            line
            for line in self.gateway.metrics.text().decode().splitlines()
            if line.startswith("kvplane_gateway_requests_running") and not line.endswith(" 0.0")
        ]
        for engine in self.engines:
            async with self.http.get(f"{engine.url}/debug/state") as answer:
                state = await answer.json()
            stats, blocks = state["stats"], state["blocks"]
            if stats["running"] or stats["waiting"] or blocks["in_use"] or blocks["held"]:
                left.append(f"{engine.name}: {blocks} {stats['running']} {stats['waiting']}")
            if state["held"] or state["dead"]:
                left.append(f"{engine.name}: {state['held']} {state['dead']}")
        return left


async def _engine(role: str, address: str, folder: Path) -> Engine:
    name = f"worker-{role}-{secrets.token_hex(4)}"
    with (folder / f"{role}.log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "kvplane.engine", "--port=0", "--debug",
            f"--role={role}", f"--model={MODEL}", f"--control-plane={address}",
            f"--worker-id={name}", "--max-model-len=1024", "--num-blocks=2048",
            "--default-max-tokens=8", "--prefill-us-per-token=0", "--decode-us-per-token=0",
            env={**os.environ, "KVPLANE_TOKEN": TOKEN},
            stdout=asyncio.subprocess.PIPE,
            stderr=log,
        )  # fmt: skip
    return Engine(name, process)


async def _where(engine: Engine) -> None:
    assert engine.process.stdout is not None
    async with asyncio.timeout(_START_S):
        line = await engine.process.stdout.readline()
    assert line, f"{engine.name} did not start"

    engine.url = json.loads(line)["url"]


@asynccontextmanager
async def running(folder: Path) -> AsyncIterator[Front]:
    """Run the services, the gateway and two engines, with something of two tenants."""
    url = f"sqlite:///{folder / 'front.db'}"
    await migrate.upgrade(url)
    settings = load(
        database={"url": url},
        grpc={"port": 0, "status_port": 0, "drain_s": 0},
        auth={"mode": "api_key", "internal_token": TOKEN},
    )
    # What waits for a client waits shorter, so that odd ones do not hold up the search.
    config = replace(
        gateway_config(settings), body_timeout_s=0.7, head_timeout_s=0.7, max_body_bytes=1_000_000,
        keepalive_timeout_s=0.5, drain_s=0, refresh_interval_s=0.2,
    )  # fmt: skip
    with patch("kvplane.cli.front.gateway_config", lambda _: config):
        made = composed(settings, SystemClock())
    process, gateway = made.grpc, made._gateway
    await process.start()
    port = await gateway.start("127.0.0.1", 0)
    address = f"127.0.0.1:{process.port}"
    engines: list[Engine] = []
    try:
        engines.append(await _engine("prefill", address, folder))
        engines.append(await _engine("decode", address, folder))
        await asyncio.gather(*map(_where, engines))
        async with aiohttp.ClientSession() as http:
            front = Front(port, address, gateway, engines, http)
            await front.wait_for_workers()
            await front.plant()
            yield front
            await front.channels.close()
    finally:
        for engine in engines:
            engine.process.terminate()
        await asyncio.gather(*(engine.process.wait() for engine in engines))
        await gateway.stop()
        await process.drain()
