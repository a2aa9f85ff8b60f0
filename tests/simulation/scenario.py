"""What a seed means: a small world, what its users do, and what goes wrong when.

All of it is data, drawn before anything runs, so that a failure can be made smaller by
leaving parts out.
"""

import random
from dataclasses import dataclass, field, replace
from typing import Any, Final

from kvplane.kernel.limits import Limits, Quotas

# What may go wrong: a kind, and how often it is drawn relative to the others.
_KINDS: Final = {
    "lost": 4, "reply_lost": 5, "late": 5, "twice": 4, "reset": 3, "cut": 4, "mute": 2,
    "kill_replica": 4, "freeze_replica": 3, "clock": 2,
    "kill_worker": 3, "freeze_worker": 4,
    "db_away": 2, "db_slow": 2, "db_in_doubt": 3,
    "slow_reads": 5, "lost_notifications": 2, "revoke": 3, "drain": 1,
}  # fmt: skip
# Of monotonic clocks. A reader's may be as slow as the slack after a lease's end allows (4 % of
# the longest lease, 8 s, are 0.33 s of 0.5 s), an owner's as fast as the margin that it takes
# off its hold (2 % of 40 s are 0.8 s of 1 s). Real ones are within 0.02 %.
_SLOWEST, _FASTEST = 0.96, 1.02
_TENANTS: Final = ("acme", "globex")
MESSAGE_FAULTS: Final = ("lost", "reply_lost", "late", "twice", "reset")


@dataclass(frozen=True)
class Fault:
    """Something that goes wrong from `at` on, for `lasts` seconds."""

    index: int
    at: float
    lasts: float
    kind: str
    args: dict[str, Any]

    def __str__(self) -> str:
        args = " ".join(f"{k}={v}" for k, v in self.args.items())
        return f"f{self.index}: at {self.at:.2f} s for {self.lasts:.2f} s: {self.kind} {args}"


@dataclass(frozen=True)
class Op:
    """One thing that a conversation does, after a pause."""

    index: int
    kind: str  # append, edit, branch, double, leave, retry, end, extend
    pause: float
    said: int  # tokens of the user
    answer: int  # tokens of the reply
    draw: float

    def __str__(self) -> str:
        return f"o{self.index}: after {self.pause:.2f} s: {self.kind} +{self.said} tokens"


@dataclass(frozen=True)
class Conversation:
    """One user's conversation."""

    tenant: str
    name: str
    salt: str
    ops: tuple[Op, ...]


@dataclass(frozen=True)
class Scenario:
    """A world and its story."""

    seed: int
    replicas: int
    workers: tuple[tuple[str, str], ...]  # role, kind
    num_blocks: int
    hold_s: float
    block_read_s: float
    ttl_s: float
    sweep_s: float
    slow_chance: float  # of a read to take up to slow_s
    slow_s: float
    traffic_s: float
    conversations: tuple[Conversation, ...]
    faults: tuple[Fault, ...] = ()
    clocks: tuple[float, ...] = ()  # how wrong each replica's wall clock is
    replica_rates: tuple[float, ...] = ()  # how fast each one's monotonic clock runs
    worker_rates: tuple[float, ...] = ()
    held_share: float = 0.0  # of a worker's blocks that may be held; 0: all
    quotas: dict[str, Quotas] = field(default_factory=dict)  # tenants' limits
    begin_wait_s: float = 0.3  # of a reader for its permit

    def only(self, kept: set[str]) -> "Scenario":
        """Return the part of it that is named: ``f3`` for faults, ``o7`` for ops."""
        talks = tuple(
            replace(talk, ops=tuple(op for op in talk.ops if f"o{op.index}" in kept))
            for talk in self.conversations
        )
        faults = tuple(fault for fault in self.faults if f"f{fault.index}" in kept)
        return replace(self, conversations=talks, faults=faults)

    def parts(self) -> list[str]:
        """Return the names of all that can be left out, faults first."""
        ops = [f"o{op.index}" for talk in self.conversations for op in talk.ops]
        return [f"f{fault.index}" for fault in self.faults] + ops

    def told(self) -> list[str]:
        """Return the story in words."""
        lines = [
            f"{self.replicas} replicas, workers {self.workers}, {self.num_blocks} blocks,"
            f" {self.held_share} of them held at most, hold {self.hold_s} s,"
            f" lease {self.ttl_s} s, a reader waits {self.begin_wait_s} s, clocks run at"
            f" {[round(rate, 3) for rate in self.replica_rates + self.worker_rates]}"
        ]
        for tenant, quotas in self.quotas.items():
            lines.append(f"  {tenant} {quotas}")
        for talk in self.conversations:
            lines += [f"  {talk.tenant}/{talk.name} {op}" for op in talk.ops]
        return lines + [f"  {fault}" for fault in self.faults]


