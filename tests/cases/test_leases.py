"""Failures of leases and holds, as reported from the field."""

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
from demo.servers import Server, stop_all, wait_for
from e2e.waiting import eventually
from gateway.bench import dropped
from kvplane.api.lease.v1 import lease_pb2 as lease
from lease.harness import to_seconds

from cases.conftest import Deployment
from cases.processes import CLOCK, MODEL, Dev, Engine, client, nowhere, registered
from cases.talk import Talk, held, words

pytestmark = pytest.mark.processes

Start = Callable[..., None]
HOLD = 8
PROMPT = {"messages": [{"role": "user", "content": words(4)}], "max_tokens": 4}


async def test_a_read_is_declined_when_its_blocks_may_not_last(
    deployment: Deployment, start: Start
) -> None:
    """L-01, vllm PR#47021: the user waits, the hold on the decode's side runs out unseen, and
    turn 2 is garbage. The decode holds for 8 s; the margin is 1 s.
    """
    prefill = deployment.engine("brief-p", "prefill", model="brief")
    # An engine holds a second longer than it reports.
    decode = deployment.engine("brief-d", "decode", "--decoder-kv-blocks-ttl", "9", model="brief")
    start(prefill, decode)
    await registered(deployment, prefill.name, decode.name)
    talks = [Talk(deployment, prefill, f"l01-{n}", "brief") for n in range(4)]
    async with client(deployment) as kv:
        await asyncio.gather(*(talk.say(words(n), right=False) for n, talk in enumerate(talks)))
        owned, ends = [], []
        for talk in talks:
            (one,) = await eventually(lambda talk=talk: held(kv, talk.session))
            assert to_seconds(one.hold) <= HOLD
            ends.append(CLOCK.monotonic() + to_seconds(one.hold))
            owned.append(one)

        async def until(talk: int, second: float) -> None:
            """Wait for that second of a hold's eight."""
            await CLOCK.sleep(max(0.0, ends[talk] - HOLD + second - CLOCK.monotonic()))

        async def ask(talk: int, request_id: str) -> lease.GrantLeaseResponse:
            """Ask for a lease that needs 2 s."""
            request = lease.GrantLeaseRequest(
                request_id=request_id,
                session_id=owned[talk].session_id,
                holder=lease.Holder(
                    worker_id=prefill.name, epoch=1, compatibility=owned[talk].compatibility
                ),
            )
            request.ttl.FromSeconds(2)
            return await kv.leases.GrantLease(request)

        # At 4 s, one that needs 2 s, and a turn that would like to have 10.
        await until(0, 4)
        granted = (await ask(0, "l01-early")).lease
        assert granted.state == lease.LEASE_STATE_GRANTED
        assert 1.5 < to_seconds(granted.ttl) <= 2
        assert CLOCK.monotonic() + to_seconds(granted.ttl) <= ends[0]
        assert (await talks[1].say("In time.")).decision == "reuse"
        # At 7.5 s: it would end within the margin. So it would, or right before, for a turn
        # that comes a little earlier.
        await until(2, 6.5)
        late = await talks[2].say("Late.", right=False)
        assert (late.decision, late.reason) == ("recompute", "expiring")
        await until(3, 7.5)
        assert (await ask(3, "l01-late")).refusal_reason == lease.REFUSAL_REASON_EXPIRING
        await talks[2].check()
        # At 9 s.
        await until(0, 9)
        assert (await ask(0, "l01-gone")).refusal_reason == lease.REFUSAL_REASON_NOT_HELD
        gone = await talks[0].say("Too late.")
        assert (gone.decision, gone.reason) == ("recompute", "nothing_held")


@pytest.mark.parametrize(("policy", "decision"), [("", "recompute"), ("60", "reuse")])
async def test_an_owner_that_names_no_expiry_is_declined_unless_policy_says(
    tmp_path_factory: pytest.TempPathFactory, start: Start, policy: str, decision: str
) -> None:
    """L-01: nobody can know whether the blocks of such a worker are still there."""
    folder = tmp_path_factory.mktemp("unknown")
    plane = Dev(folder, **({"LEASE_UNKNOWN_HOLD_S": policy} if policy else {}))
    prefill = Engine("prefill", "prefill", folder, plane.control_plane)
    program = (str(Path(__file__).with_name("without_expiry.py")),)
    decode = Engine("decode", "decode", folder, plane.control_plane, program=program)
    start(plane, prefill, decode)
    await registered(plane, "prefill", "decode")
    talk = Talk(plane, prefill, "unknown", MODEL)
    await talk.say(words(7))
    async with client(plane) as kv:
        await eventually(lambda: held(kv, "unknown", *lease.OwnershipState.values()[1:]))
        assert (await talk.say("And?")).decision == decision


