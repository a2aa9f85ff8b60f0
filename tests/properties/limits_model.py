"""What tenants with limits may begin, and what they have used."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any

from kvplane.kernel.errors import InvalidField, NotFound, QuotaExceeded
from kvplane.kernel.limits import Limits, Quotas
from kvplane.session.domain import BeginTurn, CompleteTurn, Session, SessionState, TurnOutcome
from kvplane.session.quota import NOTHING, Ask, OverQuota
from kvplane.session.usage import Completed
from properties import limits_calls as calls
from properties.explain import expect
from properties.replicas import Rows
from properties.session_calls import ForgetEnded
from properties.session_model import CONFIG, SECOND, Key, SessionModel
from properties.session_told import same, told

BURST_S = 10
RATES = {"requests": "requests_per_second", "tokens": "tokens_per_second"}
Levels = dict[str, Fraction]
Verdict = OverQuota | QuotaExceeded | None


@dataclass(frozen=True)
class Bucket:
    """What a tenant has used of its rates, when that was, and what it is charged with since."""

    at_us: int = 0
    levels: Levels = field(
        default_factory=lambda: {
            f"{kind}_{what}": Fraction(0) for kind in ("soft", "hard") for what in RATES
        }
    )
    # Corrections not taken in yet, each with whether the turn has a session.
    late: tuple[tuple[int, bool], ...] = ()


@dataclass(frozen=True)
class UnheldTurn:
    """A turn without a session."""

    request: BeginTurn
    quota: str
    open_us: int
    charge: int | None
    completed: bool = False


@dataclass(frozen=True)
class LimitsModel(SessionModel):
    """The session store's model, with limits."""

    buckets: dict[str, Bucket] = field(default_factory=dict)
    unheld: dict[Key, UnheldTurn] = field(default_factory=dict)
    # Of turns with a session; None: there was no limit on tokens.
    charges: dict[Key, int | None] = field(default_factory=dict)
    # Turns, tokens of prompts and completions, reused and recomputed ones.
    used: dict[str, tuple[int, ...]] = field(default_factory=dict)
    # All that was charged, when it began: when, tokens, and what they are known to be less.
    let_in: dict[Key, tuple[int, int, int]] = field(default_factory=dict)

    def after(self, call: Any, answer: Any, at_once: Rows | None) -> Iterable[SessionModel]:
        """See `explain.Model`."""
        copy: LimitsModel = self.copy()
        match call:
            case calls.LimitedBegin() | calls.LimitedCreate():
                return self._within(call, answer, alone=at_once is None)
            case calls.CompleteAny():
                answers = [copy._close(call, report) for report in call.reports]
                told([_plain(a) for a in answer], [_plain(a) for a in answers])
            case calls.ReadUsage():
                active = copy._active(call.tenant)
                used = copy.used.get(call.tenant, (0,) * 5)
                told_used = answer[0]
                got = tuple(getattr(told_used, n) for n in told_used.__dataclass_fields__)
                expect((got, answer[1]), (used, active), "usage")
            case ForgetEnded():
                states: list[Any] = list(super().after(call, answer, at_once))
                since_us = self.now_us - round(CONFIG.abandoned_after_s * SECOND)
                kept = {k: t for k, t in self.unheld.items() if t.open_us >= since_us}
                return [replace(state, unheld=kept) for state in states]
            case _:
                return super().after(call, answer, at_once)
        return [copy]

    def _within(self, call: Any, answer: Any, *, alone: bool) -> Iterable["LimitsModel"]:
        """Begin, with the corrections so far; at once with others perhaps with fewer."""
        late = self.buckets.get(call.tenant, Bucket()).late
        for known in [len(late)] if alone else range(len(late), -1, -1):
            copy: LimitsModel = self.copy()
            bucket = copy._open(call.tenant, call.quotas, known)
            if isinstance(call, calls.LimitedCreate):
                wanted = copy._make_one(call, bucket)
                if isinstance(wanted, QuotaExceeded):
                    told([_plain(answer)], [_plain(wanted)])
                else:
                    expect(answer, wanted, "create")
            else:
                answers = copy._begin_all(call, bucket)
                told([_plain(a) for a in answer], [_plain(a) for a in answers])
            yield copy

    def _open(self, tenant: str, quotas: Quotas, known: int) -> Bucket:
        """Return what is used now, with so many of the corrections that came late."""
        bucket = self.buckets.get(tenant, Bucket())
        if not _counts(quotas, "tokens"):
            known = 0
        taken, late = bucket.late[:known], bucket.late[known:]
        more = {
            "hard_tokens": sum(tokens for tokens, _ in taken),
            "soft_tokens": sum(tokens for tokens, held in taken if held),
        }
        passed_s = Fraction(self.now_us - bucket.at_us, SECOND)
        levels = {}
        for name, level in bucket.levels.items():
            kind, what = name.split("_")
            rate = Fraction(getattr(getattr(quotas, kind), RATES[what]))
            then = max(Fraction(0), level + more.get(name, 0))
            levels[name] = max(Fraction(0), then - rate * passed_s) if rate else Fraction(0)
        return Bucket(self.now_us, levels, late)

    def _begin_all(self, call: calls.LimitedBegin, bucket: Bucket) -> list[Any]:
        tenant, quotas = call.tenant, call.quotas
        verdicts: dict[str, Verdict] = {}
        maybe = bucket
        new: dict[str, tuple[BeginTurn, str]] = {}
        for request, new_id in call.wishes:
            key = (tenant, request.request_id)
            if key not in self.requests and key not in self.unheld:
                new.setdefault(request.request_id, (request, new_id))
        # First the rates of all, then the sessions of all that are left.
        for ident, (request, _) in new.items():
            verdicts[ident] = _judge(maybe.levels, quotas, request.ask)
            if not isinstance(verdicts[ident], QuotaExceeded):
                maybe = _charged(maybe, quotas, request.ask, held=verdicts[ident] is None)
        first: dict[str, Any] = {}
        charged = bucket
        for ident, (request, new_id) in new.items():
            if verdicts[ident] is None and self._find(tenant, request) is None:
                verdicts[ident] = _judge_session(self._active(tenant), quotas)
            verdict = verdicts[ident]
            if isinstance(verdict, QuotaExceeded):
                first[ident] = verdict
                continue
            charge = request.ask.tokens if _counts(quotas, "tokens") else None
            charged = _charged(charged, quotas, request.ask, held=verdict is None)
            self.let_in[tenant, f"{ident}@{self.now_us}"] = (self.now_us, request.ask.tokens, 0)
            if verdict is None:
                first[ident] = self._begin(tenant, request, new_id)
                self.charges[tenant, ident] = charge
            else:
                self.unheld[tenant, ident] = UnheldTurn(request, verdict.quota, self.now_us, charge)
        if charged is not bucket and _limited(quotas):
            self.buckets[tenant] = charged
        return [self._again(tenant, request, first) for request, _ in call.wishes]

    def _again(self, tenant: str, request: BeginTurn, first: dict[str, Any]) -> Any:
        """Return the first answer to a request."""
        ident = request.request_id
        if isinstance(first.get(ident), QuotaExceeded):
            return first[ident]
        known = self.unheld.get((tenant, ident))
        if known is None:
            return self._begin(tenant, request, "")
        return OverQuota(known.quota) if same(known.request, request) else InvalidField

    def _make_one(self, call: calls.LimitedCreate, bucket: Bucket) -> Any:
        if self._named(call.tenant, call.name) is not None:
            return self._create(call)
        for verdict in (
            _judge(bucket.levels, call.quotas, NOTHING),
            _judge_session(self._active(call.tenant), call.quotas),
        ):
            if isinstance(verdict, QuotaExceeded):
                return verdict
        if _limited(call.quotas):
            # One without a session is none for the soft limits.
            held = _judge(bucket.levels, call.quotas, NOTHING) is None
            self.buckets[call.tenant] = _charged(bucket, call.quotas, NOTHING, held=held)
            self.let_in[call.tenant, call.new_id] = (self.now_us, 0, 0)
        return self._create(call)

    def _active(self, tenant: str) -> int:
        return sum(
            key[0] == tenant and session.state is SessionState.ACTIVE
            for key, session in self.sessions.items()
        )

    def _close(self, call: calls.CompleteAny, report: CompleteTurn) -> Any:
        tenant = call.tenant
        rate = max(call.quotas.soft.tokens_per_second, call.quotas.hard.tokens_per_second)
        if report.request_id:
            key = (tenant, report.request_id)
            turn = self.unheld.get(key)
            if turn is None:
                return NotFound
            if turn.completed:
                return Completed(None, None)
            self.unheld[key] = replace(turn, completed=True)
            self._count(key, turn.open_us, turn.charge, report, rate, held=False)
            return Completed(None, _used(report))
        place = (tenant, report.session_id, report.turn)
        opened = self.turns.get(place)
        session = self._complete(tenant, report)
        if opened is None or not isinstance(session, Session):
            return NotFound
        if opened.report is not None:
            return Completed(session, None)
        key = (tenant, opened.request.request_id)
        self._count(key, opened.open_us, self.charges[key], report, rate, held=True)
        return Completed(session, _used(report))

    def _count(
        self,
        key: Key,
        open_us: int,
        charge: int | None,
        report: CompleteTurn,
        rate: float,
        *,
        held: bool,
    ) -> None:
        """Add what a turn used to its tenant's account, and correct what it was charged."""
        tenant = key[0]
        before = self.used.get(tenant, (0,) * 5)
        used = _used(report)
        self.used[tenant] = tuple(one + more for one, more in zip(before, used, strict=True))
        if charge is None:
            return
        spent = report.prompt_tokens + report.completion_tokens
        told_all = report.outcome is TurnOutcome.OK and spent > 0
        unused = max(0, charge - spent) if told_all else 0
        # What has drained since is gone.
        drained = math.ceil(Fraction(rate) * (self.now_us - open_us) / SECOND)
        beyond = max(0, spent - charge) - min(unused, max(0, charge - drained))
        bucket = self.buckets[tenant]
        self.buckets[tenant] = replace(bucket, late=(*bucket.late, (beyond, held)))
        place = (tenant, f"{key[1]}@{open_us}")
        self.let_in[place] = (open_us, charge, unused)

    def compare(self, rows: Rows) -> None:
        """See `explain.Model`."""
        super().compare(rows)
        stored = {(row["tenant_id"], row["request_id"]): row for row in rows["unheld_turns"]}
        expect(stored.keys(), self.unheld.keys(), "turns without a session")
        for key, turn in self.unheld.items():
            row = stored[key]
            got = (row["quota"], row["open_us"], row["charged_tokens"], row["completed"])
            wanted = (turn.quota, turn.open_us, turn.charge, turn.completed)
            expect(got, wanted, f"turn without a session {key}")
        for row in rows["turns"]:
            charge = self.charges[row["tenant_id"], row["request_id"]]
            expect(row["charged_tokens"], charge, "charged")
        for row in rows["tenant_rates"]:
            bucket = self.buckets.get(row["tenant_id"], Bucket())
            expect(row["at_us"], bucket.at_us, "bucket's time")
            got = {name: row[name] for name in bucket.levels}
            expect(got, {n: float(level) for n, level in bucket.levels.items()}, "buckets")


