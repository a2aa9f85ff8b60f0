"""Engines without our lease logic: two gateways are the holders in their place."""

import pytest
from kvplane.lease.values import LeaseState

from fleet.books import Books
from fleet.client import Client
from fleet.cluster import PLAIN
from fleet.words import sentence

pytestmark = [pytest.mark.processes, pytest.mark.timeout(400)]

TURNS = 6


async def test_turns_by_turns_through_two_gateways_read(client: Client, books: Books) -> None:
    readers = books.fleet.names(PLAIN)
    before = (await books.stats(readers))["nixl_reads"]
    messages = [{"role": "user", "content": sentence("plain", 60)}]
    body = {"model": PLAIN, "max_tokens": 8, "messages": messages}
    read, session_id = 0, ""
    for turn in range(TURNS):
        reply = await client.ask(body, "plain", gateway=turn % 2)
        read += reply.reused > 0
        session_id = reply.session_id
        messages.append({"role": "assistant", "content": reply.texts[0]})
        messages.append({"role": "user", "content": sentence(f"plain-{turn}", 20)})
    # A gateway waits half a second for the lease service, which a busy machine may exceed.
    assert read >= TURNS / 2
    leases = await books.leases(session_id=session_id, state=LeaseState.CONSUMED)
    assert {lease.holder_worker_id for lease in leases} <= set(readers)
    prefills = [lease for lease in leases if lease.holder_worker_id == "plain-p"]
    assert len(prefills) == read
    # The decodes read what the prefill computed, too.
    assert len(leases) > len(prefills)
    assert (await books.stats(readers))["nixl_reads"] - before == len(leases)
