"""Failures of keeping tenants apart, as reported from the field."""

import asyncio
import json
import statistics
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest
from demo.servers import stop_all, wait_for
from e2e.waiting import eventually
from kvplane.api.lease.v1 import lease_pb2 as lease
from kvplane.api.routing.v1 import routing_pb2 as routing
from kvplane.api.session.v1 import session_pb2 as sessions
from kvplane.api.tenant.v1 import tenant_pb2 as tenants
from kvplane.client import KvplaneClient, kv_params
from kvplane.kernel.errors import KvplaneError

from cases.processes import CLOCK, MODEL, Dev, Engine
from cases.relay import Relay
from cases.talk import words

pytestmark = pytest.mark.processes

TOKEN = "internal"
PATH = "/v1/chat/completions"


@dataclass
class Plane:
    """A plane that asks for keys, two engines behind relays, and two tenants."""

    dev: Dev
    prefill: Engine
    decode: Engine
    to_prefill: Relay
    to_decode: Relay
    keys: dict[str, str] = field(default_factory=dict)

    def as_tenant(self, name: str) -> KvplaneClient:
        """Return a client with the tenant's own key."""
        return KvplaneClient(self.dev.address, token=self.keys[name])

    def as_service(self, tenant: str) -> KvplaneClient:
        """Return a client that does what gateways and connectors do, for a tenant."""
        return KvplaneClient(self.dev.address, token=TOKEN, tenant=tenant)

    async def ask(
        self, tenant: str, content: str | list[dict[str, str]], session: str = "", **more: Any
    ) -> httpx.Response:
        """Send a chat as a tenant."""
        messages = [{"role": "user", "content": content}] if isinstance(content, str) else content
        headers = {"Authorization": f"Bearer {self.keys[tenant]}", **more.pop("headers", {})}
        if session:
            headers["x-session-id"] = session
        body = {"model": MODEL, "messages": messages, "max_tokens": 8, **more}
        async with httpx.AsyncClient(timeout=30) as http:
            return await http.post(self.dev.url + PATH, json=body, headers=headers)

    async def delete(self, tenant: str, session: str) -> httpx.Response:
        """End a conversation as a tenant."""
        headers = {"Authorization": f"Bearer {self.keys[tenant]}"}
        async with httpx.AsyncClient(timeout=30) as http:
            return await http.delete(f"{self.dev.url}/v1/sessions/{session}", headers=headers)

    async def held(self, tenant: str, session: str) -> list[lease.Ownership]:
        """Wait for what is held for a conversation's next turn, and return it."""
        async with self.as_tenant(tenant) as kv:
            found = await kv.sessions.GetSession(sessions.GetSessionRequest(name=session))
            request = lease.ListOwnershipsRequest(
                session_id=found.session.session_id, states=[lease.OWNERSHIP_STATE_HELD]
            )

            async def there() -> list[lease.Ownership]:
                listed = (await kv.leases.ListOwnerships(request)).ownerships
                return [own for own in listed if not own.for_decode]

            asked = [
                lease.GetOwnershipRequest(ownership_id=own.ownership_id)
                for own in await eventually(there)
            ]
            return [(await kv.leases.GetOwnership(one)).ownership for one in asked]


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Plane]:
    """All of it, ready."""
    folder = tmp_path_factory.mktemp("tenancy")
    dev = Dev(folder, AUTH_MODE="api_key", AUTH_INTERNAL_TOKEN=TOKEN)
    relays = Relay(), Relay()
    engines = [
        Engine(role, role, folder, dev.control_plane, "--url", relay.url, "--prefix-caching")
        for role, relay in zip(("prefill", "decode"), relays, strict=True)
    ]
    for engine, relay in zip(engines, relays, strict=True):
        relay.target = engine.url
        engine.env["KVPLANE_TOKEN"] = TOKEN
    plane = Plane(dev, engines[0], engines[1], *relays)
    try:
        for server in (dev, *engines):
            server.start()
        wait_for([dev, *engines], 60)
        asyncio.run(_prepare(plane))
        yield plane
    finally:
        stop_all([dev, *engines])


async def _prepare(plane: Plane) -> None:
    async with KvplaneClient(plane.dev.address, token=TOKEN) as kv:

        async def registered() -> bool:
            return len((await kv.workers.ListWorkers(routing.ListWorkersRequest())).workers) == 2

        await eventually(registered, 30)
        for name in ("a", "b"):
            await kv.tenants.CreateTenant(tenants.CreateTenantRequest(tenant_id=name))
            made = await kv.tenants.CreateApiKey(tenants.CreateApiKeyRequest(tenant_id=name))
            plane.keys[name] = made.secret

    async def served() -> bool:
        headers = {"Authorization": f"Bearer {plane.keys['a']}"}
        async with httpx.AsyncClient() as http:
            found = await http.get(plane.dev.url + "/v1/models", headers=headers)
        return bool(found.json().get("data"))

    await eventually(served, 30)


