"""T-03, ai-dynamo/dynamo#737 and production-stack PR#1035: conversations that begin alike all
go to one worker, since what it has cached always wins, or a tie always falls to the same.
"""

import asyncio
from collections import Counter
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from e2e.waiting import eventually
from kvplane.api.routing.v1 import routing_pb2 as routing
from kvplane.api.session.v1 import session_pb2 as sessions
from kvplane.client import KvplaneClient

from cases.processes import MODEL, Dev, Engine, client, registered
from cases.talk import Answer, Talk, session_of, words

pytestmark = pytest.mark.processes

GAP = 8  # the default of routing.load_gap_requests
CONVERSATIONS, AT_ONCE = 200, 32
MOST = 0.4 * CONVERSATIONS


class Fleet:
    """`kvplane dev`, a prefill, four decodes, and a long system prompt."""

    def __init__(self, plane: Dev, prefill: Engine, decodes: list[Engine]) -> None:
        self.plane, self.prefill = plane, prefill
        self.decodes = {engine.name: engine for engine in decodes}
        self.system = {"role": "system", "content": words(3, 414)}

    def talk(self, name: str) -> Talk:
        return Talk(self.plane, self.prefill, name, MODEL, messages=[self.system])

    async def begin(self, kind: str, at_once: int) -> Counter[str]:
        """Have so many conversations begin; return where their first turns were decoded."""
        numbers = iter(range(CONVERSATIONS))

        async def one_after_another() -> None:
            for n in numbers:
                question = [self.system, {"role": "user", "content": f"Question {n}"}]
                answer = await http.post(
                    f"{self.plane.url}/v1/chat/completions",
                    json={"model": MODEL, "messages": question, "max_tokens": 2},
                    headers={"x-session-id": f"{kind}-{n}"},
                )
                assert answer.status_code == 200, answer.text

        async with httpx.AsyncClient(timeout=60) as http:
            await asyncio.gather(*(one_after_another() for _ in range(at_once)))
        async with client(self.plane) as kv:
            page = sessions.ListSessionsRequest(page_size=1000)
            listed = (await kv.sessions.ListSessions(page)).sessions
        first = [s.last_decode_worker_id for s in listed if s.name.startswith(f"{kind}-")]
        assert len(first) == CONVERSATIONS
        return Counter(first)

    async def owned_by(self, decode: str, kind: str, count: int) -> list[Talk]:
        """Return new conversations whose first turn that worker has decoded."""
        found: list[Talk] = []
        async with client(self.plane) as kv:
            for n in range(8 * count):
                talk = self.talk(f"{kind}-{n}")
                await talk.say(f"Hello {n}.", right=False)
                if (await session_of(kv, talk.session)).last_decode_worker_id == decode:
                    found.append(talk)
                if len(found) == count:
                    return found
        raise AssertionError(f"{decode} has only {len(found)} conversations")


@pytest.fixture
async def fleet(tmp_path_factory: pytest.TempPathFactory, start: Callable[..., None]) -> Fleet:
    folder = tmp_path_factory.mktemp("spread")
    plane = Dev(folder)
    room = ("--num-blocks", "32768", "--read-limit", "100")
    prefill = Engine("prefill", "prefill", folder, plane.control_plane, *room)
    decodes = [
        Engine(f"decode-{n}", "decode", folder, plane.control_plane, *room) for n in range(4)
    ]
    await asyncio.to_thread(start, plane, prefill, *decodes)
    await registered(plane, prefill.name, *(engine.name for engine in decodes))
    made = Fleet(plane, prefill, decodes)
    counted = await post(prefill, "/tokenize", model=MODEL, messages=[made.system])
    assert 2000 <= counted["count"] <= 2100
    return made


async def test_first_turns_spread_and_later_ones_stay_until_the_gap_is_passed(fleet: Fleet) -> None:
    for kind, at_once in (("a", 1), ("b", AT_ONCE)):
        first = await fleet.begin(kind, at_once)
        assert max(first.values()) <= MOST, first
        assert len(first) == len(fleet.decodes)

    owner = "decode-2"
    talks = await fleet.owned_by(owner, "later", GAP + 3)
    async with client(fleet.plane) as kv:

        async def at(talk: Talk) -> str:
            return (await session_of(kv, talk.session)).last_decode_worker_id

        # While nobody is busy they all stay.
        for talk in talks:
            assert (await talk.say("And then?")).decision == "reuse"
            assert await at(talk) == owner

        # The owner's reads last until they are let go, so that its requests pile up.
        await post(fleet.decodes[owner], "/debug/faults", slow_reads_s=60)
        piled: list[asyncio.Task[Answer]] = []
        for talk in talks[: GAP + 1]:
            piled.append(asyncio.create_task(talk.say("Go on.", right=False)))
            await eventually(lambda: busy(fleet.decodes[owner], len(piled)))
        # Now it has one more than the gap, and the router knows.
        await reported(kv, owner, len(piled))
        moved = await asyncio.gather(*(talk.say("And you?") for talk in talks[GAP + 1 :]))
        assert not any(task.done() for task in piled)
        for talk, answer in zip(talks[GAP + 1 :], moved, strict=True):
            assert (answer.decision, answer.reason) == ("recompute", "owner_overloaded")
            assert await at(talk) != owner
        await post(fleet.decodes[owner], "/debug/faults", slow_reads_s=0)
        # The others, the last of which met the gap and did not pass it, have stayed.
        assert {answer.decision for answer in await asyncio.gather(*piled)} == {"reuse"}
        assert {await at(talk) for talk in talks[: GAP + 1]} == {owner}


async def reported(kv: KvplaneClient, worker_id: str, count: int) -> None:
    """Wait for two heartbeats that tell of that many requests.

    One that was on its way while the last of them came does not count it, and the router's
    picture of the workers may be that one for 0.2 s after the next; beats come once a second.
    """
    silent: list[float] = []

    async def twice() -> bool:
        listed = (await kv.workers.ListWorkers(routing.ListWorkersRequest())).workers
        [found] = [worker for worker in listed if worker.worker_id == worker_id]
        if found.load.running + found.load.waiting < count:
            silent.clear()
            return False
        silent.append(found.silent_for.ToTimedelta().total_seconds())
        return len(silent) > 1 and silent[-1] < silent[-2]  # another beat has come since

    await eventually(twice)


async def post(engine: Engine, path: str, **body: Any) -> Any:
    async with httpx.AsyncClient(timeout=10) as http:
        answer = await http.post(engine.url + path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def busy(engine: Engine, count: int) -> bool:
    """Tell whether it has that many requests."""
    async with httpx.AsyncClient(timeout=10) as http:
        stats = (await http.get(f"{engine.url}/debug/state")).json()["stats"]
    return stats["running"] + stats["waiting"] >= count
