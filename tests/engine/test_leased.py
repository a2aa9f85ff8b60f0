"""Engines under the real control plane: never a wrong token, and reuse when it may be."""

import asyncio
import uuid
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import httpx
import pytest
from engine.harness import CLOCK, EngineProcess, tokens
from engine.plane import ControlPlane
from kvplane.api.lease.v1 import lease_pb2 as lease
from kvplane.api.routing.v1 import routing_pb2 as routing
from kvplane.api.session.v1 import session_pb2 as session
from kvplane.client import close_channels, kv_params
from kvplane.kernel.errors import KvplaneError

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def plane(tmp_path_factory):
    made = ControlPlane(tmp_path_factory.mktemp("plane"))
    made.start()
    yield made
    made.kill()


@pytest.fixture(scope="module")
def engines(plane):
    def start(role: str) -> EngineProcess:
        return EngineProcess(
            *("--role", role, "--worker-id", role, "--control-plane", plane.address),
            *("--prefill-us-per-token", "2", "--read-limit", "1"),
        )

    made = [start("prefill"), start("decode")]
    yield made
    for each in made:
        each.kill()


@dataclass
class Conversation:
    """A client with a gateway's manners, and a history."""

    plane: ControlPlane
    prefill: EngineProcess
    decode: EngineProcess
    name: str = field(default_factory=lambda: uuid.uuid4().hex)
    prompt: list[int] = field(default_factory=list)
    reason: str = ""
    session_id: str = ""
    lease_id: str = ""

    async def turn(self, said: list[int], **more) -> tuple[list[int], int]:
        """Say something; return the answer's ids and how many tokens were read for it."""
        self.prompt = self.prompt + said
        ids, read = await self.ask(self.prompt, **more)
        self.prompt = self.prompt + ids
        return ids, read

    async def ask(self, prompt: list[int]) -> tuple[list[int], int]:
        try:
            async with asyncio.timeout(1):
                route = await self.plane.routing.Route(
                    routing.RouteRequest(
                        request_id=uuid.uuid4().hex,
                        session=session.SessionKey(name=self.name),
                        model="toy",
                    )
                )
        except (TimeoutError, KvplaneError):
            return await self._legs(prompt, {"do_remote_decode": True}, {})
        self.reason = routing.DecisionReason.Name(route.reason).removeprefix("DECISION_REASON_")
        self.session_id, self.lease_id = route.session_id, route.lease.lease_id
        return await self._legs(
            prompt, kv_params.to_dict(route.prefill_params), kv_params.to_dict(route.decode_params)
        )

    async def _legs(self, prompt, prefill_params, decode_params) -> tuple[list[int], int]:
        first = await _post(self.prefill, prompt, 1, prefill_params)
        params = {**first["kv_transfer_params"], **decode_params}
        second = await _post(self.decode, prompt, 8, params)
        return (
            second["choices"][0]["token_ids"],
            first["usage"]["prompt_tokens_details"]["cached_tokens"],
        )

    async def right(self, prompt: list[int]) -> list[int]:
        return (await _post(self.prefill, prompt, 8))["choices"][0]["token_ids"]

    async def ready(self) -> None:
        """Wait until the decode's report of the last turn has arrived."""
        await until(self._held)

    async def _held(self) -> bool:
        listed = await self.plane.leases.ListOwnerships(
            lease.ListOwnershipsRequest(
                session_id=self.session_id, states=[lease.OWNERSHIP_STATE_HELD]
            )
        )
        return any(not owned.for_decode for owned in listed.ownerships)


async def _post(on: EngineProcess, prompt, max_tokens, params=None) -> dict:
    body = {"prompt": prompt, "max_tokens": max_tokens, "return_token_ids": True}
    async with httpx.AsyncClient(timeout=20) as http:
        answer = await http.post(
            f"{on.url}/v1/completions", json={**body, "kv_transfer_params": params}
        )
    assert answer.status_code == 200, answer.text
    return answer.json()


async def until(check, seconds: float = 10) -> None:
    end = CLOCK.monotonic() + seconds
    while not await check():
        assert CLOCK.monotonic() < end, "it did not happen in time"
        await CLOCK.sleep(0.05)


@pytest.fixture
async def talk(plane, engines) -> AsyncIterator[Conversation]:
    """A conversation with both workers there."""

    async def registered() -> bool:
        try:
            listed = await plane.workers.ListWorkers(
                routing.ListWorkersRequest(states=[routing.WORKER_STATE_READY])
            )
        except KvplaneError:
            return False
        return len(listed.workers) == 2

    await until(registered)
    yield Conversation(plane, *engines)
    await close_channels()