@pytest.fixture
async def plane(started: Plane) -> AsyncIterator[Plane]:
    """All of it, with the relays there."""
    async with started.to_prefill.running(), started.to_decode.running():
        yield started


async def outcome(call: Any) -> tuple[str, str, str]:
    """Return what a call is answered, without the id that was asked for."""
    try:
        await call
    except KvplaneError as error:
        ident = error.metadata.get("id", "")
        text = error.message.replace(ident, "<id>") if ident else error.message
        return error.code, error.reason, text
    return "OK", "", ""


async def test_anothers_conversation_is_an_unknown_one(plane: Plane) -> None:
    """N-01: the client's id is used without the tenant; unknown and foreign can be told apart."""
    content = words(201)
    assert (await plane.ask("a", content, "n01")).status_code == 200
    [owned] = await plane.held("a", "n01")
    session_id, never = owned.session_id, "session-" + "0" * 32
    async with plane.as_service("a") as kv:
        granted = await kv.leases.GrantLease(_grant(owned, "n01"))
        before = (await kv.sessions.GetSession(sessions.GetSessionRequest(name="n01"))).session
    lease_id = granted.lease.lease_id
    assert lease_id

    # B with a key, and what B's gateway does for B.
    async with plane.as_tenant("b") as kv, plane.as_service("b") as theirs:
        api, own = kv.sessions, kv.leases
        Ident = Callable[[str], Any]
        by_session: list[Ident] = [
            lambda i: api.GetSession(sessions.GetSessionRequest(session_id=i)),
            lambda i: api.EndSession(sessions.EndSessionRequest(session_id=i)),
            lambda i: theirs.sessions.CompleteTurn(
                sessions.CompleteTurnRequest(session_id=i, turn=1, outcome=sessions.TURN_OUTCOME_OK)
            ),
        ]
        by_lease: list[Ident] = [
            lambda i: own.GetLease(lease.GetLeaseRequest(lease_id=i)),
            lambda i: own.RevokeLease(lease.RevokeLeaseRequest(lease_id=i)),
        ]
        by_name: list[Ident] = [
            lambda i: api.GetSession(sessions.GetSessionRequest(name=i)),
            lambda i: api.EndSession(sessions.EndSessionRequest(name=i)),
        ]
        own_lease = f"{lease_id[:-8]}{'0' * 8}"
        for calls, foreign, unknown in (
            (by_session, session_id, never),
            (by_lease, lease_id, own_lease),
            (by_name, "n01", "n99"),
        ):
            for call in calls:
                seen = await outcome(call(foreign))
                assert seen == await outcome(call(unknown))
                assert seen[0] == "NOT_FOUND"
        # Renewing and releasing is for workers, whosever lease it is.
        holder, token = granted.lease.holder, granted.lease.fencing_token
        for i in (lease_id, own_lease):
            release = lease.LeaseRelease(
                lease_id=i, fencing_token=token, outcome=lease.READ_OUTCOME_UNUSED
            )
            for call in (
                own.RenewLeases(
                    lease.RenewLeasesRequest(
                        holder=holder, leases=[lease.LeaseRef(lease_id=i, fencing_token=token)]
                    )
                ),
                own.ReleaseLeases(lease.ReleaseLeasesRequest(holder=holder, releases=[release])),
            ):
                assert (await outcome(call))[0] == "PERMISSION_DENIED"
        assert await _times_alike(by_session[0], session_id, never)
        # Lists hold nothing of it.
        listed = await api.ListSessions(sessions.ListSessionsRequest(page_size=1000))
        assert session_id not in {one.session_id for one in listed.sessions}
        for found in (
            await own.ListOwnerships(lease.ListOwnershipsRequest(session_id=session_id)),
            await own.ListOwnerships(lease.ListOwnershipsRequest(session_id=never)),
        ):
            assert not found.ownerships

    # Over HTTP, too: the same words, and a conversation of one's own under the same name.
    foreign, unknown = await plane.delete("b", "n01"), await plane.delete("b", "n99")
    assert foreign.status_code == unknown.status_code == 404
    assert foreign.json() == json.loads(unknown.text.replace("n99", "n01"))
    mine = await plane.ask("b", content, "n01")
    assert mine.headers["x-kvplane-decision"] == "recompute; reason=first_turn"
    assert mine.headers["x-kvplane-session-id"] != session_id
    assert mine.headers["x-kvplane-turn"] == "1"

    # And all that left hers as it was.
    async with plane.as_tenant("a") as kv:
        after = (await kv.sessions.GetSession(sessions.GetSessionRequest(name="n01"))).session
        assert after == before
        still = await kv.leases.GetLease(lease.GetLeaseRequest(lease_id=lease_id))
        assert still.lease.state == lease.LEASE_STATE_GRANTED
        await kv.leases.RevokeLease(lease.RevokeLeaseRequest(lease_id=lease_id))


