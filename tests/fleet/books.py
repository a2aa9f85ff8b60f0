"""What the database and the engines say, and what must be left when all is over."""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from kvplane.api.session.v1 import session_pb2 as session
from kvplane.client import Channels, session_api
from kvplane.db.database import postgres_engine
from kvplane.kernel.clock import SystemClock
from kvplane.lease.values import LeaseState
from sqlalchemy import make_url, text
from sqlalchemy.ext.asyncio import AsyncEngine

from fleet.cluster import PLAIN, TOKEN, Fleet

_clock = SystemClock()

# Every order that was ever written for an owner; the outbox forgets the acknowledged ones.
LOG_OF_ORDERS = (
    "CREATE TABLE order_log (LIKE lease_commands)",
    "CREATE FUNCTION log_order() RETURNS trigger AS $$ BEGIN"
    " INSERT INTO order_log SELECT NEW.*; RETURN NULL; END $$ LANGUAGE plpgsql",
    "CREATE TRIGGER log_order AFTER INSERT ON lease_commands"
    " FOR EACH ROW EXECUTE FUNCTION log_order()",
)


async def eventually(probe: Callable[[], Awaitable[Any]], seconds: float = 15.0) -> Any:
    """Ask until the answer is true-ish; fail after `seconds`, with the last answer."""
    end = _clock.monotonic() + seconds
    while not (answer := await probe()):
        assert _clock.monotonic() < end, f"still {answer!r} after {seconds} s"
        await _clock.sleep(0.05)
    return answer


async def nothing_of(probe: Callable[[], Awaitable[Any]], seconds: float = 15.0) -> None:
    """Ask until the answer is empty; fail after `seconds`, with what is left."""
    end = _clock.monotonic() + seconds
    while left := await probe():
        assert _clock.monotonic() < end, f"still there after {seconds} s: {left!r}"
        await _clock.sleep(0.1)


