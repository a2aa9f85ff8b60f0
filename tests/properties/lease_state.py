"""The rows that the lease store should have, and what must be true of them."""

from dataclasses import dataclass, field, fields, replace
from typing import Any

from kvplane.lease.domain import LeaseConfig
from kvplane.lease.values import (
    Lease,
    LeaseState,
    Ownership,
    OwnershipState,
    Refusal,
)
from properties.explain import Mismatch, expect
from properties.replicas import Rows

SECOND = 1_000_000
CONFIG = LeaseConfig()
LIVE = (OwnershipState.HELD, OwnershipState.LEASED)
GIVEN = (LeaseState.GRANTED, LeaseState.READING)
# Ownership, epoch, and the id of an order to hold longer.
CommandKey = tuple[str, int, str]


def micros(seconds: float) -> int:
    return round(seconds * SECOND)


@dataclass(frozen=True)
class Remembered:
    """The first answer to a request for a lease."""

    asked: tuple[str, str, str, int]
    lease_id: str
    refusal: Refusal | None
    answered_us: int


@dataclass(frozen=True)
class Order:
    """A command in the outbox."""

    worker_id: str
    hold_until_us: int
    created_us: int
    expire_us: int


@dataclass(frozen=True)
class LeaseRows:
    """What is stored, and when it is."""

    now_us: int
    owns: dict[str, Ownership] = field(default_factory=dict)
    leases: dict[str, Lease] = field(default_factory=dict)
    requests: dict[tuple[str, str], Remembered] = field(default_factory=dict)
    commands: dict[CommandKey, Order] = field(default_factory=dict)
    # Epoch and stream.
    workers: dict[str, tuple[int, str]] = field(default_factory=dict)
    ended: dict[tuple[str, str], int] = field(default_factory=dict)

    def at(self, now_us: int) -> Any:
        return replace(self, now_us=now_us)

    def copy(self) -> Any:
        copies = {f.name: dict(getattr(self, f.name)) for f in fields(self)[1:]}
        return replace(self, **copies)

    def compare(self, rows: Rows) -> None:
        """See `explain.Model`."""
        for name, wanted in (("ownerships", self.owns), ("leases", self.leases)):
            key = name[:-1] + "_id"
            stored = {row[key]: row for row in rows[name]}
            values = {ident: _plain(item) for ident, item in wanted.items()}
            _expect_rows(stored, values, name)
        stored = {row["ownership_id"]: row for row in rows["ownership_payloads"]}
        expect(stored.keys(), self.owns.keys(), "payloads")
        stored = {
            (r["tenant_id"], r["request_id"]): (r["lease_id"], r["refusal"], r["answered_us"])
            for r in rows["lease_requests"]
        }
        answers = {
            key: (one.lease_id, one.refusal or 0, one.answered_us)
            for key, one in self.requests.items()
        }
        _expect_rows(stored, answers, "requests")
        expect(len(rows["lease_commands"]), len(self.commands), "how many commands")
        stored = {command_key(row): order_of(row) for row in rows["lease_commands"]}
        _expect_rows(stored, self.commands, "commands")
        workers = {r["worker_id"]: (r["epoch"], r["stream_id"]) for r in rows["worker_epochs"]}
        expect(workers, self.workers, "worker epochs")
        ended = {(r["tenant_id"], r["session_id"]): r["ended_us"] for r in rows["ended_sessions"]}
        expect(ended, self.ended, "ended sessions")


def command_key(row: dict[str, Any]) -> CommandKey:
    """Tell which command a row is."""
    return row["ownership_id"], row["epoch"], row["command_id"] if row["hold_until_us"] else ""


def order_of(row: dict[str, Any]) -> Order:
    return Order(row["worker_id"], row["hold_until_us"], row["created_us"], row["expire_us"])


def _plain(item: Ownership | Lease) -> dict[str, Any]:
    return {f.name: getattr(item, f.name) for f in fields(item)}


def _expect_rows(stored: dict[Any, Any], wanted: dict[Any, Any], what: str) -> None:
    more, less = stored.keys() - wanted.keys(), wanted.keys() - stored.keys()
    if more or less:
        raise Mismatch(f"{what}: there is {[stored[k] for k in more]}, there is no {less}")
    expect(stored, wanted, what)


def check_rows(rows: Rows) -> None:
    """Check what docs/protocol.md says of every state."""
    margin_us = micros(CONFIG.margin_s)
    epochs = {row["worker_id"]: row["epoch"] for row in rows["worker_epochs"]}
    owns = {row["ownership_id"]: row for row in rows["ownerships"]}
    leases = {row["lease_id"]: row for row in rows["leases"]}
    open_on: dict[str, str] = {}
    for ident, lease in leases.items():
        live = lease["state"] in GIVEN
        if not live and not lease["draining"]:
            continue
        own = owns[lease["ownership_id"]]
        assert own["lease_id"] == ident, "an open lease is its ownership's current one"
        assert own["fencing_token"] == lease["fencing_token"], "and has its newest token"
        assert open_on.setdefault(own["ownership_id"], ident) == ident, "2: at most one reader"
        assert lease["deadline_us"] <= own["hold_deadline_us"] - margin_us, "3: before the hold"
        assert lease["tenant_id"] == own["tenant_id"], "4: of one tenant"
        if live:
            assert own["state"] == OwnershipState.LEASED, "a live lease is on what is leased"
            assert epochs[lease["holder_worker_id"]] == lease["holder_epoch"], "6: holder's epoch"
    for ident, own in owns.items():
        assert (own["lease_id"] or None) == open_on.get(ident), "a current lease is open"
        if own["state"] == OwnershipState.LEASED:
            assert own["lease_id"], "what is leased has a lease"
        if own["state"] == OwnershipState.HELD:
            assert not own["lease_id"], "what is held has none"
        if own["state"] in LIVE:
            assert epochs[own["worker_id"]] == own["epoch"], "6: owner's epoch"
            assert not own["ended_us"]
        elif own["tenant_id"]:
            assert own["ended_us"], "it is known when it ended"
    for command in rows["lease_commands"]:
        own = owns.get(command["ownership_id"])
        if own is not None and not command["hold_until_us"]:
            assert own["state"] not in LIVE, "1: nobody can get what is to be freed"
            assert not own["lease_id"], "1: nobody reads what is to be freed"


def check_change(before: Rows, after: Rows) -> None:
    """Check what never goes back, of rows that are still the same thing's."""
    owns = {(r["ownership_id"], r["reported_us"]): r for r in before["ownerships"]}
    for row in after["ownerships"]:
        old = owns.get((row["ownership_id"], row["reported_us"]))
        if old is None:
            continue
        assert row["hold_deadline_us"] >= old["hold_deadline_us"], "3: a hold never moves back"
        assert row["fencing_token"] >= old["fencing_token"], "2: tokens grow"
        if old["state"] not in LIVE:
            assert row["state"] == old["state"], "what has ended stays so"
    leases = {row["lease_id"]: row for row in before["leases"]}
    for row in after["leases"]:
        old = leases.get(row["lease_id"])
        if old is None:
            continue
        assert row["deadline_us"] >= old["deadline_us"], "8: a lease never gets shorter"
        if old["state"] not in GIVEN:
            assert row["state"] == old["state"], "8: what has ended is never revived"
            assert row["deadline_us"] == old["deadline_us"], "8: nor made longer"
    workers = {row["worker_id"]: row["epoch"] for row in before["worker_epochs"]}
    for row in after["worker_epochs"]:
        assert row["epoch"] >= workers.get(row["worker_id"], 0), "6: epochs grow"