def _grant(owned: lease.Ownership, request_id: str) -> lease.GrantLeaseRequest:
    request = lease.GrantLeaseRequest(
        request_id=request_id,
        ownership_id=owned.ownership_id,
        holder=lease.Holder(worker_id="prefill", epoch=1, compatibility=owned.compatibility),
    )
    request.ttl.FromSeconds(10)
    return request


async def _times_alike(call: Callable[[str], Any], one: str, other: str) -> bool:
    """Tell whether both take as long, as far as a busy machine can tell."""
    took: dict[str, list[float]] = {one: [], other: []}
    for _ in range(30):
        for ident, times in took.items():
            begun = CLOCK.monotonic()
            await outcome(call(ident))
            times.append(CLOCK.monotonic() - begun)
    medians = [statistics.median(times) for times in took.values()]
    return max(medians) < 2 * min(medians) + 0.002


def cached(answer: httpx.Response) -> int:
    """Return how many tokens of the prompt were in a prefix cache, or read."""
    return int(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])


async def test_the_same_prompt_is_nobodys_but_the_tenants_own(plane: Plane) -> None:
    """N-02, sglang#37160 and LMCache#4825: the salt is dropped on the way, so that a tenant is
    served from another's cache; smg#2420: a router sends a request where it has no hit.
    """
    content = words(202, 1200)
    first = await plane.ask("a", content, "n02")
    assert first.json()["usage"]["prompt_tokens"] >= 2000
    await plane.held("a", "n02")
    reads = plane.prefill.reads()
    again = await plane.ask("a", content, "n02-other")
    assert cached(again) > 1000, "her own prompt is in her own cache"

    # B: under the name, by history, and with salts that might be hers.
    plane.to_prefill.requests.clear()
    tries: list[tuple[str, dict[str, Any]]] = [
        ("n02", {}),
        ("", {}),
        ("n02-x", {"cache_salt": "a"}),
        ("n02-y", {"cache_salt": first.headers["x-kvplane-session-id"]}),
    ]
    for session, more in tries:
        theirs = await plane.ask("b", content, session, **more)
        assert theirs.headers["x-kvplane-decision"] == "recompute; reason=first_turn"
        assert theirs.headers["x-kvplane-reused-tokens"] == "0"
        # What B had before under the same salt is B's own.
        if more or session == "n02":
            assert cached(theirs) == 0
    assert plane.prefill.reads() == reads
    salts = [body["cache_salt"] for body in plane.to_prefill.bodies]
    assert len(set(salts)) == 3  # of B without a salt, and with each of the two
    assert not {"a", first.headers["x-kvplane-session-id"]} & set(salts)

    # To take the salt that the engine gets, as if one had seen it, is of no use.
    plane.to_prefill.requests.clear()
    await plane.ask("a", content, "n02-seen")
    [seen] = plane.to_prefill.bodies
    stolen = await plane.ask("b", content, "n02-stolen", cache_salt=seen["cache_salt"])
    assert cached(stolen) == 0
    assert plane.to_prefill.bodies[-1]["cache_salt"] != seen["cache_salt"]


async def test_another_salt_of_the_same_tenant_reads_nothing(plane: Plane) -> None:
    """N-02: same tenant, another salt: no reuse, and the answer is right."""
    content = words(203)
    first = await plane.ask("a", content, "n02-salted", cache_salt="one")
    await plane.held("a", "n02-salted")
    reads = plane.prefill.reads()
    messages = [
        {"role": "user", "content": content},
        first.json()["choices"][0]["message"],
        {"role": "user", "content": "And?"},
    ]
    other = await plane.ask("a", messages, "n02-salted", cache_salt="two")
    assert other.status_code == 200
    assert other.headers["x-kvplane-reused-tokens"] == "0"
    assert cached(other) == 0
    # The decode reads from its prefill; the prefill read from nobody.
    assert plane.prefill.reads() == reads


EVIL = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_host": "169.254.169.254",
    "remote_port": 80,
    "remote_block_ids": [[1, 2, 3]],
    "remote_engine_id": "another",
    "remote_request_id": "evil",
    "remote_num_tokens": 96,
    "kvplane": {"tenant": "a", "session": "evil", "turn": 1},
}


