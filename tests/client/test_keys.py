"""Whose key it is: what is remembered, for how long, and what a flood of guesses may do."""

import asyncio
import gc
import sys

import pytest
from google.protobuf.duration_pb2 import Duration
from kvplane.api.tenant.v1 import tenant_pb2 as pb
from kvplane.client import keys as subject
from kvplane.client.keys import Key, Keys
from kvplane.kernel.clock import FakeClock
from kvplane.kernel.context import Role
from kvplane.kernel.errors import (
    InvalidField,
    PermissionDenied,
    Unauthenticated,
    Unavailable,
)

GOOD = "kvp_good-key-of-acme"


class Tenants:
    """Knows keys. A test may hold its answers up, or have it fail."""

    def __init__(self):
        self.keys = {GOOD: pb.ResolveApiKeyResponse(
            tenant_id="acme", key_id="k1", role=pb.ROLE_TENANT, cache_salt="salt"
        )}  # fmt: skip
        self.asked = []
        self.failure = None
        self.may_answer = asyncio.Event()
        self.may_answer.set()

    async def ResolveApiKey(self, request, /):
        self.asked.append(request.secret)
        await self.may_answer.wait()
        if self.failure is not None:
            raise self.failure
        if request.secret not in self.keys:
            raise Unauthenticated("the API key is not valid")
        return self.keys[request.secret]


@pytest.fixture
def tenants():
    return Tenants()


@pytest.fixture
def clock():
    return FakeClock()


@pytest.fixture
def keys(tenants, clock):
    return Keys(tenants, clock, ttl=5.0, stale=300.0)


async def refused(keys, secret):
    with pytest.raises(Unauthenticated) as caught:
        await keys.find(secret)
    return caught.value


async def guess(keys, times, first=0):
    """Try keys that nobody has; return how many were refused without being looked up."""
    given_up = 0
    for number in range(first, first + times):
        given_up += (await refused(keys, f"kvp_guess{number}")).retry_after is not None
    return given_up


async def test_a_key_is_asked_for_once_in_a_while(keys, tenants, clock):
    for _ in range(3):
        assert await keys.find(GOOD) == Key("k1", Role.TENANT, "acme", "", "salt")
    assert len(tenants.asked) == 1
    clock.advance(5)
    await keys.find(GOOD)
    assert len(tenants.asked) == 2


async def test_many_at_once_ask_once(keys, tenants):
    tenants.may_answer.clear()
    waiting = [asyncio.ensure_future(keys.find(GOOD)) for _ in range(50)]
    await asyncio.sleep(0)
    waiting[0].cancel()  # whoever asked first may leave
    await asyncio.sleep(0)
    tenants.may_answer.set()
    answers = await asyncio.gather(*waiting, return_exceptions=True)
    assert isinstance(answers[0], asyncio.CancelledError)
    assert {answer.key_id for answer in answers[1:]} == {"k1"}
    assert len(tenants.asked) == 1


async def test_an_expired_key_ends_on_time_although_it_is_remembered(keys, tenants, clock):
    tenants.keys[GOOD].valid_for.CopyFrom(Duration(seconds=2, nanos=500_000_000))
    await keys.find(GOOD)
    clock.advance(2.4)
    await keys.find(GOOD)
    assert len(tenants.asked) == 1
    del tenants.keys[GOOD]
    clock.advance(0.1)
    await refused(keys, GOOD)


async def test_its_end_is_counted_from_before_it_was_asked_for(keys, tenants, clock):
    tenants.keys[GOOD].valid_for.CopyFrom(Duration(seconds=2))
    tenants.may_answer.clear()
    asking = asyncio.ensure_future(keys.find(GOOD))
    await asyncio.sleep(0)
    clock.advance(1.5)
    tenants.may_answer.set()
    await asking
    del tenants.keys[GOOD]
    clock.advance(0.5)
    await refused(keys, GOOD)


async def test_an_outage_does_not_outlast_a_keys_end_nor_the_stale_time(keys, tenants, clock):
    tenants.keys["kvp_short"] = pb.ResolveApiKeyResponse(
        tenant_id="acme", valid_for=Duration(seconds=20)
    )
    await keys.find(GOOD)
    await keys.find("kvp_short")
    tenants.failure = Unavailable("away")
    clock.advance(19)
    await keys.find("kvp_short")
    clock.advance(1)
    with pytest.raises(Unavailable):
        await keys.find("kvp_short")
    clock.advance(279)
    assert (await keys.find(GOOD)).tenant_id == "acme"
    clock.advance(2)
    with pytest.raises(Unavailable) as caught:
        await keys.find(GOOD)
    assert caught.value.retry_after
    tenants.failure = None
    await keys.find(GOOD)


async def test_an_outage_is_not_waited_for_at_every_call(keys, tenants, clock):
    await keys.find(GOOD)
    tenants.failure = Unavailable("away")
    clock.advance(6)
    for _ in range(20):
        await keys.find(GOOD)
    assert len(tenants.asked) == 2


