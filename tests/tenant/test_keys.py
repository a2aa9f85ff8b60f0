"""What API keys are good for, and when they end."""

import pytest
from kvplane.api.tenant.v1 import tenant_pb2 as pb
from kvplane.kernel.clock import FakeClock
from kvplane.kernel.errors import NotFound, QuotaExceeded, Unauthenticated
from kvplane.tenant import domain


async def make(service, **fields):
    return await service.CreateApiKey(pb.CreateApiKeyRequest(**fields))


async def resolve(service, secret):
    return await service.ResolveApiKey(pb.ResolveApiKeyRequest(secret=secret))


async def test_a_key_says_what_it_is_good_for(directory):
    service = directory.replica().servicer
    await service.CreateTenant(pb.CreateTenantRequest(tenant_id="acme"))
    tenants_ = await make(service, tenant_id="acme")
    workers = await make(service, role=pb.ROLE_WORKER, worker_id="w1/0")
    operators = await make(service, role=pb.ROLE_OPERATOR)
    for made, tenant_id, role, worker_id in (
        (tenants_, "acme", pb.ROLE_TENANT, ""),
        (workers, "", pb.ROLE_WORKER, "w1/0"),
        (operators, "", pb.ROLE_OPERATOR, ""),
    ):
        answer = await resolve(service, made.secret)
        for message in (answer, made.api_key):
            assert (message.tenant_id, message.role, message.worker_id) == (
                tenant_id, role, worker_id
            )  # fmt: skip
        assert answer.key_id == made.api_key.key_id
        assert not answer.HasField("valid_for")
        assert len(answer.cache_salt) == (32 if tenant_id else 0)
    platform = await service.ListApiKeys(pb.ListApiKeysRequest())
    assert {key.key_id for key in platform.api_keys} == {
        workers.api_key.key_id, operators.api_key.key_id
    }  # fmt: skip
    acme = await service.ListApiKeys(pb.ListApiKeysRequest(tenant_id="acme"))
    assert list(acme.api_keys) == [tenants_.api_key]
    tenants = await service.ListTenants(pb.ListTenantsRequest())
    assert [tenant.tenant_id for tenant in tenants.tenants] == ["acme", "default"]


async def test_a_key_expires_to_the_microsecond(sqlite):
    service = sqlite.replica().servicer
    made = await make(service, tenant_id="default", ttl={"seconds": 90})
    left = made.api_key.expire_time.ToMicroseconds() - made.api_key.create_time.ToMicroseconds()
    assert left == 90_000_000
    sqlite.clock.advance(30)
    assert (await resolve(service, made.secret)).valid_for.ToMicroseconds() == 60_000_000
    sqlite.clock.advance(60 - 1e-6)
    assert (await resolve(service, made.secret)).valid_for.ToMicroseconds() == 1
    sqlite.clock.advance(1e-6)
    with pytest.raises(Unauthenticated):
        await resolve(service, made.secret)


async def test_the_databases_clock_ends_keys(postgres):
    service = postgres.replica().servicer
    made = await make(service, tenant_id="default", ttl={"seconds": 600})
    assert 590 < (await resolve(service, made.secret)).valid_for.seconds <= 600
    await postgres.execute("SELECT 1")
    short = await make(service, tenant_id="default", ttl={"nanos": 1})
    assert short.api_key.HasField("expire_time")
    with pytest.raises(Unauthenticated):
        await resolve(service, short.secret)


async def test_expired_revoked_and_unknown_keys_are_one_to_the_caller(directory):
    service = directory.replica().servicer
    expired = await make(service, tenant_id="default", ttl={"nanos": 1})
    if isinstance(directory.clock, FakeClock):
        directory.clock.advance(1)
    revoked = await make(service, role=pb.ROLE_OPERATOR)
    await service.RevokeApiKey(pb.RevokeApiKeyRequest(key_id=revoked.api_key.key_id))
    told = set()
    for secret in (expired.secret, revoked.secret, domain.new_secret(), "", "x"):
        with pytest.raises(Unauthenticated) as caught:
            await resolve(service, secret)
        told.add((caught.value.message, str(caught.value.metadata), caught.value.retry_after))
    assert len(told) == 1