@pytest.fixture(scope="module")
def gap(deployment: Deployment) -> Iterator[tuple[Engine, str]]:
    """A prefill, and a model whose decode cannot be reached; the prefill holds for 4 s."""
    hold = ("--kv-lease-duration", "4", "--decoder-kv-blocks-ttl", "480")
    with nowhere() as url:
        prefill = deployment.engine("gap-p", "prefill", *hold, model="gap")
        decode = deployment.engine("gap-d", "decode", "--url", url, model="gap")
        servers: list[Server] = [prefill, decode]
        try:
            for server in servers:
                server.start()
            wait_for(servers, 60)
            asyncio.run(registered(deployment, "gap-p", "gap-d"))
            yield prefill, "gap"
        finally:
            stop_all(servers)


async def freed(prefill: Engine, seconds: float) -> None:
    async def nothing() -> bool:
        return not prefill.held()

    await eventually(nothing, seconds)


async def holding(prefill: Engine) -> float:
    """Wait until it holds for a decode; return for how long still."""

    async def pinned() -> list[dict[str, float]]:
        return prefill.held()

    (pin,) = await eventually(pinned)
    return pin["left_s"]


async def test_a_refused_decode_frees_its_prefill(deployment: Deployment, start: Start) -> None:
    """L-04a, vllm PR#41269: the decode refuses before it schedules, and the prefill holds its
    blocks until the long timeout.
    """
    prefill = deployment.engine("strict-p", "prefill", model="strict")
    # Too long for the decode alone.
    decode = deployment.engine("strict-d", "decode", "--max-model-len", "64", model="strict")
    start(prefill, decode)
    await registered(deployment, "strict-p", "strict-d")
    async with httpx.AsyncClient(timeout=30) as http:
        url = f"{deployment.gateway()}/v1/chat/completions"
        answer = await http.post(url, json={"model": "strict", **PROMPT})
    assert answer.status_code == 400, answer.text
    assert "64" in answer.json()["error"]["message"]
    await freed(prefill, 1)
    stats = prefill.state()["stats"]
    assert (stats["requests"], stats["freed_by_order"], stats["kv_expired"]) == (1, 1, 0)


async def test_a_client_that_leaves_between_the_legs_frees_the_prefill(
    deployment: Deployment, gap: tuple[Engine, str]
) -> None:
    """L-04b, llm-d PR#1138: the client leaves while the router is between the two calls."""
    prefill, model = gap
    before = prefill.state()["stats"]
    async with dropped(deployment.gateway(), {"model": model, **PROMPT}):
        assert await holding(prefill) > 1
    await freed(prefill, 1)
    stats = prefill.state()["stats"]
    assert stats["freed_by_order"] - before["freed_by_order"] == 1
    assert stats["kv_expired"] == before["kv_expired"]


async def test_a_gateway_that_dies_between_the_legs_leaves_the_short_hold_only(
    deployment: Deployment, gap: tuple[Engine, str]
) -> None:
    """L-04c: nobody is left who could tell the holder."""
    prefill, model = gap
    before = prefill.state()["stats"]
    gateway = deployment.servers["gateway-1"]
    try:
        async with dropped(deployment.gateway(), {"model": model, **PROMPT}):
            left = await holding(prefill)
            gateway.kill()
            assert left <= 4
            end = CLOCK.monotonic() + left
            await CLOCK.sleep(left - 1)
            assert prefill.held(), "an orphan is held for as long as the decode might need"
            await freed(prefill, end + 1 - CLOCK.monotonic())
    finally:
        gateway.start()
        wait_for([gateway], 60)
    stats = prefill.state()["stats"]
    assert stats["kv_expired"] - before["kv_expired"] == 1
    assert stats["freed_by_order"] == before["freed_by_order"]
