"""A thousand turns of random conversations; every token is that of a run without reuse."""

import json
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from kvplane.lease.values import LeaseState

from fleet.books import Books, nothing_of
from fleet.client import Client
from fleet.cluster import NARROW, PLAIN, TOY, logs
from fleet.oracle import Oracle
from fleet.talk import Talk, Tally, now

pytestmark = [pytest.mark.processes, pytest.mark.timeout(600)]

SEED = 20_261
REQUESTS = 1000


async def test_all_tokens_equal_the_run_without_reuse_and_the_records_agree(
    client_of: Callable[[str], Client],
    books: Books,
    capsys: pytest.CaptureFixture[str],
) -> None:
    prefills = books.fleet.names(role="prefill", managed=True)
    decodes = books.fleet.names(role="decode", managed=True)
    # What a decode got no lease for in time, on a busy machine, its prefill holds to the end.
    books.allowed |= {(name, "kv_expired") for name in prefills}
    before = [await books.stats(prefills), await books.stats(decodes)]
    leases_before = {lease.lease_id for lease in await books.leases()}
    began = now()
    clients = [client_of(name) for name in books.tenants]
    tally = await Talk(clients, SEED, REQUESTS).run(side_by_side=5)
    seconds = now() - began
    await nothing_of(books.unfinished, 30)

    reads, decoded = await books.stats(prefills), await books.stats(decodes)
    reads.subtract(before[0])
    decoded.subtract(before[1])
    new = [lease for lease in await books.leases() if lease.lease_id not in leases_before]
    report = _report(tally, reads, decoded, new, seconds)
    with capsys.disabled():
        print("\n" + json.dumps(report, indent=2))
    logs().mkdir(parents=True, exist_ok=True)
    (logs() / "thousand-turns.json").write_text(json.dumps(report, indent=2))

    assert len(tally.sample) > REQUESTS / 100
    for body in tally.sample:
        await computed_alone(books, body)
    assert tally.requests >= REQUESTS
    # Two turns out of five that go on where they stopped, at least; in fact nearly all.
    assert tally.appended > REQUESTS / 5
    assert tally.appended_reused > 0.4 * tally.appended
    assert tally.reused[PLAIN] > 0
    # What prefills read under leases is what lease records say, and what clients saw but for
    # those who left.
    consumed = [
        lease
        for lease in new
        if lease.holder_worker_id in prefills and lease.state == LeaseState.CONSUMED
    ]
    seen = tally.reused[TOY] + tally.reused[NARROW]
    assert len(consumed) == reads["nixl_reads"] + reads["reads_abandoned"]
    assert seen <= reads["nixl_reads"] <= seen + tally.left
    assert reads["external_hits"] >= tally.reused_tokens[TOY] + tally.reused_tokens[NARROW]
    assert reads["kv_expired"] <= decoded["reads_denied"]
    by_session = Counter(lease.session_id for lease in new if lease.state == LeaseState.CONSUMED)
    assert not tally.by_session - by_session


async def computed_alone(books: Books, body: dict[str, Any]) -> None:
    """The oracle says what an engine says that reads nothing from anyone."""
    path = "chat/completions" if "messages" in body else "completions"
    url = f"{books.fleet.url(books.fleet.names(body['model'], 'decode')[0])}/v1/{path}"
    asked = {**body, "stream": False, "stream_options": None, "return_token_ids": True}
    async with books.http.post(url, json=asked) as answer:
        found = await answer.json()
    assert found["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert found["choices"][0]["token_ids"] == Oracle(body["model"]).answer(body)


def _report(
    tally: Tally,
    reads: Counter[str],
    decoded: Counter[str],
    leases: list[Any],
    seconds: float,
) -> dict[str, Any]:
    return {
        "seconds": round(seconds, 1),
        "requests": tally.requests,
        "moves": dict(tally.moves),
        "clients_that_left": tally.left,
        "turns_by_decision": dict(tally.reasons),
        "turns_that_read": dict(tally.reused),
        "tokens_read": dict(tally.reused_tokens),
        "prompt_tokens": dict(tally.prompt_tokens),
        "appended_turns": tally.appended,
        "appended_turns_that_read": tally.appended_reused,
        "reads_by_prefills": reads["nixl_reads"],
        "reads_dropped": reads["reads_dropped"],
        "reads_refused": reads["reads_refused"],
        "reads_abandoned": reads["reads_abandoned"],
        "reads_by_decodes": decoded["nixl_reads"],
        "decodes_without_a_lease": decoded["reads_denied"],
        "freed_by_order": reads["freed_by_order"] + decoded["freed_by_order"],
        "leases": dict(Counter(LeaseState(lease.state).name.lower() for lease in leases)),
    }