@dataclass
class _Counter:
    faults: int = 0
    ops: int = 0
    kinds: list[str] = field(default_factory=list)


def draw(seed: int) -> Scenario:
    """Return the scenario of a seed."""
    rng = random.Random(f"scenario {seed}")
    count = _Counter()
    replicas = rng.choice((1, 2, 2, 2, 3))
    workers = [("prefill", "k"), ("decode", "k")]
    if rng.random() < 0.6:
        workers.append((rng.choice(("prefill", "decode", "both")), "k"))
    if rng.random() < 0.2:
        workers.append((rng.choice(("prefill", "decode")), "other"))
    traffic_s = rng.uniform(10.0, 30.0)
    talks = tuple(_talk(rng, index, count) for index in range(rng.choice((1, 2, 2, 3))))
    scenario = Scenario(
        seed=seed,
        replicas=replicas,
        workers=tuple(workers),
        num_blocks=rng.choice((24, 40, 64)),
        hold_s=rng.choice((7.0, 10.0, 16.0)),
        block_read_s=rng.choice((0.005, 0.03, 0.1)),
        ttl_s=rng.choice((2.0, 4.0, 8.0)),
        sweep_s=rng.choice((1.0, 1.0, 3.0)),
        slow_chance=rng.choice((0.0, 0.1, 0.3)),
        slow_s=rng.choice((1.0, 4.0, 9.0)),
        traffic_s=traffic_s,
        conversations=talks,
        clocks=tuple(rng.choice((0.0, rng.uniform(-9.0, 9.0))) for _ in range(replicas)),
        replica_rates=_rates(seed, "replicas", replicas),
        worker_rates=_rates(seed, "workers", len(workers)),
        held_share=_held_share(seed),
        quotas=_quotas(seed),
        begin_wait_s=random.Random(f"begin wait {seed}").choice((0.3, 0.3, 0.02)),
    )
    if rng.random() < 0.08:
        return scenario  # a quiet day
    if rng.random() < 0.3:
        return _hard(rng, scenario)
    many = rng.choice((1, 2, 3, 4, 6, 8, 10))
    kinds, weights = list(_KINDS), list(_KINDS.values())
    faults = []
    for _ in range(many):
        kind = rng.choices(kinds, weights)[0]
        faults.append(_fault(rng, kind, scenario, len(faults)))
    return replace(scenario, faults=tuple(sorted(faults, key=lambda fault: fault.at)))


def _held_share(seed: int) -> float:
    """Return how much of its blocks a worker lets be held: less than users want in every third."""
    rng = random.Random(f"held share {seed}")
    return rng.choice((0.15, 0.3, 0.5)) if rng.random() < 1 / 3 else 0.0


def _quotas(seed: int) -> dict[str, Quotas]:
    """Return what tenants may use: in every third world less than their users want."""
    rng = random.Random(f"quotas {seed}")
    if rng.random() > 1 / 3:
        return {}
    return {
        tenant: Quotas(
            soft=Limits(held_blocks=rng.choice((0, 3, 8))),
            hard=Limits(
                held_tokens=rng.choice((0, 30, 60)),
                held_blocks=rng.choice((0, 6, 12)),
                live_leases=rng.choice((0, 1, 2)),
            ),
        )
        for tenant in _TENANTS
    }


def _rates(seed: int, whose: str, count: int) -> tuple[float, ...]:
    """Return how fast clocks run: right in every other world."""
    rng = random.Random(f"rates {seed} {whose}")
    if rng.random() < 0.5:
        return (1.0,) * count
    return tuple(
        rng.choice((1.0, _SLOWEST, rng.uniform(_SLOWEST, 1.0), rng.uniform(1.0, _FASTEST)))
        for _ in range(count)
    )


