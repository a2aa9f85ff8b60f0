"""An operator revokes a lease: before the read, while it is in flight, and for longer."""

import json
from collections.abc import Iterable
from typing import Any

import pytest
from kvplane.lease.values import LeaseState

from fleet.books import Books, eventually
from fleet.client import Client
from fleet.cluster import NARROW, TOY
from fleet.scene import DECODE, PREFILL, Scene

pytestmark = [pytest.mark.processes, pytest.mark.timeout(400)]


def operator(books: Books, *arguments: str, replica: int = 1) -> Any:
    """Run a command against one replica of the lease service."""
    server = f"127.0.0.1:{books.fleet.ports[f'lease-{replica}']}"
    done = books.fleet.command(*arguments, "--tenant=red", f"--server={server}", "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def revoke(scene: Scene, state: str) -> Any:
    """Find the session's lease in that state and take it away, as an operator would."""
    where = (f"--session={scene.session_id}", f"--state={state}")
    found = operator(scene.books, "leases", "list", *where)
    assert len(found) == 1, found
    # The other replica knows it too.
    return operator(scene.books, "leases", "revoke", found[0]["lease_id"], "--yes", replica=2)


async def free_orders(scene: Scene) -> list[Any]:
    """Return the orders to free what the session's decodes held."""
    orders = await scene.books.orders(scene.session_id)
    return [order for order in orders if not order.hold and not order.for_decode]


async def slow(books: Books, engines: Iterable[str], seconds: float) -> None:
    """Make reads slow."""
    for engine in engines:
        await books.fault(engine, slow_reads_s=seconds)


@pytest.mark.parametrize("model", [NARROW, TOY])
async def test_a_read_in_flight_drains_and_its_blocks_are_freed_once(
    client: Client, books: Books, model: str
) -> None:
    scene = Scene(client, books, model)
    await scene.begin()
    readers = books.fleet.names(model, "prefill")
    await slow(books, readers, 60.0)
    turn = scene.send()

    async def reading() -> bool:
        return (await books.stats(readers))["reading"] == 1

    await eventually(reading)
    lease = await scene.lease(LeaseState.READING)
    revoked = revoke(scene, "reading")
    assert (revoked["state"], revoked["draining"]) == ("revoked", True)
    assert not turn.done()
    # The reader may still be reading: the owner keeps the blocks, however short of them it is.
    held = await scene.holds(lease.owner)
    await scene.churn(lease.owner, 60)
    assert await reading()
    assert held == await scene.holds(lease.owner) == 1
    assert await free_orders(scene) == []
    await slow(books, readers, 0)
    reply = await turn
    assert reply.reused > 100

    async def drained() -> bool:
        [ended] = await scene.leases()
        return ended.state == LeaseState.REVOKED and not ended.draining

    await eventually(drained)
    # What it held of the turn before is gone, and what it holds of this one is there.
    assert await scene.holds(lease.owner) == 1
    assert len(await free_orders(scene)) <= 1
    assert await scene.stat(lease.owner, "late_notifications") == 0
    scene.go_on(reply)
    assert (await scene.client.ask(scene.body(), scene.name)).reused > 130


async def test_a_read_that_outlasts_the_revoked_lease_is_not_used(
    client: Client, books: Books
) -> None:
    # The owner frees at the lease's end, and the read comes too late.
    books.allowed.add((DECODE, "late_notifications"))
    scene = Scene(client, books)
    await scene.begin()
    before = await books.states([PREFILL, DECODE])
    await slow(books, [PREFILL], 60.0)
    turn = scene.send()
    await scene.until(PREFILL, "reading", 1)
    revoked = revoke(scene, "reading")
    assert (revoked["state"], revoked["draining"]) == ("revoked", True)
    assert await scene.holds(DECODE) == 1
    ordered = before[DECODE]["stats"]["freed_by_order"] + 1
    await scene.until(DECODE, "freed_by_order", ordered)
    await scene.churn(DECODE, 60)
    reply = await turn
    assert reply.reused == 0
    assert (
        await scene.stat(PREFILL, "reads_dropped") == before[PREFILL]["stats"]["reads_dropped"] + 1
    )
    assert len(await free_orders(scene)) == 1
    assert await scene.stat(DECODE, "freed_by_order") == ordered
    # The reader keeps its own blocks aside until the read is over.
    assert (await books.state(PREFILL))["blocks"]["quarantined"] > 0
    await slow(books, [PREFILL], 0)
    await scene.until(DECODE, "late_notifications", 1)

    async def clear() -> bool:
        return (await books.state(PREFILL))["blocks"]["quarantined"] == 0

    await eventually(clear, 3)


async def test_a_lease_that_was_not_begun_is_over_at_once(client: Client, books: Books) -> None:
    scene = Scene(client, books)
    await scene.begin()
    ordered = await scene.stat(DECODE, "freed_by_order")
    books.fleet.engines[PREFILL].freeze()
    try:
        turn = scene.send()
        await scene.lease(LeaseState.GRANTED)
        revoked = revoke(scene, "granted")
        assert (revoked["state"], revoked["draining"]) == ("revoked", False)
        await scene.until(DECODE, "freed_by_order", ordered + 1)
        assert await scene.holds(DECODE) == 0
        await scene.churn(DECODE, 60)
        assert not turn.done()
    finally:
        books.fleet.engines[PREFILL].thaw()
    reply = await turn
    assert reply.reused == 0
    assert len(await free_orders(scene)) == 1
    assert await scene.stat(DECODE, "freed_by_order") == ordered + 1
