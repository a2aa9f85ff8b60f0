"""Tenants and API keys over each database."""

import asyncio

import pytest
from kvplane.api.tenant.v1 import tenant_pb2 as pb
from kvplane.db.database import Database
from kvplane.kernel.clock import FakeClock
from kvplane.kernel.errors import (
    AlreadyExists,
    InvalidField,
    KvplaneError,
    NotFound,
    Unauthenticated,
)
from kvplane.tenant import domain
from kvplane.tenant.main import build


async def new_key(service, tenant_id="default"):
    return await service.CreateApiKey(pb.CreateApiKeyRequest(tenant_id=tenant_id))


async def resolve(service, secret):
    return (await service.ResolveApiKey(pb.ResolveApiKeyRequest(secret=secret))).tenant_id


async def test_the_default_tenant_exists_from_the_start(directory):
    part = directory.replica()
    await part.start()
    assert await directory.execute("SELECT tenant_id FROM tenants") == [("default",)]
    await part.start()
    # Nor does it take a start.
    other = directory.replica().servicer
    found = await other.GetTenant(pb.GetTenantRequest(tenant_id="default"))
    assert found.tenant.display_name == "Default"
    with pytest.raises(AlreadyExists):
        await other.CreateTenant(pb.CreateTenantRequest(tenant_id="default"))


async def test_a_start_without_the_database_is_made_good_later(tmp_path):
    database = Database(f"sqlite:///{tmp_path}", FakeClock())  # a folder, not a file
    part = build(database, FakeClock())
    await part.start()
    with pytest.raises(KvplaneError):
        await part.servicer.GetTenant(pb.GetTenantRequest(tenant_id="default"))
    await database.close()


async def test_create_and_get(directory):
    service = directory.replica().servicer
    made = await service.CreateTenant(
        pb.CreateTenantRequest(tenant_id="acme.eu-1_x", display_name="Acme \u00e9 \U0001f600")
    )
    assert made.tenant.HasField("create_time")
    found = await service.GetTenant(pb.GetTenantRequest(tenant_id="acme.eu-1_x"))
    assert found.tenant == made.tenant
    with pytest.raises(AlreadyExists):
        await service.CreateTenant(pb.CreateTenantRequest(tenant_id="acme.eu-1_x"))
    with pytest.raises(NotFound):
        await service.GetTenant(pb.GetTenantRequest(tenant_id="Acme.eu-1_x"))


async def test_a_tenant_made_twice_at_once_is_made_once(directory):
    service = directory.replica().servicer
    request = pb.CreateTenantRequest(tenant_id="acme")
    answers = await asyncio.gather(
        *(service.CreateTenant(request) for _ in range(6)), return_exceptions=True
    )
    assert sum(isinstance(answer, AlreadyExists) for answer in answers) == 5


async def test_replicas_starting_together_make_one_default_tenant(postgres):
    parts = [postgres.replica() for _ in range(4)]
    await asyncio.gather(*(part.start() for part in parts))
    assert await postgres.execute("SELECT tenant_id FROM tenants") == [("default",)]


async def test_pages_of_tenants(directory):
    service = directory.replica().servicer
    for number in range(5):
        await service.CreateTenant(pb.CreateTenantRequest(tenant_id=f"t{number}"))
    for size in (1, 2, 3, 6, 7):
        found, token = [], ""
        while True:
            page = await service.ListTenants(
                pb.ListTenantsRequest(page_size=size, page_token=token)
            )
            assert len(page.tenants) <= size
            found += [tenant.tenant_id for tenant in page.tenants]
            token = page.next_page_token
            if not token:
                break
        assert found == ["default", "t0", "t1", "t2", "t3", "t4"]


