"""The agent against the real services: sessions, routing, leases over one SQLite file."""

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
from kvplane.api.lease.v1 import lease_pb2 as lease
from kvplane.api.routing.v1 import routing_pb2 as routing
from kvplane.api.session.v1 import session_pb2 as session
from kvplane.cli.compose import Assembly
from kvplane.client import KvplaneClient
from kvplane.client.kv_params import extra
from kvplane.client.quotas import QuotaBook
from kvplane.db.database import Database
from kvplane.db.migrate import upgrade
from kvplane.kernel.clock import SystemClock
from kvplane.runtime.settings import Settings
from kvplane.worker.agent import AgentConfig, FreeNow, HoldLonger, Permit, Refused, WorkerAgent
from worker.support import TOKENS, held, identity, settled, until


class Services:
    """All services in a thread of their own, and a client of them."""

    def __init__(self, directory: Path) -> None:
        self._url = f"sqlite+aiosqlite:///{directory / 'kvplane.db'}"
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self.port = 0
        self.client: Any = None
        self._up: Future[None] = Future()
        self._thread = threading.Thread(
            target=lambda: self._loop.run_until_complete(self._main()), daemon=True
        )

    def start(self) -> "Services":
        self._thread.start()
        self._up.result(30)
        return self

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(20)

    async def _main(self) -> None:
        try:
            await upgrade(self._url)
            clock = SystemClock()
            settings = Settings.model_validate(
                {
                    "database": {"url": self._url},
                    "grpc": {"port": 0, "status_port": 0, "drain_s": 0.1},
                }
            )
            made = Assembly(settings, clock, Database(self._url, clock))
            tenants = made.tenant()
            quotas = QuotaBook(tenants, clock)
            leases = made.lease(quotas)
            made.routing(leases, made.session(leases, quotas))
            process = made.process(tenants, 0)
            await process.start()
            self.port = process.port
            async with KvplaneClient(f"127.0.0.1:{self.port}", timeout=5) as self.client:
                self._up.set_result(None)
                await self._stop.wait()
            await process.drain()
        except BaseException as error:
            if not self._up.done():
                self._up.set_exception(error)
            raise

    def call(self, method: Callable[[Any], Awaitable[Any]], request: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(method(request), self._loop).result(10)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def services(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Services]:
    running = Services(tmp_path_factory.mktemp("services")).start()
    yield running
    running.stop()


@pytest.fixture(scope="module")
def workers(services: Services) -> Iterator[tuple[WorkerAgent, WorkerAgent]]:
    config = AgentConfig(
        routing=f"127.0.0.1:{services.port}",
        lease=f"127.0.0.1:{services.port}",
        begin_wait_seconds=2.0,
        grant_wait_seconds=2.0,
    )
    agents = [
        WorkerAgent(identity(name, role=role), config)
        for name, role in (("p", "prefill"), ("d", "decode"))
    ]
    for agent in agents:
        agent.start()
    for agent in agents:
        until(lambda agent=agent: agent.away is None, 10)
    yield agents[0], agents[1]
    for agent in agents:
        agent.close()


def route(services: Services, name: str, request_id: str) -> tuple[Any, dict[str, Any]]:
    response = services.call(
        services.client.routing.Route,
        routing.RouteRequest(
            request_id=f"{name}-{request_id}",
            session=session.SessionKey(name=name),
            model="model",
            prompt_tokens_estimate=400,
        ),
    )
    return response, extra(response.prefill_params)["kvplane"]


def decoded(
    services: Services, decode: WorkerAgent, tag: dict[str, Any], request_id: str, tokens: list[int]
) -> None:
    decode.report_held(
        held(
            "d", request_id, tokens, tenant_id=tag["tenant"], session_id=tag["session"],
            turn=tag["turn"],
        )
    )  # fmt: skip
    until(lambda: owned(services, tag))


def owned(services: Services, tag: dict[str, Any]) -> list[lease.Ownership]:
    request = lease.ListOwnershipsRequest(
        session_id=tag["session"], states=[lease.OWNERSHIP_STATE_HELD]
    )
    return list(services.call(services.client.leases.ListOwnerships, request).ownerships)


def test_a_turn_reads_the_last_one_back(
    services: Services, workers: tuple[WorkerAgent, WorkerAgent]
) -> None:
    prefill, decode = workers
    first, tag = route(services, "reads", "1")
    assert first.decision == routing.DECISION_RECOMPUTE
    assert (first.prefill.worker_id, first.decode.worker_id) == ("p", "d")

    # The prefill's blocks go to the decode of the same turn.
    prefill.report_held(
        held(
            "p", "p1", TOKENS[:300], tenant_id=tag["tenant"], session_id=tag["session"], turn=1,
            for_decode=True, hold_seconds=30.0,
        )
    )  # fmt: skip
    decode.begin_read("d1", TOKENS[:300], handle=("engine-p", "p1"), tenant_id=tag["tenant"])
    permit = settled(decode, "d1")
    assert isinstance(permit, Permit)
    assert permit.num_tokens == 300
    assert decode.read_started("d1")
    decode.read_finished("d1", sent=True)
    prefill.report_freed(["p1"])
    decoded(services, decode, tag, "d1", TOKENS[:340])

    second, tag = route(services, "reads", "2")
    assert second.decision == routing.DECISION_REUSE
    lease_id = (tag["lease_id"], tag["fencing_token"])
    prompt = TOKENS[:330] + [1] * 70  # the last tokens were edited
    prefill.begin_read("p2", prompt, lease=lease_id, tenant_id=tag["tenant"], min_tokens=64)
    permit = settled(prefill, "p2")
    assert isinstance(permit, Permit)
    assert permit.num_tokens == permit.params["remote_num_tokens"] == 320
    assert len(permit.params["remote_block_ids"][0]) == 20
    assert permit.params["remote_request_id"] == "d1"
    # The same lease a second time, in another request: one reader only reads.
    assert prefill.read_started("p2")
    prefill.read_finished("p2", sent=True)
    decode.report_freed(["d1"])
    until(lambda: not owned(services, tag))
    third, _ = route(services, "reads", "3")
    assert third.decision == routing.DECISION_RECOMPUTE


def test_an_unused_lease_leaves_the_blocks_for_the_next_one(
    services: Services, workers: tuple[WorkerAgent, WorkerAgent]
) -> None:
    prefill, decode = workers
    _, tag = route(services, "unused", "1")
    decoded(services, decode, tag, "u1", TOKENS[:340])
    _, leased = route(services, "unused", "2")
    key = (leased["lease_id"], leased["fencing_token"])
    prefill.begin_read("x", [7, *TOKENS[:340]], lease=key, tenant_id=tag["tenant"])
    assert isinstance(settled(prefill, "x"), Refused)
    until(lambda: owned(services, tag))
    again, _ = route(services, "unused", "3")
    assert again.decision == routing.DECISION_REUSE


def test_a_session_is_held_longer_and_then_freed(
    services: Services, workers: tuple[WorkerAgent, WorkerAgent]
) -> None:
    _, decode = workers
    _, tag = route(services, "orders", "1")
    decoded(services, decode, tag, "o1", TOKENS[:340])
    longer = lease.ExtendHoldRequest(session_id=tag["session"])
    longer.hold.seconds = 1000
    assert services.call(services.client.leases.ExtendHold, longer).asked == 1
    (order,) = until(decode.take_orders)
    assert isinstance(order, HoldLonger)
    decode.order_done(order, done=True, hold_seconds=order.seconds + 1)
    until(lambda: owned(services, tag)[0].hold.seconds > 900)
    free = lease.FreeSessionRequest(session_id=tag["session"])
    assert services.call(services.client.leases.FreeSession, free).freed == 1
    (order,) = until(decode.take_orders)
    assert isinstance(order, FreeNow)
    decode.order_done(order, done=True)
    decode.report_freed(["o1"])
    assert not owned(services, tag)


def test_a_report_that_the_service_refuses_does_not_stop_the_others(
    services: Services, workers: tuple[WorkerAgent, WorkerAgent]
) -> None:
    _, decode = workers
    _, tag = route(services, "poison", "1")
    decode.report_held(held("d", "bad", TOKENS[:100], session_id="not an id!", turn=1))
    until(lambda: decode.away, 5)
    until(lambda: decode.away is None, 10)
    decoded(services, decode, tag, "good", TOKENS[:100])
    decode.report_freed(["bad", "good"])