def _hard(rng: random.Random, scenario: Scenario) -> Scenario:
    """Return it with long reads, under what is worst for them."""
    scenario = replace(scenario, slow_chance=0.5, slow_s=9.0, hold_s=16.0)
    chance, late_s = 0.6, (3.0, 6.0)
    whose = list(range(len(scenario.workers)))
    which = rng.randrange(3)
    if which == 0:  # readers and owners that are silent for so long that they are lost
        rates = rng.choice((scenario.worker_rates, (_SLOWEST,) * len(scenario.workers)))
        scenario = replace(scenario, ttl_s=8.0, sweep_s=1.0, worker_rates=rates)
        kinds = ["freeze_worker", "freeze_worker", "lost", "kill_replica"]
        chance = 0.9
    elif which == 1:  # what comes, comes late
        scenario = replace(scenario, ttl_s=2.0, sweep_s=3.0)
        kinds = ["late", "late", "twice", "freeze_replica"]
    else:  # permits come too late now and then, and users ask again
        talks = tuple(_impatient(rng, talk) for talk in scenario.conversations)
        scenario = replace(scenario, ttl_s=8.0, begin_wait_s=0.1, conversations=talks)
        kinds, chance, late_s = ["late"] * 4, 0.3, (1.0, 3.0)
        whose = [i for i in whose if scenario.workers[i][0] != "decode"]
    faults = []
    for index, kind in enumerate(kinds):
        fault = _fault(rng, kind, scenario, index)
        args = dict(fault.args)
        if kind in MESSAGE_FAULTS:
            args |= {"chance": chance, "of": f"w{rng.choice(whose)}."}
        if kind == "late":
            args |= {"most_s": rng.choice(late_s)}
        faults.append(replace(fault, lasts=rng.uniform(5.0, 9.0), args=args))
    return replace(scenario, faults=tuple(sorted(faults, key=lambda fault: fault.at)))


def _impatient(rng: random.Random, talk: Conversation) -> Conversation:
    """Return it with most of what is said said twice."""
    ops = (replace(op, kind="retry") if rng.random() < 0.8 else op for op in talk.ops)
    return replace(talk, ops=tuple(ops))


def _talk(rng: random.Random, index: int, count: _Counter) -> Conversation:
    ops = []
    for number in range(rng.choice((2, 3, 3, 4, 5))):
        kind = "append"
        if number:
            kind = rng.choices(
                ("append", "edit", "branch", "double", "leave", "retry", "end", "extend"),
                (8, 2, 2, 2, 2, 3, 1, 1),
            )[0]
        pause = rng.choice((0.0, 0.2, rng.uniform(0.0, 2.0), rng.uniform(2.0, 9.0)))
        said, answer = rng.randint(2, 18), rng.randint(1, 8)
        ops.append(Op(count.ops, kind, pause, said, answer, rng.random()))
        count.ops += 1
    tenant = rng.choice(("acme", *_TENANTS))
    # The same name under two tenants is two sessions.
    name = rng.choice((f"talk{index}", "shared"))
    return Conversation(tenant, name, rng.choice(("", "", "", "salt")), tuple(ops))


def _fault(rng: random.Random, kind: str, scenario: Scenario, index: int) -> Fault:
    at = rng.uniform(0.0, scenario.traffic_s)
    lasts = rng.choice((0.5, 2.0, rng.uniform(1.0, 10.0)))
    replica = rng.randrange(scenario.replicas)
    worker = rng.randrange(len(scenario.workers))
    args: dict[str, Any] = {}
    if kind in MESSAGE_FAULTS:
        of = rng.choice(("", "", f"replica{replica}", f"w{worker}.", "gateway"))
        args = {"chance": rng.choice((0.1, 0.3, 0.6)), "of": of}
        if kind == "late":
            args["most_s"] = rng.choice((0.3, 1.0, 4.0, 8.0))
    elif kind == "mute":
        args = {"replica": replica, "up": rng.random() < 0.6, "down": rng.random() < 0.6}
    elif kind in ("cut", "kill_replica", "freeze_replica"):
        args = {"replica": replica}
    elif kind == "clock":
        args = {"replica": replica, "offset_s": rng.uniform(-20.0, 20.0)}
    elif kind in ("kill_worker", "freeze_worker", "drain"):
        args = {"worker": worker}
    elif kind == "db_slow":
        args = {"most_s": rng.choice((0.1, 0.5, 2.0))}
    elif kind == "db_in_doubt":
        args = {"chance": rng.choice((0.1, 0.4))}
    elif kind == "revoke":
        lasts = rng.uniform(0.5, 8.0)
    elif kind == "slow_reads":
        args = {"chance": rng.choice((0.3, 1.0)), "read_s": rng.uniform(0.5, 12.0)}
        lasts = rng.uniform(2.0, 20.0)
    elif kind == "lost_notifications":
        args = {"chance": 0.5}
    return Fault(index, at, lasts, kind, args)
