"""Calls of the session store for tenants with limits, as values and drawn at random.

Rates, counts and times are such that all sums are exact.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from hypothesis import strategies as st
from kvplane.kernel.limits import NO_QUOTAS, Limits, Quotas
from kvplane.session.domain import BeginTurn, CompleteTurn, TurnOutcome
from kvplane.session.quota import Ask
from kvplane.session.store import NewTurn
from properties import session_calls as calls
from properties.machine import replica_numbers
from properties.replicas import Rows
from properties.session_calls import TENANTS, Store, tenants


@dataclass(frozen=True)
class LimitedBegin(calls.Begin):
    quotas: Quotas

    async def on(self, store: Store) -> Any:
        turns = [NewTurn(*wish) for wish in self.wishes]
        return await store.begin_turns(self.tenant, turns, self.quotas)


@dataclass(frozen=True)
class LimitedCreate(calls.Create):
    quotas: Quotas

    async def on(self, store: Store) -> Any:
        return await store.create(self.tenant, self.name, self.model, self.new_id, self.quotas)


@dataclass(frozen=True)
class CompleteAny:
    """Of turns with and without a session."""

    tenant: str
    reports: list[CompleteTurn]
    quotas: Quotas

    async def on(self, store: Store) -> Any:
        return await store.complete_turns(self.tenant, self.reports, self.quotas)


@dataclass(frozen=True)
class ReadUsage:
    tenant: str

    async def on(self, store: Store) -> Any:
        return await store.usage(self.tenant)


@dataclass
class KnownTurns(calls.Known):
    """What calls can be about."""

    quotas: dict[str, Quotas] = field(default_factory=lambda: dict.fromkeys(TENANTS, NO_QUOTAS))
    # By tenant: of turns with a session it and the number, of others the request's id.
    turns: Mapping[str, list[CompleteTurn]] = field(default_factory=dict)

    def look(self, rows: Rows) -> None:
        """Take note of what is stored: what is open comes last, the newest at the end."""
        found = sorted(
            (
                row.get("outcome") == TurnOutcome.OPEN or row.get("completed") == 0,
                row["open_us"],
                row["request_id"],
                row["tenant_id"],
                row.get("session_id", ""),
                row.get("turn", 0),
            )
            for row in [*rows["turns"], *rows["unheld_turns"]]
        )
        self.turns = {
            tenant: [
                CompleteTurn(session, turn, TurnOutcome.OK, request_id="" if session else request)
                for _, _, request, whose, session, turn in found
                if whose == tenant
            ]
            for tenant in TENANTS
        }


rates = st.sampled_from([0, 0, 0.25, 0.5, 1])
limits = st.builds(
    Limits,
    sessions=st.sampled_from([0, 0, 1, 2, 3]),
    requests_per_second=rates.map(lambda rate: rate / 8),
    tokens_per_second=rates.map(lambda rate: rate * 16),
    request_bytes=st.sampled_from([0, 0, 0, 15]),
)
quotas = st.builds(Quotas, soft=limits, hard=st.one_of(st.just(Limits()), limits, limits))
tokens = st.sampled_from([0, 5, 40, 79, 80, 81, 200])
wishes = st.builds(
    BeginTurn,
    request_id=st.integers(1, 25).map("r{}".format),
    model=st.just("m"),
    name=st.sampled_from(["", "n1", "n1", "n2", "n3", "n4"]),
    ask=st.builds(Ask, tokens=tokens, size_bytes=st.sampled_from([10, 10, 10, 20])),
)


@st.composite
def begins(draw: st.DrawFn, most: int = 3) -> calls.Drawn:
    tenant, wanted = draw(tenants), draw(st.lists(wishes, min_size=1, max_size=most))

    def resolve(known: KnownTurns) -> LimitedBegin:
        # As the service does it: without a name, the same request makes the same session.
        made = [(w, known.new_id() if w.name else f"s-{tenant}-{w.request_id}") for w in wanted]
        return LimitedBegin(tenant, made, known.quotas[tenant])

    return resolve


@st.composite
def creates(draw: st.DrawFn) -> calls.Drawn:
    tenant, name = draw(tenants), draw(st.sampled_from(["n1", "n5", "n6"]))
    return lambda known: LimitedCreate(tenant, name, "m", known.new_id(), known.quotas[tenant])


@st.composite
def completes(draw: st.DrawFn, most: int = 3) -> calls.Drawn:
    tenant, outcomes = draw(tenants), st.sampled_from([TurnOutcome.OK] * 3 + [TurnOutcome.FAILED])
    wanted = draw(
        st.lists(st.tuples(st.integers(0, 5), outcomes, tokens), min_size=1, max_size=most)
    )
    stranger = draw(st.integers(0, 15)) == 15

    def resolve(known: KnownTurns) -> CompleteAny:
        other = TENANTS[1 - TENANTS.index(tenant)]
        there = known.turns.get(other if stranger else tenant, [])
        return CompleteAny(
            tenant,
            [
                replace(
                    there[-1 - place] if place < len(there) else CompleteTurn("none", 1, outcome),
                    outcome=outcome,
                    prompt_tokens=used - used // 4,
                    completion_tokens=used // 4,
                    tokens_reused=used // 2,
                )
                for place, outcome, used in wanted
            ],
            known.quotas[tenant],
        )

    return resolve


ends = calls.referring(calls.End)
usages = tenants.map(lambda tenant: lambda known: ReadUsage(tenant))
forgets = st.just(lambda known: calls.ForgetEnded(100))
expiries = st.just(lambda known: calls.ExpireIdle(100))
groups = st.lists(
    st.tuples(
        st.one_of(begins(1), begins(1), begins(1), creates(), completes(1), ends), replica_numbers
    ),
    min_size=2,
    max_size=4,
)
# What one tenant asks for at once is what can be too much.
bursts = st.tuples(begins(1), begins(1), begins(1)).map(
    lambda some: list(zip(some, (0, 1, 0), strict=True))
)
