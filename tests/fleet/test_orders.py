"""What owners are told, and how often."""

import asyncio

import pytest
from google.protobuf.duration_pb2 import Duration
from kvplane.api.lease.v1 import lease_pb2
from kvplane.client import lease_api

from fleet.books import Books, eventually, nothing_of
from fleet.client import Client
from fleet.cluster import TOKEN
from fleet.scene import DECODE, Scene

pytestmark = [pytest.mark.processes, pytest.mark.timeout(400)]


async def orders(scene: Scene) -> list[bool]:
    """Return the orders about what decodes hold of the session: True to hold, False to free."""
    found = await scene.books.orders(scene.session_id)
    return [order.hold for order in found if not order.for_decode]


async def end(scene: Scene) -> None:
    """End the session, as its client would."""
    url = f"{scene.client.gateways[0]}/v1/sessions/{scene.name}"
    async with scene.client.http.delete(url, headers=scene.client.headers(None)) as answer:
        assert answer.status == 200, await answer.text()


async def test_the_end_of_a_session_frees_once(client: Client, books: Books) -> None:
    scene = Scene(client, books)
    await scene.begin()
    freed = await scene.stat(DECODE, "freed_by_order")
    assert await scene.holds(DECODE) == 1
    await asyncio.gather(end(scene), end(scene))
    await scene.until(DECODE, "freed_by_order", freed + 1, 3)
    await nothing_of(books.unreturned, 5)
    await end(scene)
    assert await orders(scene) == [False]
    assert await scene.stat(DECODE, "freed_by_order") == freed + 1


async def test_a_session_that_ends_during_its_turn_leaves_nothing(
    client: Client, books: Books
) -> None:
    scene = Scene(client, books)
    await scene.begin()
    await books.fault(DECODE, prefill_delay_s=1.5)
    turn = scene.send()
    await scene.until(DECODE, "running", 1)
    await end(scene)
    await turn
    # The turn's report comes after the end; nobody can come back to it.
    await nothing_of(books.unreturned, 8)


async def test_a_newer_turn_replaces_what_it_did_not_read(client: Client, books: Books) -> None:
    scene = Scene(client, books)
    await scene.begin()
    for turn in range(3):
        freed = await scene.stat(DECODE, "freed_by_order")
        # Another beginning: not a token can be read.
        scene.messages[0]["content"] = f"{turn} {scene.messages[0]['content']}"
        reply = await client.ask(scene.body(), scene.name)
        assert reply.reused == 0
        await scene.until(DECODE, "freed_by_order", freed + 1, 3)

        async def newest_only() -> bool:
            return await scene.holds(DECODE) == 1

        await eventually(newest_only, 3)
        assert await orders(scene) == [False] * (turn + 1)
        assert await scene.stat(DECODE, "freed_by_order") == freed + 1
        scene.go_on(reply)


async def test_what_is_read_needs_no_order(client: Client, books: Books) -> None:
    scene = Scene(client, books)
    await scene.begin()
    for _ in range(3):
        reply = await client.ask(scene.body(), scene.name)
        assert reply.reused > 0
        scene.go_on(reply)
    assert await scene.holds(DECODE) == 1
    assert await orders(scene) == []


async def test_an_operators_wish_to_hold_longer_is_carried_out_once(
    client: Client, books: Books
) -> None:
    scene = Scene(client, books)
    await books.fault(DECODE, hold_s=20.0)
    await scene.begin()
    longer = await scene.stat(DECODE, "held_longer")
    api = lease_api(
        books.fleet.addresses("lease"), tenant="red", token=TOKEN, channels=books.channels
    )
    request = lease_pb2.ExtendHoldRequest(session_id=scene.session_id, hold=Duration(seconds=200))
    assert (await api.ExtendHold(request)).asked == 1
    await scene.until(DECODE, "held_longer", longer + 1, 3)
    [held] = (await books.state(DECODE))["held"]
    assert held["left_s"] > 150

    async def known() -> bool:
        found = await books.rows(
            "SELECT 1 FROM ownerships WHERE session_id = :session AND state = 1"
            " AND hold_deadline_us > (extract(epoch FROM now()) + 150) * 1000000",
            session=scene.session_id,
        )
        return bool(found)

    await eventually(known, 3)
    assert await orders(scene) == [True]
    assert await scene.stat(DECODE, "held_longer") == longer + 1
