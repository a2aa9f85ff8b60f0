"""What tenants use is counted once, whoever counts it."""

import asyncio

from kvplane.api.session.v1 import session_pb2 as pb
from kvplane.kernel.limits import Limits, Quotas
from kvplane.session import metrics
from kvplane.session.usage import Usage
from prometheus_client import REGISTRY
from session.session_requests import CANCELLED, begin, complete, tenant


async def usage(part) -> pb.GetUsageResponse:
    return await part.servicer.GetUsage(pb.GetUsageRequest())


async def test_usage_is_what_the_completed_turns_of_the_tenant_used(registry):
    one, two = registry.replica(), registry.replica()
    assert await usage(one) == pb.GetUsageResponse(tenant_id="default")
    first = await one.servicer.BeginTurn(begin("r1", "s1"))
    second = await two.servicer.BeginTurn(begin("r2", "s2"))
    await one.servicer.BeginTurn(begin("r3", "s2"))
    report = complete(first, prompt_tokens=100, completion_tokens=7, tokens_reused=60)
    for part in (one, two, one):
        await part.servicer.CompleteTurn(report)
    await two.servicer.CompleteTurn(complete(second, CANCELLED, prompt_tokens=30))
    expected = pb.GetUsageResponse(
        active_sessions=2,
        turns=2,
        prompt_tokens=130,
        completion_tokens=7,
        tokens_reused=60,
        tokens_recomputed=70,
        tenant_id="default",
    )
    assert await usage(one) == expected
    assert await usage(two) == expected
    await one.servicer.EndSession(pb.EndSessionRequest(name="s1"))
    assert (await usage(two)).active_sessions == 1
    with tenant("other"):
        assert await usage(one) == pb.GetUsageResponse(tenant_id="other")


async def test_many_at_once_at_all_replicas_are_all_counted(registry):
    """Also: tenants with limits, at once and crosswise, do not stop one another."""
    registry.quotas[""] = Quotas(hard=Limits(requests_per_second=1000, tokens_per_second=1e6))
    parts = [registry.replica(), registry.replica()]
    tenants = [f"t{i}" for i in range(4)]

    async def turns(name: str, number: int) -> None:
        with tenant(name):
            for i in range(3):
                part = parts[(number + i) % 2]
                begun = await part.servicer.BeginTurn(begin(f"r{number}-{i}", f"s{number}"))
                report = complete(begun, prompt_tokens=10, completion_tokens=1)
                await parts[i % 2].servicer.CompleteTurn(report)

    calls = [turns(name, number) for number in range(4) for name in tenants]
    async with asyncio.timeout(20):
        await asyncio.gather(*(asyncio.create_task(call) for call in calls))
    for name in tenants:
        with tenant(name):
            used = await usage(parts[0])
            assert (used.turns, used.prompt_tokens, used.completion_tokens) == (12, 120, 12)


def sample(name: str, **labels: str) -> float:
    return REGISTRY.get_sample_value(name, labels) or 0.0


async def test_metrics_count_each_turn_once(sqlite):
    part = sqlite.replica()
    with tenant("measured"):
        begun = await part.servicer.BeginTurn(begin("r", "s"))
        report = complete(begun, prompt_tokens=100, completion_tokens=7, tokens_reused=60)
        for _ in range(2):
            await part.servicer.CompleteTurn(report)
    assert sample("kvplane_tenant_turns_total", tenant="measured") == 1
    kinds = {"prompt": 100, "completion": 7, "reused": 60, "recomputed": 40}
    for kind, tokens in kinds.items():
        assert sample("kvplane_tenant_tokens_total", tenant="measured", kind=kind) == tokens


def test_tenants_beyond_the_first_count_together(monkeypatch):
    monkeypatch.setattr(metrics, "_cells", {})
    for i in range(metrics.MAX_TENANTS + 5):
        metrics.count_turn(f"bounded-{i}", Usage(turns=1))
    assert sample("kvplane_tenant_turns_total", tenant="other") == 5
    last = f"bounded-{metrics.MAX_TENANTS - 1}"
    assert sample("kvplane_tenant_turns_total", tenant=last) == 1
    assert not sample("kvplane_tenant_turns_total", tenant=f"bounded-{metrics.MAX_TENANTS}")
