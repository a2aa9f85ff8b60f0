"""Calls of the lease store, drawn at random.

Whatever is drawn must not depend on how a race ended, so a lease, or a command, is drawn
as a number, which `Known` turns into one that exists.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from hypothesis import strategies as st
from kvplane.lease.store import GrantOrder, LeaseRef, ReportedItem
from kvplane.lease.values import (
    Handle,
    Holder,
    Lease,
    LeaseState,
    Outcome,
    Ownership,
    OwnershipState,
    Payload,
)
from properties import lease_calls as calls
from properties.lease_state import CommandKey, command_key, micros
from properties.replicas import Rows

FUTURE_US = 1 << 61
# By number: session, turn, and whether it is for a decode.
OWNED = [("s1", 1, False), ("s1", 2, False), ("s1", 3, False), ("s1", 2, True),
         ("s2", 1, False), ("s2", 1, False), ("s2", 2, False), ("", 0, False)]  # fmt: skip


@dataclass
class Known:
    """What calls can be about."""

    now_us: int = 0
    epochs: dict[str, int] = field(default_factory=dict)
    leases: list[Lease] = field(default_factory=list)
    commands: list[tuple[str, str, CommandKey]] = field(default_factory=list)
    orders: list[GrantOrder] = field(default_factory=list)
    streams: dict[str, str] = field(default_factory=dict)
    # Live ownerships with their owners; of those that can be leased, with their sessions.
    live: list[tuple[str, Handle]] = field(default_factory=list)
    held: list[tuple[Handle, str]] = field(default_factory=list)
    made: int = 0

    def new_id(self, prefix: str) -> str:
        self.made += 1
        return f"{prefix}-{self.made:04}"

    def epoch(self, worker: str, off: int) -> int:
        return max(1, self.epochs.get(worker, 1) + off)

    def lease(self, number: int) -> Lease:
        """Return a lease, the newest first, or one that nobody has."""
        if number < len(self.leases):
            return self.leases[-1 - number]
        return Lease("lease-none", "t1", "s1", "own-none", 1, "p1", 1, 0, LeaseState.GRANTED, 0)

    def look(self, rows: Rows) -> None:
        """Take note of what is stored."""
        self.epochs = {row["worker_id"]: row["epoch"] for row in rows["worker_epochs"]}
        owns = sorted(rows["ownerships"], key=lambda row: row["ownership_id"])
        handles = {o["ownership_id"]: Handle(o["engine_id"], o["request_id"]) for o in owns}
        alive = [own for own in owns if own["state"] <= OwnershipState.LEASED]
        self.live = [(own["worker_id"], handles[own["ownership_id"]]) for own in alive]
        self.held = [
            (handles[own["ownership_id"]], own["session_id"])
            for own in alive
            if own["state"] == OwnershipState.HELD
        ]
        names = Lease.__dataclass_fields__
        leases = [Lease(**{n: row[n] for n in names}) for row in rows["leases"]]
        # The open ones come last: they are asked for the most.
        self.leases = sorted(leases, key=lambda one: (not one.ended_us, one.lease_id))
        self.commands = sorted(
            (row["worker_id"], row["command_id"], command_key(row))
            for row in rows["lease_commands"]
        )

    def learn(self, answer: Any) -> None:
        """Nothing is learnt from answers alone."""


Drawn = Callable[[Known], Any]

owners = st.sampled_from(["d1", "d2"])
readers = st.sampled_from(["p1", "p1", "p2", "d1"])
sessions = st.sampled_from(["s1", "s1", "s2"])
tenants = st.sampled_from(["t1", "t1", "t1", "t2"])
numbers = st.integers(0, len(OWNED) - 1)
off_by = st.sampled_from([0] * 12 + [1, -1])
holds = st.sampled_from([480.0, 480.0, 60.0, 20.0, 4.0, 2.0, 0.0])
# Now and then the owner does not say.
reported_holds = st.sampled_from([480.0] * 5 + [60.0, 20.0, 4.0, 2.0, 0.0, None])
# What is rare comes last: the least is what Hypothesis likes best.
odds = st.integers(0, 15)
ttls = st.sampled_from([0.0, 0.0, 1.0, 5.0, 60.0]).map(micros)
places = st.sampled_from([0, 0, 1, 2, 3])
# How long before now it was sent at the latest; None: anchor of the future.
ages = st.sampled_from([None, None, 0.0, 3.0])


@dataclass(frozen=True)
class About:
    """What calls are about."""

    owners: st.SearchStrategy[str] = owners
    numbers: st.SearchStrategy[int] = numbers
    sessions: st.SearchStrategy[str] = sessions
    # Of leases and commands.
    places: st.SearchStrategy[int] = places
    holds: st.SearchStrategy[float | None] = reported_holds

    @property
    def several(self) -> st.SearchStrategy[list[int]]:
        return st.lists(self.numbers, min_size=1, max_size=3)


ANYTHING = About()


def handle(worker: str, number: int) -> Handle:
    return Handle(f"engine-{worker}", f"r{number}")


def sent_by(known: Known, age: float | None) -> int:
    return FUTURE_US if age is None else known.now_us - micros(age)


@st.composite
def reports(draw: st.DrawFn, about: About = ANYTHING) -> Drawn:
    worker, off, age = draw(about.owners), draw(off_by), draw(ages)
    stranger, on_stream = draw(odds), draw(odds)
    items = []
    for number in draw(about.several):
        session, turn, for_decode = OWNED[number]
        # Now and then somebody else's.
        whose = handle("d1" if stranger == 15 else worker, number)
        own = Ownership(
            whose.ownership_id, "t2" if stranger == 14 else "t1", session, turn, worker, 0,
            whose.engine_id, whose.request_id, 40, 16, "c", True, for_decode, 0,
            OwnershipState.HELD, 0,
        )  # fmt: skip
        hold = draw(about.holds)
        hold_us = None if hold is None else micros(hold)
        items.append(ReportedItem(own, Payload(b"params", b"digests"), hold_us))

    def resolve(known: Known) -> calls.Report:
        epoch = known.epoch(worker, off)
        reported = [replace(item, ownership=replace(item.ownership, epoch=epoch)) for item in items]
        stream = {15: "stream-none", 14: known.streams.get(worker)}.get(on_stream)
        return calls.Report(worker, epoch, sent_by(known, age), reported, stream)

    return resolve


@st.composite
def withdrawals(draw: st.DrawFn, about: About = ANYTHING) -> Drawn:
    worker, off, picked = draw(about.owners), draw(off_by), draw(about.several)
    whose = draw(st.sampled_from([worker, worker, worker, "d1"]))
    handles = [handle(whose, number) for number in picked]
    return lambda known: calls.Withdraw(worker, known.epoch(worker, off), handles)


@st.composite
def hellos(draw: st.DrawFn, about: About = ANYTHING) -> Drawn:
    worker, off = draw(about.owners), draw(off_by)
    held = [handle(worker, n) for n in draw(st.lists(about.numbers, max_size=3))]
    forgets, late = draw(odds) > 11, draw(odds) > 12

    def resolve(known: Known) -> calls.Hello:
        stream = known.new_id("stream")
        if late:
            stream = f"stream-{max(1, known.made - 12):04}"
        else:
            known.streams[worker] = stream
        kept = [] if forgets else [whose for owner, whose in known.live if owner == worker]
        return calls.Hello(worker, known.epoch(worker, off), stream, held + kept)

    return resolve


@st.composite
def epoch_ends(draw: st.DrawFn, about: About = ANYTHING) -> Drawn:
    worker, off = draw(st.one_of(about.owners, readers)), draw(st.sampled_from([0, 0, -1, 1]))
    return lambda known: calls.EndEpoch(worker, known.epoch(worker, off))


@st.composite
def grants(draw: st.DrawFn, about: About = ANYTHING) -> Drawn:
    reader, off, ttl_us = draw(readers), draw(off_by), draw(ttls)
    session, owner, number = draw(about.sessions), draw(about.owners), draw(about.numbers)
    by_session, tenant, final = draw(st.booleans()), draw(tenants), draw(odds) < 12
    compatibility = draw(st.sampled_from(["c"] * 7 + ["x"]))
    min_tokens, begin = draw(st.sampled_from([0, 0, 0, 40, 41])), draw(st.booleans())
    # Most ask for what there is. Some ask as before, or for another thing under an old id.
    aimed, again, place = draw(odds) < 11, draw(odds), draw(places)

    def resolve(known: Known) -> calls.Grant:
        old = known.orders[-1 - place % len(known.orders)] if known.orders else None
        lease_id = known.new_id("lease")
        if old is not None and again >= 14:
            return calls.Grant(old, lease_id, final)
        owned, where = handle(owner, number), session
        if aimed and known.held:
            owned, where = known.held[place % len(known.held)]
        order = GrantOrder(
            request_id=old.request_id if old and again == 13 else known.new_id("ask"),
            tenant_id=tenant if by_session or final else None,
            holder=Holder(reader, known.epoch(reader, off), compatibility),
            ownership_id="" if by_session else owned.ownership_id,
            session_id=(where or session) if by_session else "",
            ttl_us=ttl_us,
            min_tokens=min_tokens,
            begin_read=begin,
        )
        known.orders.append(order)
        return calls.Grant(order, lease_id, final)

    return resolve


@st.composite
def of_leases(
    draw: st.DrawFn, about: About = ANYTHING
) -> Callable[[Known], tuple[list[LeaseRef], Holder]]:
    """Draw leases and who names them: mostly their holder, with the right token."""
    wrong, outcome = draw(odds), st.sampled_from(list(Outcome))
    picked = draw(st.lists(st.tuples(about.places, outcome), min_size=1, max_size=4))

    def resolve(known: Known) -> tuple[list[LeaseRef], Holder]:
        first = known.lease(picked[0][0])
        worker = "p2" if wrong == 15 else first.holder_worker_id
        epoch = first.holder_epoch + (wrong == 14)
        refs = [
            LeaseRef(lease.lease_id, lease.fencing_token + (wrong == 13), outcome)
            for place, outcome in picked
            for lease in [known.lease(place)]
        ]
        return refs, Holder(worker, epoch, "x" if wrong == 12 else "c")

    return resolve


@st.composite
def begins(draw: st.DrawFn, about: About = ANYTHING) -> Drawn:
    leases, ttl_us = draw(of_leases(about)), draw(ttls)

    def resolve(known: Known) -> calls.BeginRead:
        refs, holder = leases(known)
        return calls.BeginRead(refs[0], holder, ttl_us)

    return resolve


@st.composite
def renewals(draw: st.DrawFn, about: About = ANYTHING) -> Drawn:
    leases, ttl_us = draw(of_leases(about)), draw(ttls)
    return lambda known: calls.Renew(*leases(known), ttl_us)


@st.composite
def releases(draw: st.DrawFn, about: About = ANYTHING) -> Drawn:
    leases = draw(of_leases(about))
    return lambda known: calls.Release(*leases(known))


@st.composite
def revocations(draw: st.DrawFn, about: About = ANYTHING) -> Drawn:
    tenant, place = draw(tenants), draw(about.places)
    return lambda known: calls.Revoke(tenant, known.lease(place).lease_id)


@st.composite
def session_ends(draw: st.DrawFn, about: About = ANYTHING) -> Drawn:
    tenant, session = draw(tenants), draw(about.sessions)
    return lambda known: calls.FreeSession(tenant, session)


@st.composite
def extensions(draw: st.DrawFn, about: About = ANYTHING) -> Drawn:
    tenant, session, hold, asked = draw(tenants), draw(about.sessions), draw(holds), draw(places)
    return lambda known: calls.ExtendHold(
        tenant, session, micros(hold * 2), [known.new_id("asked") for _ in range(asked)]
    )


@st.composite
def acknowledgements(draw: st.DrawFn, about: About = ANYTHING) -> Drawn:
    place, hold, age, off = draw(about.places), draw(holds), draw(ages), draw(off_by)
    done = draw(odds) < 12

    def resolve(known: Known) -> calls.Acknowledge:
        none = ("d1", "command-none", ("own-none", 1, ""))
        known_ones = known.commands
        worker, ident, key = known_ones[place % len(known_ones)] if known_ones else none
        return calls.Acknowledge(
            worker, known.epoch(worker, off), ident, key, done, sent_by(known, age), micros(hold)
        )

    return resolve


sweeps = st.sampled_from([1, 2, 500, 500]).map(lambda rows: lambda known: calls.Sweep(rows))
purges = st.sampled_from([600.0, 600.0, 60.0]).map(
    lambda retention: lambda known: calls.Purge(micros(retention))
)


@st.composite
def lookups(draw: st.DrawFn) -> Drawn:
    tenant, owner, number, place = draw(tenants), draw(owners), draw(numbers), draw(places)
    session, worker = draw(st.sampled_from(["", "s1", "s2"])), draw(st.sampled_from(["", "p1"]))
    all_states = st.sampled_from(list(OwnershipState))
    states, page = draw(st.lists(all_states, min_size=1, unique=True)), draw(st.integers(1, 3))
    return lambda known: calls.Lookups(
        tenant,
        handle(owner, number).ownership_id,
        known.lease(place).lease_id,
        session,
        worker,
        states,
        page,
    )


def any_call(about: About) -> st.SearchStrategy[Drawn]:
    """Draw any call that changes something."""
    return st.one_of(
        reports(about), reports(about), withdrawals(about), hellos(about), epoch_ends(about),
        grants(about), grants(about), begins(about), renewals(about), releases(about),
        revocations(about), session_ends(about), extensions(about), acknowledgements(about),
        sweeps, sweeps, purges,
    )  # fmt: skip


def _beginnings() -> st.SearchStrategy[list[Drawn]]:
    """Draw something to be about: things that are held for long, and some leases on them."""
    held = About(holds=st.just(480.0))
    uses = st.one_of(grants(held), grants(held), begins(held), renewals(held))
    return st.builds(
        lambda one, other, more: [one, other, *more],
        reports(held),
        reports(held),
        st.lists(uses, min_size=1, max_size=5),
    )


beginnings = _beginnings()
at_the_edge = st.one_of(renewals(), begins(), releases(), grants(), sweeps)


def _groups(about: About) -> st.SearchStrategy[list[tuple[Drawn, int]]]:
    return st.lists(st.tuples(any_call(about), st.integers(0, 1)), min_size=2, max_size=4)


# What one thing is about is what can go wrong.
groups = st.tuples(owners, numbers).flatmap(
    lambda one: _groups(
        About(
            st.just(one[0]),
            st.just(one[1]),
            st.just(OWNED[one[1]][0] or "s1"),
            st.just(0),
        )
    )
)