def _limited(quotas: Quotas) -> bool:
    return any(
        limits.sessions or limits.request_bytes or limits.requests_per_second
        or limits.tokens_per_second
        for limits in (quotas.soft, quotas.hard)
    )  # fmt: skip


def _counts(quotas: Quotas, what: str) -> bool:
    return any(getattr(limits, RATES[what]) for limits in (quotas.soft, quotas.hard))


def _charged(bucket: Bucket, quotas: Quotas, ask: Ask, *, held: bool) -> Bucket:
    """Fill the buckets of those rates that there are."""
    levels = dict(bucket.levels)
    for kind in ("soft", "hard") if held else ("hard",):
        for what, amount in (("requests", 1), ("tokens", ask.tokens)):
            if getattr(getattr(quotas, kind), RATES[what]):
                levels[f"{kind}_{what}"] += amount
    return replace(bucket, levels=levels)


def _judge(levels: Levels, quotas: Quotas, ask: Ask) -> Verdict:
    if 0 < quotas.hard.request_bytes < ask.size_bytes:
        return QuotaExceeded("", metadata={"quota": "request_bytes"})
    waits = _waits(levels, "hard", quotas.hard, ask)
    if waits:
        name = max(waits, key=lambda each: waits[each])
        return QuotaExceeded("", metadata={"quota": name}, retry_after=float(waits[name]))
    if 0 < quotas.soft.request_bytes < ask.size_bytes:
        return OverQuota("request_bytes")
    return next(map(OverQuota, _waits(levels, "soft", quotas.soft, ask)), None)