async def test_a_key_names_its_tenant_until_it_is_revoked(directory):
    service = directory.replica().servicer
    await service.CreateTenant(pb.CreateTenantRequest(tenant_id="acme"))
    acme, default = await new_key(service, "acme"), await new_key(service)
    assert await resolve(service, acme.secret) == "acme"
    assert await resolve(service, default.secret) == "default"
    revoke = pb.RevokeApiKeyRequest(key_id=acme.api_key.key_id)
    revoked = await service.RevokeApiKey(revoke)
    assert revoked.api_key.HasField("revoke_time")
    if isinstance(directory.clock, FakeClock):
        directory.clock.advance(5)
    assert await service.RevokeApiKey(revoke) == revoked
    with pytest.raises(Unauthenticated):
        await resolve(service, acme.secret)
    assert await resolve(service, default.secret) == "default"


async def test_a_key_revoked_at_one_replica_is_void_at_the_other(postgres):
    one, two = postgres.replica().servicer, postgres.replica().servicer
    key = await new_key(one)
    assert await resolve(two, key.secret) == "default"
    await two.RevokeApiKey(pb.RevokeApiKeyRequest(key_id=key.api_key.key_id))
    with pytest.raises(Unauthenticated):
        await resolve(one, key.secret)


async def test_the_secret_is_stored_nowhere(directory):
    service = directory.replica().servicer
    made = await new_key(service)
    assert made.secret.startswith("kvp_")
    assert len(made.secret) == 47
    assert made.api_key.prefix == made.secret[:12]
    [row] = await directory.execute("SELECT * FROM api_keys")
    for value in row:
        raw = value if isinstance(value, bytes) else str(value).encode()
        assert made.secret[12:].encode() not in raw
    listed = await service.ListApiKeys(pb.ListApiKeysRequest(tenant_id="default"))
    assert list(listed.api_keys) == [made.api_key]
    assert made.secret[12:] not in str(listed)


async def test_every_key_that_is_nobodys_gets_the_same_answer(directory):
    service = directory.replica().servicer
    revoked = await new_key(service)
    await service.RevokeApiKey(pb.RevokeApiKeyRequest(key_id=revoked.api_key.key_id))
    live = (await new_key(service)).secret
    wrong = [
        "",
        "kvp_",
        "kvp_" + "x" * 43,
        "x" * 100_000,
        "\0",
        "\u00e9",
        revoked.secret,
        live[:-1],
        live + " ",
        live.upper(),
        live.removeprefix("kvp_"),
        revoked.api_key.key_id,
    ]
    told = set()
    for secret in wrong:
        with pytest.raises(Unauthenticated) as caught:
            await resolve(service, secret)
        told.add((caught.value.message, tuple(caught.value.metadata)))
    assert len(told) == 1
    assert await resolve(service, live) == "default"


async def test_keys_are_listed_for_their_tenant_oldest_first(sqlite):
    service = sqlite.replica().servicer
    await service.CreateTenant(pb.CreateTenantRequest(tenant_id="acme"))
    made = []
    for _ in range(3):
        made.append((await new_key(service, "acme")).api_key)
        sqlite.clock.advance(1)
    await new_key(service)
    listed = await service.ListApiKeys(pb.ListApiKeysRequest(tenant_id="acme"))
    assert list(listed.api_keys) == made


async def test_keys_of_unknown_tenants_and_unknown_keys(directory):
    service = directory.replica().servicer
    with pytest.raises(NotFound, match="no tenant"):
        await new_key(service, "nobody")
    with pytest.raises(NotFound, match="no tenant"):
        await service.ListApiKeys(pb.ListApiKeysRequest(tenant_id="nobody"))
    with pytest.raises(NotFound, match="no tenant"):
        await new_key(service, "nobody")
    with pytest.raises(NotFound, match="no API key"):
        await service.RevokeApiKey(pb.RevokeApiKeyRequest(key_id="key-unknown"))
    assert await directory.execute("SELECT count(*) FROM api_keys") == [(0,)]


