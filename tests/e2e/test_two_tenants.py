"""Two tenants on the same engines, one of them hostile: neither sees the other."""

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
from demo.servers import Server, free_port
from e2e.chat import Chat, control, ownerships_of, session_of, words
from e2e.cluster import BLOCK, MODEL, Cluster, command
from e2e.engines import figures
from kvplane.api.lease.v1 import lease_pb2 as lease
from kvplane.api.session.v1 import session_pb2 as session
from kvplane.api.tenant.v1 import tenant_pb2 as tenants
from kvplane.client import kv_params

pytestmark = pytest.mark.vllm

NAME = "the-talk"
PROMPT = "Strictly between us. " + words(37, 220)


@dataclass
class Tenant:
    """A tenant, its key, and a gateway that asks for keys."""

    tenant_id: str
    headers: dict[str, str]
    gateway: str

    def chat(self, cluster: Cluster, name: str | None = NAME) -> Chat:
        """Begin a conversation."""
        return Chat(cluster, session=name, headers=dict(self.headers), at=self.gateway)


@pytest.fixture(scope="module")
def gateway(cluster: Cluster) -> Iterator[str]:
    """A third gateway, which faces the internet."""
    port = free_port()
    env = {
        **cluster.environment(),
        "KVPLANE_AUTH_MODE": "api_key",
        "KVPLANE_AUTH_INTERNAL_TOKEN": "internal",
        "KVPLANE_GATEWAY_PORT": str(port),
    }
    url = f"http://127.0.0.1:{port}"
    server = Server(
        "gateway-keys", command("gateway"), url=url, health="/readyz", env=env, logs=cluster.logs
    )
    server.start().wait(60)
    yield url
    server.stop()


async def _tenant(cluster: Cluster, name: str, gateway: str) -> Tenant:
    async with control(cluster) as client:
        await client.tenants.CreateTenant(tenants.CreateTenantRequest(tenant_id=name))
        key = await client.tenants.CreateApiKey(tenants.CreateApiKeyRequest(tenant_id=name))
    return Tenant(name, {"Authorization": f"Bearer {key.secret}"}, gateway)


@pytest.fixture
async def pair(cluster: Cluster, gateway: str, request: pytest.FixtureRequest) -> Any:
    """Yield alice, who is to be protected, and mallory; nothing of them is left afterwards."""
    suffix = request.node.name.removeprefix("test_").replace("_", "-")[:40]
    both = [await _tenant(cluster, f"{who}.{suffix}", gateway) for who in ("alice", "mallory")]
    yield both
    for one in both:
        async with control(cluster, one.tenant_id) as client:
            listed = await client.sessions.ListSessions(
                session.ListSessionsRequest(states=[session.SESSION_STATE_ACTIVE])
            )
            for talk in listed.sessions:
                await client.sessions.EndSession(
                    session.EndSessionRequest(session_id=talk.session_id)
                )


async def _work(cluster: Cluster, send: Any) -> tuple[int, int]:
    """Return the bytes that were read and the tokens found in prefix caches meanwhile."""
    engines = (cluster.prefill.url, cluster.decode.url)
    before = [await figures(url) for url in engines]
    await send
    after = [await figures(url) for url in engines]
    return (
        sum(b.bytes_read - a.bytes_read for a, b in zip(before, after, strict=True)),
        sum(b.cache_hits - a.cache_hits for a, b in zip(before, after, strict=True)),
    )


async def test_the_same_prompt_costs_another_tenant_what_a_new_one_costs(
    cluster: Cluster, pair: list[Tenant]
) -> None:
    alice, mallory = pair
    talk = alice.chat(cluster)
    read_first, _ = await _work(cluster, talk.say(PROMPT))
    read_again, found_again = await _work(cluster, alice.chat(cluster, "another").say(PROMPT))
    # The decode reads each prompt from the prefill, but for what its own cache has.
    assert found_again >= 4 * BLOCK
    assert read_again < read_first
    # Under her session's name, with her words, and with her words as a salt.
    for number, more in enumerate(({}, {"cache_salt": alice.tenant_id}, {"cache_salt": "x"})):
        thief = mallory.chat(cluster, NAME if number == 0 else f"{NAME}-{number}")
        assert await _work(cluster, thief.say(PROMPT, **more)) == (read_first, 0)


async def test_a_stolen_handle_and_a_copied_history_read_nothing(
    cluster: Cluster, pair: list[Tenant]
) -> None:
    alice, mallory = pair
    talk = alice.chat(cluster)
    await talk.say(PROMPT)
    async with control(cluster, alice.tenant_id) as client:
        now = await session_of(client, NAME)
        (held,) = await ownerships_of(client, now.session_id, lease.OWNERSHIP_STATE_HELD)
    stolen = {**kv_params.to_dict(held.params), "do_remote_prefill": False}
    stolen["kvplane"] = {"tenant": alice.tenant_id, "session": now.session_id, "turn": now.turns}
    # By history alone, by name, and by the handle in each place that an engine looks in.
    for number, more in enumerate(
        (
            {},
            {"kv_transfer_params": stolen},
            {"extra_body": {"kv_transfer_params": stolen}},
            {"vllm_xargs": {"kv_transfer_params": stolen}},
        )
    ):
        # A name of its own each time: her own blocks she may read.
        thief = mallory.chat(cluster, (None, NAME, "other", "third")[number])
        thief.messages = [dict(message) for message in talk.messages]
        thief.messages.append({"role": "user", "content": f"And then? {number}"})
        before = await figures(cluster.prefill.url)
        reply = await thief.send(**more)
        assert (await figures(cluster.prefill.url)).bytes_read == before.bytes_read
        assert not reply.reuses
        await thief.check(reply)
    # All of it left what alice holds as it was.
    before = await figures(cluster.prefill.url)
    assert (await talk.say("And then?")).content
    assert (await figures(cluster.prefill.url)).bytes_read > before.bytes_read


async def test_answers_about_anothers_are_those_about_nothing(
    cluster: Cluster, pair: list[Tenant]
) -> None:
    alice, mallory = pair
    await alice.chat(cluster).say(PROMPT)
    async with httpx.AsyncClient(base_url=mallory.gateway, headers=mallory.headers) as http:
        foreign = await http.delete(f"/v1/sessions/{NAME}")
        unknown = await http.delete("/v1/sessions/no-talk")
    assert foreign.status_code == unknown.status_code == 404
    assert foreign.text.replace(NAME, "no-talk") == unknown.text
    async with control(cluster, alice.tenant_id) as client:
        assert (await session_of(client, NAME)).state == session.SESSION_STATE_ACTIVE


async def test_both_at_once_are_right_and_alice_keeps_reading(
    cluster: Cluster, pair: list[Tenant]
) -> None:
    alice, mallory = pair
    talk = alice.chat(cluster)
    await talk.say(PROMPT)

    async def noise(number: int) -> None:
        thief = mallory.chat(cluster, NAME if number % 2 else None)
        thief.messages = [dict(message) for message in talk.messages[: 2 * (number % 2)]]
        await thief.say(f"{number}. " + PROMPT, model=MODEL)

    for turn in range(2):
        answers = await asyncio.gather(
            talk.say(f"Go on, {turn}. " + words(90 * turn, 60), stream=bool(turn)),
            *(noise(number) for number in range(4)),
        )
        assert answers[0].reuses