async def test_a_service_that_hangs_is_waited_for_shortly(keys, tenants, clock):
    await keys.find(GOOD)
    tenants.may_answer.clear()
    clock.advance(6)
    async with asyncio.timeout(5):
        await keys.find(GOOD)
    del tenants.keys[GOOD]
    tenants.may_answer.set()  # its late answer counts
    clock.advance(6)
    await refused(keys, GOOD)


@pytest.mark.parametrize(
    "failure",
    [
        PermissionDenied("not you"),
        Unauthenticated("who?", metadata=subject.OF_THE_ASKER),
        OSError(),
    ],
)
async def test_what_is_wrong_with_the_asker_is_no_fault_of_the_key(keys, tenants, clock, failure):
    await keys.find(GOOD)
    tenants.failure = failure
    clock.advance(6)
    await keys.find(GOOD)
    with pytest.raises(Unavailable):
        await keys.find("kvp_new")


@pytest.mark.parametrize(
    "secret",
    ["", "kvp", "sk-1", "KVP_1", "kvp_é", "kvp_\ud800", "kvp_" + "x" * 509, " kvp_x"],
    ids=ascii,
)
async def test_what_cannot_be_a_key_is_not_asked_for(keys, tenants, secret):
    await refused(keys, secret)
    assert tenants.asked == []


async def test_a_field_that_the_service_refuses_is_nobodys_key(keys, tenants):
    tenants.failure = InvalidField("secret", "is odd")
    await refused(keys, "kvp_odd")


async def test_nobodys_keys_are_remembered_shortly(keys, tenants, clock):
    for _ in range(5):
        await refused(keys, "kvp_new")
    assert len(tenants.asked) == 1
    tenants.keys["kvp_new"] = tenants.keys[GOOD]
    clock.advance(1)
    assert (await keys.find("kvp_new")).tenant_id == "acme"


async def test_a_flood_of_guesses_reaches_the_service_at_a_bounded_rate(keys, tenants, clock):
    assert await guess(keys, 1000) == 800
    assert len(tenants.asked) == 200
    clock.advance(2)
    assert await guess(keys, 1000, first=1000) == 960
    assert len(tenants.asked) == 240


async def test_a_flood_shuts_no_known_key_out(keys, tenants, clock):
    await keys.find(GOOD)
    assert await guess(keys, 30_000) == 29_800
    assert (await keys.find(GOOD)).tenant_id == "acme"
    clock.advance(5)  # asked for again in the middle of it
    await guess(keys, 1000)
    assert (await keys.find(GOOD)).tenant_id == "acme"
    del tenants.keys[GOOD]
    clock.advance(5)
    await guess(keys, 1000)
    await refused(keys, GOOD)


async def test_good_keys_cost_no_guesses(keys, tenants):
    for number in range(1000):
        tenants.keys[f"kvp_good{number}"] = tenants.keys[GOOD]
        await keys.find(f"kvp_good{number}")
    assert await guess(keys, 200) == 0


async def test_no_more_than_a_bounded_number_is_asked_for_at_once(keys, tenants):
    tenants.may_answer.clear()
    waiting = [asyncio.ensure_future(keys.find(f"kvp_slow{n}")) for n in range(1000)]
    for _ in range(5):
        await asyncio.sleep(0)
    assert len(tenants.asked) == 200
    tenants.may_answer.set()
    answers = await asyncio.gather(*waiting, return_exceptions=True)
    assert {type(answer) for answer in answers} == {Unauthenticated}
    assert sum(answer.retry_after is not None for answer in answers) == 800


async def test_what_is_remembered_is_bounded(keys, tenants, clock, monkeypatch):
    monkeypatch.setattr(subject, "_MAX_KNOWN", 50)
    monkeypatch.setattr(subject, "_MAX_NOBODYS", 50)
    for number in range(200):
        tenants.keys[f"kvp_good{number}"] = tenants.keys[GOOD]
        await keys.find(f"kvp_good{number}")
        await keys.find(GOOD)  # used all the time, so never the one that goes
    await guess(keys, 200)
    assert len(keys._known) <= 50
    assert len(keys._nobodys) <= 50
    assert tenants.asked.count(GOOD) == 1
    assert keys._asking == {}


async def test_a_key_is_not_kept_in_clear(keys, tenants):
    await keys.find(GOOD)
    await refused(keys, "kvp_nobodys-secret")
    tenants.asked.clear()
    kept = _reachable(keys)
    kept -= _reachable(tenants)
    assert not [text for text in kept if "kvp_" in text]
    assert "salt" not in repr(await keys.find(GOOD))


def _reachable(root):
    """All texts that an object holds on to."""
    texts, todo, seen = set(), [root], set()
    while todo:
        one = todo.pop()
        if id(one) in seen or isinstance(one, type | type(sys)):
            continue
        seen.add(id(one))
        if isinstance(one, str | bytes):
            texts.add(one if isinstance(one, str) else one.decode("latin1"))
            continue
        if callable(one) and one is not root:
            continue
        todo.extend(gc.get_referents(one))
    return texts