BAD = [
    ("CreateTenant", pb.CreateTenantRequest(), "tenant_id"),
    ("CreateTenant", pb.CreateTenantRequest(tenant_id="x" * 65), "tenant_id"),
    ("CreateTenant", pb.CreateTenantRequest(tenant_id="a/b"), "tenant_id"),
    ("CreateTenant", pb.CreateTenantRequest(tenant_id="a:b"), "tenant_id"),
    ("CreateTenant", pb.CreateTenantRequest(tenant_id="a\n"), "tenant_id"),
    ("CreateTenant", pb.CreateTenantRequest(tenant_id="-a"), "tenant_id"),
    (
        "CreateTenant",
        pb.CreateTenantRequest(tenant_id="a", display_name="x" * 257),
        "display_name",
    ),
    ("CreateTenant", pb.CreateTenantRequest(tenant_id="a", display_name="\0"), "display_name"),
    ("GetTenant", pb.GetTenantRequest(), "tenant_id"),
    ("ListTenants", pb.ListTenantsRequest(page_size=-1), "page_size"),
    ("ListTenants", pb.ListTenantsRequest(page_size=1001), "page_size"),
    ("ListTenants", pb.ListTenantsRequest(page_token="no token"), "page_token"),
    ("ListTenants", pb.ListTenantsRequest(page_token="\u00e9"), "page_token"),
    ("CreateApiKey", pb.CreateApiKeyRequest(), "tenant_id"),
    ("ListApiKeys", pb.ListApiKeysRequest(tenant_id=" "), "tenant_id"),
    ("CreateApiKey", pb.CreateApiKeyRequest(role=pb.ROLE_TENANT), "tenant_id"),
    (
        "CreateApiKey",
        pb.CreateApiKeyRequest(tenant_id="default", role=pb.ROLE_WORKER, worker_id="w"),
        "tenant_id",
    ),
    (
        "CreateApiKey",
        pb.CreateApiKeyRequest(tenant_id="default", role=pb.ROLE_OPERATOR),
        "tenant_id",
    ),
    ("CreateApiKey", pb.CreateApiKeyRequest(role=pb.ROLE_WORKER), "worker_id"),
    ("CreateApiKey", pb.CreateApiKeyRequest(role=pb.ROLE_WORKER, worker_id="\0"), "worker_id"),
    ("CreateApiKey", pb.CreateApiKeyRequest(role=pb.ROLE_OPERATOR, worker_id="w"), "worker_id"),
    ("CreateApiKey", pb.CreateApiKeyRequest(tenant_id="default", worker_id="w"), "worker_id"),
    ("CreateApiKey", pb.CreateApiKeyRequest(tenant_id="default", role=99), "role"),
    ("CreateApiKey", pb.CreateApiKeyRequest(tenant_id="default", ttl={"seconds": -1}), "ttl"),
    ("CreateApiKey", pb.CreateApiKeyRequest(tenant_id="default", ttl={}), "ttl"),
    ("CreateApiKey", pb.CreateApiKeyRequest(tenant_id="default", ttl={"nanos": -1}), "ttl"),
    ("CreateApiKey", pb.CreateApiKeyRequest(tenant_id="default", ttl={"seconds": 2**62}), "ttl"),
    ("GetQuotas", pb.GetQuotasRequest(), "tenant_id"),
    ("SetQuotas", pb.SetQuotasRequest(tenant_id="a b"), "tenant_id"),
    ("RotateCacheSalt", pb.RotateCacheSaltRequest(), "tenant_id"),
    ("RevokeApiKey", pb.RevokeApiKeyRequest(), "key_id"),
    ("RevokeApiKey", pb.RevokeApiKeyRequest(key_id="a b"), "key_id"),
]


@pytest.mark.parametrize(
    ("method", "request_", "field"), BAD, ids=[f"{m}-{f}-{i}" for i, (m, _, f) in enumerate(BAD)]
)
async def test_bad_input_names_the_field_and_stores_nothing(sqlite, method, request_, field):
    service = sqlite.replica().servicer
    with pytest.raises(InvalidField) as caught:
        await getattr(service, method)(request_)
    assert caught.value.metadata == {"field": field}
    assert await sqlite.execute("SELECT tenant_id FROM tenants WHERE tenant_id <> 'default'") == []
    assert await sqlite.execute("SELECT count(*) FROM api_keys") == [(0,)]


def test_secrets_differ_and_so_do_their_hashes():
    secrets = {domain.new_secret() for _ in range(100)}
    assert len(secrets) == 100
    assert len({domain.secret_hash(secret) for secret in secrets}) == 100
