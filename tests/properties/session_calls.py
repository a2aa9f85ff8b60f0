"""Calls of the session store, as values and drawn at random.

Whatever is drawn must not depend on how a race ended, so a session, or a task, is drawn
as a number, which `Known` turns into one that exists.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from hypothesis import strategies as st
from kvplane.kernel.limits import NO_QUOTAS
from kvplane.session.domain import (
    BeginTurn,
    CompleteTurn,
    SessionFilter,
    SessionRef,
    SessionState,
    TurnOutcome,
)
from kvplane.session.store import FreeTask, NewTurn
from kvplane.session.usage import Completed

Store = Any
TENANTS = ["t1", "t2"]


@dataclass(frozen=True)
class Begin:
    tenant: str
    wishes: list[tuple[BeginTurn, str]]

    async def on(self, store: Store) -> Any:
        turns = [NewTurn(*wish) for wish in self.wishes]
        return await store.begin_turns(self.tenant, turns, NO_QUOTAS)


@dataclass(frozen=True)
class Complete:
    tenant: str
    reports: list[CompleteTurn]

    async def on(self, store: Store) -> Any:
        answers = await store.complete_turns(self.tenant, self.reports, NO_QUOTAS)
        return [a.session if isinstance(a, Completed) else a for a in answers]


@dataclass(frozen=True)
class Create:
    tenant: str
    name: str
    model: str
    new_id: str

    async def on(self, store: Store) -> Any:
        return await store.create(self.tenant, self.name, self.model, self.new_id, NO_QUOTAS)


@dataclass(frozen=True)
class Get:
    tenant: str
    ref: SessionRef

    async def on(self, store: Store) -> Any:
        return await store.get(self.tenant, self.ref)


@dataclass(frozen=True)
class End:
    tenant: str
    ref: SessionRef

    async def on(self, store: Store) -> Any:
        return await store.end(self.tenant, self.ref)


@dataclass(frozen=True)
class ListSessions:
    tenant: str
    which: SessionFilter
    after: tuple[int, str] | None
    limit: int

    async def on(self, store: Store) -> Any:
        return await store.list_sessions(self.tenant, self.which, self.after, self.limit)


@dataclass(frozen=True)
class Changes:
    tenant: str
    after: tuple[int, str]
    limit: int

    async def on(self, store: Store) -> Any:
        return await store.changes(self.tenant, self.after, self.limit)


@dataclass(frozen=True)
class Freed:
    task: FreeTask

    async def on(self, store: Store) -> Any:
        await store.freed(self.task)


@dataclass(frozen=True)
class ExpireIdle:
    limit: int

    async def on(self, store: Store) -> Any:
        return await store.expire_idle(self.limit)


@dataclass(frozen=True)
class ClaimFrees:
    limit: int

    async def on(self, store: Store) -> Any:
        return await store.claim_frees(self.limit)


@dataclass(frozen=True)
class ForgetEnded:
    limit: int

    async def on(self, store: Store) -> Any:
        return await store.forget_ended(self.limit)


@dataclass
class Known:
    """What calls can be about."""

    # Of sessions that were made, with the times when.
    sessions: list[tuple[int, str]] = field(default_factory=list)
    tasks: list[FreeTask] = field(default_factory=list)
    made: int = 0

    def session(self, number: int) -> tuple[int, str]:
        return self.sessions[-1 - number % len(self.sessions)] if self.sessions else (0, "nobody")

    def new_id(self) -> str:
        self.made += 1
        return f"s{self.made}"

    def learn(self, answer: Any) -> None:
        """Remember tasks."""
        if isinstance(answer, list):
            self.tasks += [item for item in answer if isinstance(item, FreeTask)]


# A call once it is known what there is.
Drawn = Callable[[Known], Any]

tenants = st.sampled_from(["t1", "t1", "t1", "t2"])
names = st.sampled_from(["n1", "n2"])
models = st.sampled_from(["m", "m", "m", "other"])
digests = st.sampled_from([letter * 16 for letter in (b"a", b"b", b"c")])
workers = st.sampled_from(["", "w1", "w2"])
numbers = st.integers(0, 4)
limits = st.sampled_from([1, 2, 100])
requests = st.builds(
    BeginTurn,
    request_id=st.integers(1, 9).map("r{}".format),
    model=models,
    name=st.one_of(st.just(""), names),
    history=st.lists(digests, max_size=3, unique=True).map(tuple),
)


@st.composite
def begins(draw: st.DrawFn) -> Drawn:
    tenant, wishes = draw(tenants), draw(st.lists(requests, min_size=1, max_size=3))

    def resolve(known: Known) -> Begin:
        # As the service does it: without a name, the same request makes the same session.
        return Begin(
            tenant,
            [(w, known.new_id() if w.name else f"s-{tenant}-{w.request_id}") for w in wishes],
        )

    return resolve


@st.composite
def completes(draw: st.DrawFn) -> Drawn:
    outcome = st.sampled_from([TurnOutcome.OK, TurnOutcome.OK, TurnOutcome.FAILED])
    tenant = draw(tenants)
    wanted = draw(st.lists(st.tuples(numbers, st.integers(1, 3)), min_size=1, max_size=3))
    reports = [
        CompleteTurn(
            "",
            turn,
            draw(outcome),
            prompt_tokens=draw(st.sampled_from([10, 20])),
            completion_tokens=5,
            tokens_reused=draw(st.sampled_from([0, 10])),
            history_digest=draw(st.one_of(digests, st.just(b""))),
            prefill_worker_id=draw(workers),
            decode_worker_id=draw(workers),
            time_to_first_token_us=7,
        )
        for _, turn in wanted
    ]

    def resolve(known: Known) -> Complete:
        return Complete(
            tenant,
            [
                replace(report, session_id=known.session(number)[1])
                for report, (number, _) in zip(reports, wanted, strict=True)
            ],
        )

    return resolve


@st.composite
def creates(draw: st.DrawFn) -> Drawn:
    tenant, name, model = draw(tenants), draw(names), draw(models)
    return lambda known: Create(tenant, name, model, known.new_id())


@st.composite
def referring(draw: st.DrawFn, kind: type[Get] | type[End]) -> Drawn:
    tenant, name, number = draw(tenants), draw(st.one_of(st.just(""), names)), draw(numbers)
    return lambda known: kind(
        tenant, SessionRef(name=name) if name else SessionRef(known.session(number)[1])
    )


@st.composite
def lists(draw: st.DrawFn) -> Drawn:
    states = draw(st.lists(st.sampled_from(list(SessionState)), max_size=2, unique=True))
    which = SessionFilter(tuple(states), draw(st.sampled_from(["", "", "other"])), draw(workers))
    tenant, number, limit = draw(tenants), draw(st.one_of(st.none(), numbers)), draw(limits)
    return lambda known: ListSessions(
        tenant, which, None if number is None else known.session(number), limit
    )


@st.composite
def changes(draw: st.DrawFn) -> Drawn:
    tenant, number, limit = draw(tenants), draw(numbers), draw(limits)
    return lambda known: Changes(tenant, known.session(number), limit)


@st.composite
def freed(draw: st.DrawFn) -> Drawn:
    number = draw(numbers)
    nothing = FreeTask("t1", "nobody", 1)
    return lambda known: Freed(
        known.tasks[-1 - number % len(known.tasks)] if known.tasks else nothing
    )


def sweeping(kind: type[ExpireIdle] | type[ClaimFrees] | type[ForgetEnded]) -> st.SearchStrategy:
    return limits.map(lambda limit: lambda known: kind(limit))


# Something to be about.
beginnings = st.lists(st.one_of(begins(), completes()), min_size=1, max_size=4)
anything = st.one_of(
    begins(), begins(), begins(), completes(), completes(), creates(), referring(Get),
    referring(End), lists(), changes(), freed(), sweeping(ExpireIdle), sweeping(ClaimFrees),
    sweeping(ForgetEnded),
)  # fmt: skip