async def test_every_secret_costs_the_same_queries(sqlite):
    """Counted, not timed: what is asked of the database is all that could differ."""
    part = sqlite.replica()
    made = await make(part.servicer, tenant_id="default")
    ended = await make(part.servicer, role=pb.ROLE_WORKER, worker_id="w")
    await part.servicer.RevokeApiKey(pb.RevokeApiKeyRequest(key_id=ended.api_key.key_id))
    database, asked = sqlite.databases[0], []

    def counted(operation):
        asked[-1] += 1
        return read(operation)

    read, database.read = database.read, counted
    for secret in (made.secret, ended.secret, domain.new_secret(), "short", ""):
        asked.append(0)
        if secret == made.secret:
            await resolve(part.servicer, secret)
        else:
            with pytest.raises(Unauthenticated):
                await resolve(part.servicer, secret)
    assert asked == [1] * 5


async def test_no_more_keys_than_the_limit_and_ended_ones_do_not_count(directory, monkeypatch):
    monkeypatch.setattr(domain, "MAX_LIVE_KEYS", 3)
    monkeypatch.setattr(domain, "MAX_LIVE_PLATFORM_KEYS", 1)
    service = directory.replica().servicer
    made = [await make(service, tenant_id="default") for _ in range(3)]
    with pytest.raises(QuotaExceeded, match="revoke some") as caught:
        await make(service, tenant_id="default")
    assert caught.value.metadata == {"quota": "api_keys"}
    await make(service, role=pb.ROLE_OPERATOR)
    with pytest.raises(QuotaExceeded):
        await make(service, role=pb.ROLE_WORKER, worker_id="w")
    await service.RevokeApiKey(pb.RevokeApiKeyRequest(key_id=made[0].api_key.key_id))
    await make(service, tenant_id="default")
    assert await directory.execute("SELECT count(*) FROM api_keys") == [(5,)]


async def test_lists_of_keys_are_bounded(sqlite, monkeypatch):
    monkeypatch.setattr(domain, "LISTED_ENDED_KEYS", 2)
    service = sqlite.replica().servicer
    ids = []
    for number in range(6):
        made = await make(service, tenant_id="default")
        ids.append(made.api_key.key_id)
        if number < 4:
            await service.RevokeApiKey(pb.RevokeApiKeyRequest(key_id=made.api_key.key_id))
        sqlite.clock.advance(1)
    listed = await service.ListApiKeys(pb.ListApiKeysRequest(tenant_id="default"))
    assert [key.key_id for key in listed.api_keys] == ids[2:]


async def test_each_tenant_has_a_salt_of_its_own_that_only_gateways_see(directory):
    service = directory.replica().servicer
    await service.CreateTenant(pb.CreateTenantRequest(tenant_id="acme"))
    acme, default = [await make(service, tenant_id=name) for name in ("acme", "default")]

    async def salts():
        return [(await resolve(service, key.secret)).cache_salt for key in (acme, default)]

    before = await salts()
    assert len(set(before)) == 2
    assert all(int(salt, 16) for salt in before)
    rotated = await service.RotateCacheSalt(pb.RotateCacheSaltRequest(tenant_id="acme"))
    after = await salts()
    assert after[0] != before[0]
    assert after[1] == before[1]
    shown = await service.GetTenant(pb.GetTenantRequest(tenant_id="acme"))
    assert shown.tenant == rotated.tenant
    assert not any(salt in str(shown) + str(rotated) for salt in before + after)
    with pytest.raises(NotFound):
        await service.RotateCacheSalt(pb.RotateCacheSaltRequest(tenant_id="nobody"))
    # Nor in a log that prints values.
    assert after[0] not in repr(await directory.replica().service.get("acme"))