async def test_turns_read_what_the_last_one_left(talk):
    for turn in range(1, 5):
        expected = 0 if turn == 1 else len(talk.prompt) - 1
        said = tokens(f"turn {turn}", 200)
        ids, read = await talk.turn(said)
        assert ids == await talk.right(talk.prompt[:-8])
        assert read == expected, talk.reason
        await talk.ready()
    used = await talk.plane.leases.GetLease(lease.GetLeaseRequest(lease_id=talk.lease_id))
    assert used.lease.state == lease.LEASE_STATE_CONSUMED


async def test_an_edited_history_is_read_up_to_the_edit(talk):
    await talk.turn(tokens("edit", 320))
    await talk.ready()
    edited = talk.prompt[:200] + tokens("instead", 200)
    ids, read = await talk.ask(edited)
    assert ids == await talk.right(edited)
    assert read == 192


async def test_a_prompt_shorter_than_what_is_held_is_right(talk):
    await talk.turn(tokens("short", 320))
    await talk.ready()
    ids, read = await talk.ask(talk.prompt[:150])
    assert ids == await talk.right(talk.prompt[:150])
    assert read == 128


async def test_two_requests_at_once_are_both_right_and_at_most_one_reads(talk):
    await talk.turn(tokens("both", 320))
    await talk.ready()
    prompts = [talk.prompt + tokens(word, 50) for word in ("left", "right")]
    answers = await asyncio.gather(*(talk.ask(prompt) for prompt in prompts))
    for prompt, (ids, _) in zip(prompts, answers, strict=True):
        assert ids == await talk.right(prompt)
    assert sorted(read > 0 for _, read in answers)[0] is False


async def test_a_session_that_ends_frees_its_blocks_at_once(talk):
    await talk.turn(tokens("ends", 320))
    await talk.ready()
    before = talk.decode.state()["blocks"]["held"]
    await talk.plane.sessions.EndSession(session.EndSessionRequest(session_id=talk.session_id))

    async def freed() -> bool:
        return talk.decode.state()["blocks"]["held"] == before - 11

    await until(freed, 3)


async def test_a_hold_is_extended_by_order(talk):
    await talk.turn(tokens("longer", 320))
    await talk.ready()
    request = lease.ExtendHoldRequest(session_id=talk.session_id)
    request.hold.FromSeconds(900)
    assert (await talk.plane.leases.ExtendHold(request)).asked == 1

    async def longer() -> bool:
        return any(held["left_s"] > 800 for held in talk.decode.state()["held"])

    await until(longer, 3)
    ids, read = await talk.turn(tokens("after", 50))
    assert ids == await talk.right(talk.prompt[:-8])
    assert read == 327


async def test_another_conversation_reads_nothing_of_this_one(talk, plane, engines):
    await talk.turn(tokens("mine", 320))
    await talk.ready()
    other = Conversation(plane, *engines)
    ids, read = await other.turn(talk.prompt)
    assert ids == await talk.right(other.prompt[:-8])
    assert read == 0


async def test_a_frozen_owner_costs_a_bounded_time(talk):
    await talk.turn(tokens("frozen", 320))
    await talk.ready()
    prompt = talk.prompt + tokens("next", 50)
    route = await talk.plane.routing.Route(
        routing.RouteRequest(
            request_id=uuid.uuid4().hex, session=session.SessionKey(name=talk.name), model="toy"
        )
    )
    assert route.decision == routing.DECISION_REUSE
    await asyncio.to_thread(talk.decode.http.post, "/debug/freeze", json={"seconds": 3})
    began = CLOCK.monotonic()
    first = await _post(talk.prefill, prompt, 8, kv_params.to_dict(route.prefill_params))
    assert 0.9 < CLOCK.monotonic() - began < 2.5
    assert first["choices"][0]["token_ids"] == await talk.right(prompt)
    assert talk.prefill.state()["blocks"]["quarantined"] == 13, "all its blocks"

    async def thawed() -> bool:
        return talk.prefill.state()["blocks"]["quarantined"] == 0

    await until(thawed)


async def test_without_the_control_plane_all_is_computed_and_reuse_comes_back(talk, plane):
    await talk.turn(tokens("gone", 320))
    await talk.ready()
    plane.kill()
    began = CLOCK.monotonic()
    ids, read = await talk.turn(tokens("away", 50))
    assert CLOCK.monotonic() - began < 3
    assert ids == await talk.right(talk.prompt[:-8])
    assert read == 0
    plane.start()
    for _ in range(40):
        ids, read = await talk.turn(tokens("back", 20))
        assert ids == await talk.right(talk.prompt[:-8])
        if read:
            break
        await CLOCK.sleep(0.5)
    assert read > 0, talk.reason
