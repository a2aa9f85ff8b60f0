"""Two tenants who share nothing, all that they have, and credentials of every sort."""

import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from kvplane.api.tenant.v1 import tenant_pb2 as tenant
from wire.seed import RIGHT, Seed, sow

from fuzz.databases import Kind
from fuzz.markers import Markers, values_of
from fuzz.pool import Pool
from fuzz.world import TOKEN, Metadata, World, running


@dataclass(frozen=True)
class Credential:
    """Who calls, and whose secrets it must never see."""

    name: str
    metadata: Metadata
    # The seeds' tenants; of another one it may see nothing.
    foreign: tuple[str, ...] = ()


@dataclass
class Garden:
    """What `plant` has made: a database to be copied, and all that is known of it."""

    kind: Kind
    seeds: dict[str, Seed] = field(default_factory=dict)
    credentials: list[Credential] = field(default_factory=list)
    pool: Pool = field(default_factory=Pool)
    markers: dict[str, Markers] = field(default_factory=dict)
    right: dict[str, dict[str, Message]] = field(default_factory=dict)


async def plant(kind: Kind) -> Garden:
    """Make two tenants, all that they have, and credentials of every sort."""
    garden = Garden(kind)
    url = await kind.empty()
    known: dict[str, set[bytes | int]] = {"": set()}
    async with running(kind, url) as world:
        for name in ("ours", "theirs"):
            tag = secrets.token_hex(6)
            seed = await sow(world, tag, f"tenant-{tag}")  # type: ignore[arg-type]
            garden.seeds[name] = seed
            heard, world.heard = world.heard, []
            known[name] = set()
            for called, _, request, answer in heard:
                # Workers, and what they are, are everybody's.
                whose = "" if called.startswith("WorkerService/") else name
                for message in (request, answer):
                    garden.pool.add(message)
                    known[whose].update(values_of(message))
            known[name].add(seed.tenant.encode())
            garden.credentials += await _keys(world, name, seed)
        garden.credentials += _others(garden)
        assert await world.watch.broken() == []
    await kind.keep(url)
    everybody = known[""] | (known["ours"] & known["theirs"])
    garden.markers = {name: Markers(known[name] - everybody) for name in garden.seeds}
    for name, right in RIGHT.items():
        garden.right[name] = {whose: right(seed) for whose, seed in garden.seeds.items()}
        for request in garden.right[name].values():
            garden.pool.add(request)
    return garden


async def _keys(world: World, name: str, seed: Seed) -> list[Credential]:
    """Return keys of a tenant: good, expired, revoked; and of the roles that are no tenant's."""
    other = "theirs" if name == "ours" else "ours"

    async def made(what: str, foreign: tuple[str, ...], **request: Any) -> Credential:
        wanted = tenant.CreateApiKeyRequest(**request)
        answer = await world.call("TenantService/CreateApiKey", wanted)
        if what == "revoked key":
            await world.call(
                "TenantService/RevokeApiKey",
                tenant.RevokeApiKeyRequest(key_id=answer.api_key.key_id),
            )
        return Credential(
            f"{name}: {what}", (("authorization", f"Bearer {answer.secret}"),), foreign
        )

    ours, nobodys = (other,), ("ours", "theirs")
    return [
        await made("key", ours, tenant_id=seed.tenant),
        await made("expired key", nobodys, tenant_id=seed.tenant, ttl=Duration(seconds=1)),
        await made("revoked key", nobodys, tenant_id=seed.tenant),
        await made("worker's key", (), role=tenant.ROLE_WORKER, worker_id=seed.decode),
        await made("operator's key", (), role=tenant.ROLE_OPERATOR),
    ]


def _others(garden: Garden) -> list[Credential]:
    """Return the internal token for each tenant, and what is no credential."""
    token = ("authorization", f"Bearer {TOKEN}")
    nobodys = tuple(garden.seeds)
    return [
        *(
            Credential(f"{name}: token", (token, ("x-kvplane-tenant", seed.tenant)))
            for name, seed in garden.seeds.items()
        ),
        Credential("nobody", (), nobodys),
        Credential("a wrong key", (("authorization", "Bearer kvp_wrong"),), nobodys),
        Credential("no key", (("authorization", "Basic x"),), nobodys),
    ]


@asynccontextmanager
async def copied(garden: Garden) -> AsyncIterator[World]:
    """Run the plane over a fresh copy of what was planted, two seconds later."""
    url = await garden.kind.copy()
    try:
        async with running(garden.kind, url) as world:
            world.clock.advance(2)
            yield world
    finally:
        await garden.kind.drop(url)
