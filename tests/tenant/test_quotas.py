"""Limits of tenants over each database."""

import asyncio
import math

import pytest
from kvplane.api.tenant.v1 import tenant_pb2 as pb
from kvplane.client.quotas import QuotaBook
from kvplane.kernel.errors import InvalidField, NotFound
from kvplane.kernel.limits import Limits, Quotas
from kvplane.tenant.domain import LIMIT_NAMES
from kvplane.tenant.tables import SOFT, tenant_limits
from sqlalchemy import update


async def change(service, tenant_id="default", soft=None, hard=None):
    quotas = pb.Quotas(soft=pb.Limits(**(soft or {})), hard=pb.Limits(**(hard or {})))
    request = pb.SetQuotasRequest(tenant_id=tenant_id, quotas=quotas)
    return (await service.SetQuotas(request)).quotas


async def now(service, tenant_id="default"):
    return (await service.GetQuotas(pb.GetQuotasRequest(tenant_id=tenant_id))).quotas


async def test_limits_that_are_not_named_stay_and_0_takes_one_away(directory):
    service = directory.replica().servicer
    await service.CreateTenant(pb.CreateTenantRequest(tenant_id="acme"))
    assert await now(service) == pb.Quotas(soft={}, hard={})
    await change(service, soft={"sessions": 5}, hard={"sessions": 10, "requests_per_second": 0.5})
    told = await change(service, hard={"held_tokens": 2**40, "requests_per_second": 0})
    assert told == pb.Quotas(soft={"sessions": 5}, hard={"sessions": 10, "held_tokens": 2**40})
    assert await now(service) == told
    assert await change(service) == told
    assert await now(service, "acme") == pb.Quotas(soft={}, hard={})


async def test_every_limit_is_kept(directory):
    service = directory.replica().servicer
    every = {name: number + 1 for number, name in enumerate(LIMIT_NAMES)}
    soft = {name: value for name, value in every.items() if name != "live_leases"}
    hard = {name: value + 1 for name, value in every.items()}
    await change(service, soft=soft, hard=hard)
    book = QuotaBook(service, directory.clock)
    assert await book.of("default") == Quotas(soft=Limits(**soft), hard=Limits(**hard))


async def test_leases_have_no_soft_limit(directory):
    service = directory.replica().servicer
    with pytest.raises(InvalidField, match="set the hard one") as caught:
        await change(service, soft={"sessions": 5, "live_leases": 1}, hard={"live_leases": 2})
    assert caught.value.metadata == {"field": "quotas.soft.live_leases"}
    assert await now(service) == pb.Quotas(soft={}, hard={})
    # One that was stored when there was such a limit is in nobody's way.
    await change(service, soft={"sessions": 5, "live_leases": 0})
    stored = update(tenant_limits).where(tenant_limits.c.level == SOFT).values(live_leases=50)
    await directory.databases[0].run(lambda tx: tx.connection.execute(stored) and None)
    assert await now(service) == pb.Quotas(soft={"sessions": 5}, hard={})
    told = await change(service, hard={"live_leases": 40})
    assert told == pb.Quotas(soft={"sessions": 5}, hard={"live_leases": 40})


@pytest.mark.parametrize("level", ["soft", "hard"])
@pytest.mark.parametrize(
    ("name", "value"),
    [(name, -1) for name in LIMIT_NAMES]
    + [("sessions", 10**15 + 1), ("tokens_per_second", math.inf), ("tokens_per_second", math.nan)]
    + [("requests_per_second", -math.inf)],
)
async def test_limits_that_are_none_are_refused_by_name(sqlite, level, name, value):
    service = sqlite.replica().servicer
    with pytest.raises(InvalidField) as caught:
        await change(service, **{level: {name: value}})
    assert caught.value.metadata == {"field": f"quotas.{level}.{name}"}
    assert await sqlite.execute("SELECT count(*) FROM tenant_limits") == [(0,)]


async def test_a_soft_limit_beyond_the_hard_one_is_refused(directory):
    service = directory.replica().servicer
    await change(service, hard={"sessions": 10})
    for soft, hard, field in (
        ({"sessions": 11}, {}, "quotas.soft.sessions"),
        ({"held_blocks": 2}, {"held_blocks": 1}, "quotas.soft.held_blocks"),
    ):
        with pytest.raises(InvalidField, match="at most the hard limit") as caught:
            await change(service, soft=soft, hard=hard)
        assert caught.value.metadata == {"field": field}
    await change(service, soft={"sessions": 10})
    with pytest.raises(InvalidField, match="at least the soft limit") as caught:
        await change(service, hard={"sessions": 9})
    assert caught.value.metadata == {"field": "quotas.hard.sessions"}
    await change(service, hard={"sessions": 0})
    assert await now(service) == pb.Quotas(soft={"sessions": 10}, hard={})


async def test_changes_at_once_lose_none(directory):
    services = [directory.replica().servicer for _ in range(2)]
    await services[0].CreateTenant(pb.CreateTenantRequest(tenant_id="acme"))
    await asyncio.gather(
        *(
            change(services[number % 2], "acme", hard={name: number + 1})
            for number, name in enumerate(LIMIT_NAMES)
        )
    )
    found = await now(services[1], "acme")
    assert [getattr(found.hard, name) for name in LIMIT_NAMES] == [1, 2, 3, 4, 5, 6, 7]


async def test_unknown_tenants(directory):
    service = directory.replica().servicer
    for call in (now(service, "nobody"), change(service, "nobody", hard={"sessions": 1})):
        with pytest.raises(NotFound, match="no tenant 'nobody'"):
            await call