def _waits(levels: Levels, kind: str, limits: Limits, ask: Ask) -> dict[str, Fraction]:
    """Return the rates that it does not fit in, each with the seconds until it does."""
    waits = {}
    for what, amount in (("requests", 1), ("tokens", ask.tokens)):
        rate = Fraction(getattr(limits, RATES[what]))
        room = rate * BURST_S if what == "tokens" else max(Fraction(1), rate * BURST_S)
        beyond = levels[f"{kind}_{what}"] + min(amount, room) - room
        if rate and beyond > 0:
            waits[RATES[what]] = beyond / rate
    return waits


def _judge_session(active: int, quotas: Quotas) -> Verdict:
    if 0 < quotas.hard.sessions <= active:
        return QuotaExceeded("", metadata={"quota": "sessions"}, retry_after=5.0)
    return OverQuota("sessions") if 0 < quotas.soft.sessions <= active else None


def _used(report: CompleteTurn) -> tuple[int, ...]:
    return (
        1,
        report.prompt_tokens,
        report.completion_tokens,
        report.tokens_reused,
        report.prompt_tokens - report.tokens_reused,
    )


def _plain(answer: Any) -> Any:
    """Return what is compared of an answer, beside sessions and turns."""
    if isinstance(answer, QuotaExceeded):
        wait_s = answer.retry_after
        return answer.metadata["quota"], None if wait_s is None else round(wait_s, 6)
    if isinstance(answer, Completed):
        used = answer.used
        if used is not None and not isinstance(used, tuple):
            used = tuple(getattr(used, name) for name in used.__dataclass_fields__)
        return answer.session, used
    return answer


def let_in_too_much(
    entries: Sequence[tuple[int, int, int]], requests_rate: float, tokens_rate: float
) -> str:
    """Say in which window more was let in than a rate and 10 s of it allow, "" for none.

    Entries are (when, tokens charged, how many of them are known to be unused), in order.
    """
    for begin, (begin_us, *_) in enumerate(entries):
        tokens, large = 0, 0
        for requests, (at_us, charge, unused) in enumerate(entries[begin:], 1):
            tokens += charge - unused
            # What is larger than the bucket is let in when that is empty.
            large = max(large, charge)
            window_s = (at_us - begin_us) / SECOND
            room = max(1, requests_rate * BURST_S) + requests_rate * window_s
            if requests_rate and requests > room:
                return f"{requests} requests in {window_s} s"
            room = max(tokens_rate * BURST_S, large) + tokens_rate * window_s
            if tokens_rate and tokens > room:
                return f"{tokens} tokens in {window_s} s"
    return ""