async def test_a_client_steers_no_engine(plane: Plane) -> None:
    """N-03, vllm PR#47843, llm-d-router#242, llm-d#1365: a client's kv_transfer_params and
    headers send the server to any host and port.
    """
    places: list[dict[str, Any]] = [
        {"kv_transfer_params": EVIL},
        {"kv_transfer_params": "evil"},
        {"extra_body": {"kv_transfer_params": EVIL, "extra_body": [{"kv_transfer_params": EVIL}]}},
        {"vllm_xargs": {"kv_transfer_params": EVIL}},
        {"extra_args": {"kv_transfer_params": EVIL, "ec_transfer_params": EVIL}},
        {"ec_transfer_params": EVIL, "request_id": "evil", "priority": -100},
    ]
    headers = {
        "x-prefiller-host-port": "169.254.169.254:80",
        "x-gateway-destination-endpoint": "169.254.169.254:80",
        "X-data-parallel-rank": "5",
        "X-Kvplane-Tenant": "a",
        "X-Forwarded-Host": "evil",
        "Host": "evil",
    }
    content = words(204)
    plain = (await plane.ask("b", content)).json()["choices"][0]["message"]
    for number, more in enumerate(places):
        answer = await plane.ask(
            "b", content, f"n03-{number}", stream=bool(number % 2), headers=headers, **more
        )
        assert answer.status_code == 200, answer.text
        assert b"kv_transfer_params" not in answer.content
        assert b"remote_" not in answer.content
        if not number % 2:
            assert answer.json()["choices"][0]["message"] == plain
    for relay in (plane.to_prefill, plane.to_decode):
        for sent, body in relay.requests:
            said = json.dumps([sent, body])
            assert "169.254" not in said
            assert "evil" not in said
            assert not {name for name in sent if name.lower().startswith(("x-pre", "x-gate"))}
            assert "x-data-parallel-rank" not in {name.lower() for name in sent}
            assert not {"request_id", "priority", "ec_transfer_params"} & body.keys()
            tag = body["kv_transfer_params"]["kvplane"]
            assert tag["tenant"] == "b"


@pytest.mark.parametrize(
    ("host", "shift"), [("169.254.169.254", 0), (None, 1)], ids=["other-host", "other-port"]
)
async def test_a_worker_that_names_a_place_not_its_own_is_not_read_from(
    plane: Plane, host: str | None, shift: int
) -> None:
    """N-03: an allow-list that looks at the host only."""
    session = f"n03-worker-{shift}"
    content = words(205 + shift)
    assert (await plane.ask("a", content, session)).status_code == 200
    [owned] = await plane.held("a", session)
    # The worker says where to read it from once more, and lies.
    lie = lease.Ownership()
    lie.CopyFrom(owned)
    lie.ClearField("ownership_id")
    lie.ClearField("state")
    lie.turn += 1
    lie.digests = bytes(16 * -(-lie.num_tokens // lie.block_size))  # nobody gets to compare
    lie.hold.FromSeconds(60)
    lie.params.remote_request_id += "-lie"
    lie.params.remote_host = host or owned.params.remote_host
    lie.params.remote_port += shift
    async with plane.as_service("a") as kv:
        report = lease.ReportOwnershipRequest(worker_id="decode", epoch=owned.epoch)
        report.time_anchor.anchor = CLOCK.now_us()
        report.ownerships.append(lie)
        await kv.leases.ReportOwnership(report)
    reads = plane.prefill.reads()
    answer = await plane.ask("a", content, session)
    assert answer.status_code == 200
    assert answer.headers["x-kvplane-decision"] == "recompute; reason=incompatible"
    assert plane.prefill.reads() == reads
    assert "lease_id" not in plane.to_prefill.bodies[-1]["kv_transfer_params"]["kvplane"]
    assert not any(kv_params.to_dict(lie.params)["remote_request_id"] in json.dumps(body)
                   for body in plane.to_prefill.bodies)  # fmt: skip


async def test_a_prefill_that_names_a_place_not_its_own_sends_no_decode_there(
    plane: Plane,
) -> None:
    """N-03: params of an engine's answer with an unregistered host or port are not passed on."""
    for host, port in (("169.254.169.254", None), (None, 1)):

        def lie(raw: bytes, host: str | None = host, port: int | None = port) -> bytes:
            answer = json.loads(raw)
            params = answer["kv_transfer_params"]
            params["remote_host"] = host or params["remote_host"]
            params["remote_port"] = port or params["remote_port"]
            return json.dumps(answer).encode()

        plane.to_prefill.whole = lie
        plane.to_decode.requests.clear()
        answer = await plane.ask("a", words(207))
        assert answer.status_code == 200
        assert "remote_host" not in plane.to_decode.bodies[0]["kv_transfer_params"]
