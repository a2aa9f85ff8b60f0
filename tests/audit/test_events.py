"""Lists and retention of audit events over each database."""

import asyncio

import pytest
from kvplane.api.audit.v1 import audit_pb2 as pb
from kvplane.audit.domain import AuditConfig, Ending, Entry, Outcome
from kvplane.kernel.clock import FakeClock
from kvplane.kernel.errors import InvalidField


def entry(number=0, *, actor="key:op", tenant_id="acme", action="LeaseService/RevokeLease"):
    return Entry(actor, tenant_id, action, f"target-{number}", "", "req")


async def ids(servicer, **request):
    """All pages."""
    found, token = [], ""
    while True:
        answer = await servicer.ListAuditEvents(
            pb.ListAuditEventsRequest(page_token=token, **request)
        )
        found += [event.target for event in answer.events]
        token = answer.next_page_token
        if not token:
            return found


async def test_pages_the_newest_first_without_gaps_while_more_are_written(book):
    log, servicer = book.log(), book.servicer()
    for number in range(5):
        await log.begin(entry(number))
        if isinstance(book.clock, FakeClock) and number % 2:
            book.clock.advance(1)  # so some have the same time
    everything = await ids(servicer)
    assert sorted(everything) == [f"target-{number}" for number in range(5)]
    if not isinstance(book.clock, FakeClock):
        assert everything == sorted(everything, reverse=True)
    for size in (1, 2, 5, 6):
        assert await ids(servicer, page_size=size) == everything
    first = await servicer.ListAuditEvents(pb.ListAuditEventsRequest(page_size=2))
    if isinstance(book.clock, FakeClock):
        book.clock.advance(1)
    await log.begin(entry(9))
    rest = await servicer.ListAuditEvents(
        pb.ListAuditEventsRequest(page_size=5, page_token=first.next_page_token)
    )
    assert [event.target for event in rest.events] == everything[2:]


async def test_filters_fit_together(sqlite):
    log, servicer = sqlite.log(), sqlite.servicer()
    times = []
    for number, (actor, tenant_id, action) in enumerate(
        [
            ("key:op", "acme", "LeaseService/RevokeLease"),
            ("token", "acme", "LeaseService/RevokeLease"),
            ("key:op", "nova", "LeaseService/RevokeLease"),
            ("key:op", "acme", "SessionService/EndSession"),
        ]
    ):
        times.append(sqlite.clock.now_us())
        await log.begin(entry(number, actor=actor, tenant_id=tenant_id, action=action))
        sqlite.clock.advance(1)

    async def numbers(**request):
        return [int(target[-1]) for target in await ids(servicer, **request)]

    def at(index):
        return {"seconds": times[index] // 1_000_000, "nanos": times[index] % 1_000_000 * 1000}

    assert await numbers() == [3, 2, 1, 0]
    assert await numbers(actor="token") == [1]
    assert await numbers(tenant_id="acme") == [3, 1, 0]
    assert await numbers(action="LeaseService/RevokeLease", actor="key:op") == [2, 0]
    assert await numbers(since=at(1), until=at(3)) == [2, 1]
    assert await numbers(tenant_id="acme", until=at(3), page_size=1) == [1, 0]
    assert await numbers(tenant_id="nobody") == []


async def test_an_end_is_written_once(book):
    log, servicer = book.log(), book.servicer()
    event_id = await log.begin(entry())
    await log.finish(event_id, Ending(Outcome.REFUSED, "NOT_FOUND"))
    await log.finish(event_id, Ending(Outcome.DONE, target="another"))
    await log.drop(event_id)
    [event] = (await servicer.ListAuditEvents(pb.ListAuditEventsRequest())).events
    assert (event.outcome, event.reason, event.target) == (
        pb.OUTCOME_REFUSED, "NOT_FOUND", "target-0",
    )  # fmt: skip


BAD = [
    (pb.ListAuditEventsRequest(tenant_id="a b"), "tenant_id"),
    (pb.ListAuditEventsRequest(actor="\0"), "actor"),
    (pb.ListAuditEventsRequest(actor="x" * 257), "actor"),
    (pb.ListAuditEventsRequest(action="x" * 65), "action"),
    (pb.ListAuditEventsRequest(since={"seconds": 2**60}), "since"),
    (pb.ListAuditEventsRequest(until={"nanos": -1}), "until"),
    (pb.ListAuditEventsRequest(since={"seconds": 2}, until={"seconds": 2}), "until"),
    (pb.ListAuditEventsRequest(page_size=-1), "page_size"),
    (pb.ListAuditEventsRequest(page_size=1001), "page_size"),
    (pb.ListAuditEventsRequest(page_token="?"), "page_token"),
    (pb.ListAuditEventsRequest(page_token="\u00e9"), "page_token"),
    (pb.ListAuditEventsRequest(page_token="AAAA" * 100), "page_token"),
    (pb.ListAuditEventsRequest(page_token="MSAA"), "page_token"),  # "1 \0"
    (pb.ListAuditEventsRequest(page_token="LTEgYQ=="), "page_token"),  # "-1 a"
    (pb.ListAuditEventsRequest(page_token="OTk5OTk5OTk5OTk5OTk5OTk5OTkgYQ=="), "page_token"),
]


@pytest.mark.parametrize(("request_", "field"), BAD)
async def test_bad_input_names_the_field(sqlite, request_, field):
    with pytest.raises(InvalidField) as caught:
        await sqlite.servicer().ListAuditEvents(request_)
    assert caught.value.metadata == {"field": field}


async def test_old_events_are_deleted_in_batches_and_young_ones_stay(sqlite, monkeypatch):
    monkeypatch.setattr("kvplane.audit.service._PURGE_BATCH", 2)
    log, servicer = sqlite.log(kept_days=10), sqlite.servicer()
    for number in range(5):
        await log.begin(entry(number))
    sqlite.clock.advance(86_400)
    await log.begin(entry(7))
    sqlite.clock.advance(9 * 86_400)
    assert await log.purge() == 0  # ten days to the microsecond
    sqlite.clock.advance(1e-6)
    assert await log.purge() == 5
    assert await ids(servicer) == ["target-7"]


async def test_replicas_purge_at_once(postgres):
    logs = [postgres.log(kept_days=1) for _ in range(3)]
    await logs[0].begin(entry())
    await asyncio.gather(*(log.purge() for log in logs))
    assert len(await ids(postgres.servicer())) == 1


async def test_the_part_purges_every_hour_and_after_a_failure(sqlite):
    part, log, servicer = sqlite.part(kept_days=1), sqlite.log(), sqlite.servicer()
    await part.start()
    await log.begin(entry())
    sqlite.clock.advance(86_401)
    async with asyncio.timeout(5):
        while await ids(servicer):
            # Each turn is an hour in which the part may sleep.
            sqlite.clock.advance(3600)
            await asyncio.tasks.sleep(0)
    await part.stop()
    await part.stop()


def test_to_keep_nothing_is_not_a_setting():
    with pytest.raises(InvalidField, match="kept_days"):
        AuditConfig(0)