@dataclass
class Books:
    """One look at everything."""

    fleet: Fleet
    tenants: list[str]
    http: aiohttp.ClientSession
    database: AsyncEngine = field(init=False)
    channels: Channels = field(default_factory=Channels)
    # Counters of engines that a test's scenario makes grow, which else may not.
    allowed: set[tuple[str, str]] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.database = postgres_engine(make_url(self.fleet.database_url))

    async def close(self) -> None:
        """Let go of connections."""
        await self.channels.close()
        await self.database.dispose()

    async def rows(self, query: str, **values: Any) -> list[Any]:
        """Return the rows of a query."""
        async with self.database.connect() as connection:
            return list((await connection.execute(text(query), values)).all())

    # -- engines ------------------------------------------------------------------

    async def state(self, engine: str) -> dict[str, Any]:
        """Return an engine's blocks, holds and counters."""
        async with self.http.get(f"{self.fleet.url(engine)}/debug/state") as answer:
            found: dict[str, Any] = await answer.json()
            return found

    async def states(self, names: list[str] | None = None) -> dict[str, dict[str, Any]]:
        """Return the states of several engines."""
        names = names or self.fleet.names()
        found = await asyncio.gather(*map(self.state, names))
        return dict(zip(names, found, strict=True))

    async def stats(self, names: list[str]) -> Counter[str]:
        """Return the sums of engines' counters."""
        total: Counter[str] = Counter()
        for state in (await self.states(names)).values():
            total.update(state["stats"])
        return total

    async def fault(self, engine: str, **faults: float) -> None:
        """Let something go wrong in an engine from now on."""
        url = f"{self.fleet.url(engine)}/debug/faults"
        async with self.http.post(url, json=faults) as answer:
            assert answer.status == 200, await answer.text()

    async def mend(self) -> None:
        """Let nothing go wrong any more."""
        none = dict.fromkeys((await self.state("narrow-p"))["faults"], 0)
        await asyncio.gather(*(self.fault(name, **none) for name in self.fleet.names()))

    # -- leases and orders --------------------------------------------------------

    async def leases(self, **where: Any) -> list[Any]:
        """Return leases, the oldest first."""
        condition = " AND ".join(f"{name} = :{name}" for name in where) or "true"
        return await self.rows(
            f"SELECT * FROM leases WHERE {condition} ORDER BY granted_us, lease_id", **where
        )

    async def orders(self, session_id: str = "") -> list[Any]:
        """Return all orders that were ever given, of one session or of all."""
        return await self.rows(
            "SELECT l.worker_id, l.ownership_id, l.hold_until_us > 0 AS hold, o.for_decode"
            " FROM order_log l JOIN ownerships o USING (ownership_id)"
            " WHERE :session = '' OR o.session_id = :session",
            session=session_id,
        )

    # -- the end ------------------------------------------------------------------

    async def end_sessions(self) -> None:
        """End every session of every tenant."""
        for tenant in self.tenants:
            api = session_api(
                self.fleet.addresses("session"),
                tenant=tenant,
                token=TOKEN,
                timeout=15,
                channels=self.channels,
            )
            found = await api.ListSessions(
                session.ListSessionsRequest(states=[session.SESSION_STATE_ACTIVE], page_size=1000)
            )
            await asyncio.gather(
                *(
                    api.EndSession(session.EndSessionRequest(session_id=one.session_id))
                    for one in found.sessions
                )
            )

    async def requests_at_gateways(self) -> list[str]:
        """Return which gateways have requests under way."""
        left = []
        for number in (1, 2):
            url = f"{self.fleet.gateway(number)}/metrics"
            async with self.http.get(url, headers={"Authorization": f"Bearer {TOKEN}"}) as answer:
                lines = (await answer.text()).splitlines()
            running = [n for n in lines if n.startswith("kvplane_gateway_requests_running ")]
            if running != ["kvplane_gateway_requests_running 0.0"]:
                left.append(f"gateway-{number}: {running}")
        return left

    async def unfinished(self) -> list[str]:
        """Return what requests are under way."""
        left = []
        for name, state in (await self.states()).items():
            stats = state["stats"]
            if stats["running"] or stats["waiting"]:
                left.append(f"{name}: {stats['running']} running, {stats['waiting']} waiting")
        left += await self.requests_at_gateways()
        beats = await self.rows("SELECT worker_id, running, waiting FROM workers")
        left += [f"{b.worker_id}: known as busy" for b in beats if b.running or b.waiting]
        return left

    async def unreturned(self) -> list[str]:
        """Return what is held, leased or ordered."""
        left = []
        for name, state in (await self.states()).items():
            blocks = state["blocks"]
            if blocks["in_use"] or blocks["held"] or blocks["quarantined"] or state["held"]:
                left.append(f"{name}: {blocks}, {len(state['held'])} holds")
            if state["dead"]:
                left.append(f"{name}: {state['dead']}")
        live = await self.rows(
            "SELECT lease_id, holder_worker_id, state, draining FROM leases"
            " WHERE state IN (:granted, :reading) OR draining",
            granted=LeaseState.GRANTED,
            reading=LeaseState.READING,
        )
        left += [f"lease {row}" for row in live]
        owned = await self.rows(
            "SELECT ownership_id, worker_id, turn, for_decode, state FROM ownerships"
            " WHERE state <= 2"
        )
        left += [f"ownership {row}" for row in owned]
        # A plain engine takes no orders: what is written for it ends by its time.
        plain = self.fleet.names(PLAIN)
        outbox = await self.rows("SELECT worker_id, ownership_id FROM lease_commands")
        left += [f"order {row}" for row in outbox if row.worker_id not in plain]
        return left

    async def done_twice(self) -> list[Any]:
        """Return what owners were told twice, and who did more than they were told."""
        twice = await self.rows(
            "SELECT ownership_id, worker_id, hold_until_us, count(*) FROM order_log"
            " GROUP BY ownership_id, worker_id, epoch, hold_until_us HAVING count(*) > 1"
        )
        told: Counter[tuple[str, bool]] = Counter()
        for row in await self.rows("SELECT worker_id, hold_until_us > 0 AS hold FROM order_log"):
            told[row.worker_id, row.hold] += 1
        for name, state in (await self.states(self.fleet.names(managed=True))).items():
            for hold, counter in ((False, "freed_by_order"), (True, "held_longer")):
                if state["stats"][counter] > told[name, hold]:
                    twice.append((name, counter, state["stats"][counter], told[name, hold]))
        return twice
