"""The omniscient checker: docs/protocol.md's invariants, looked at after every commit and read."""

from collections import deque
from typing import TYPE_CHECKING, Any

from kvplane.kernel.context import caller

from simulation.loop import VirtualLoop

if TYPE_CHECKING:
    from simulation.database import Store
    from simulation.engine import Engine
    from simulation.fabric import Transfer

_LIVE_LEASES = (
    "SELECT lease_id, ownership_id, tenant_id, fencing_token, holder_worker_id, holder_epoch,"
    " state, deadline_us FROM leases WHERE (state <= 2 OR draining)"
)
_LIVE_OWNERSHIPS = (
    "SELECT ownership_id, tenant_id, worker_id, epoch, engine_id, request_id, state,"
    " hold_deadline_us, fencing_token, lease_id, session_id, turn, for_decode"
    " FROM ownerships WHERE state <= 2"
)
_ENDED_SESSIONS = "SELECT tenant_id, session_id FROM ended_sessions"
_OPEN_READS = (
    "SELECT engine_id, request_id FROM ownerships JOIN leases USING (ownership_id)"
    " WHERE leases.state <= 2 OR leases.draining OR (leases.state >= 5 AND leases.deadline_us > ?)"
)
# How long blocks stay pinned after their session's end, when nothing is broken.
_FREED_WITHIN_S = 8.0
# Rounding of durations on their way.
_SLACK_US = 10


class Checker:
    """Collects violations; what is checked where is said at each method."""

    def __init__(self, loop: VirtualLoop, margin_s: float, ttl_s: float, trace: bool) -> None:
        self._loop, self._ttl_s = loop, ttl_s
        self._margin_us = round(margin_s * 1e6)
        self.violations: list[str] = []
        self.reads_checked = self.reads_dropped = self.wrong_but_dropped = 0
        self.wrong_reads = 0
        self.engines: dict[str, Engine] = {}  # by engine id
        self.kinds: dict[str, str] = {}  # by worker id
        self._tenants: dict[tuple[str, str], str] = {}
        self._pinned_at: dict[tuple[str, str], float] = {}
        self._ends: dict[tuple[str, str], float] = {}  # of sessions, as the lease service knows
        self._reading: dict[tuple[str, str], tuple[Engine, Transfer]] = {}
        self._leases: dict[str, int] = {}  # live: its deadline
        self._holds: dict[str, int] = {}  # live: its hold's end
        self._ended: set[str] = set()
        self._grants: dict[tuple[str, str], str] = {}
        # What was read, or its owner notified, under which lease.
        self._sent: dict[tuple[str, str], str] = {}
        self._told_epochs: dict[str, int] = {}
        self.log: deque[str] = deque(maxlen=4000 if trace else 0)
        self._trace = trace
        self.store: Store | None = None

    def event(self, *parts: Any) -> None:
        """Note a step for the trace."""
        if self._trace:
            self.log.append(f"{self._loop.time():9.4f}  " + " ".join(map(str, parts)))

    def violated(self, invariant: int, what: str) -> None:
        """Note a violation; the first one counts."""
        self.event(f"VIOLATION of invariant {invariant}: {what}")
        self.violations.append(f"invariant {invariant} at {self._loop.time():.3f} s: {what}")

    # -- reads --------------------------------------------------------------------

    def read_started(self, reader: "Engine", transfer: "Transfer") -> None:
        """2: one reader. 3 and 8: it believes in its lease no longer than the server does."""
        other = self._reading.get(transfer.owner)
        if other is not None and self._valid(*other):
            self.violated(2, f"{transfer.owner[1]} has two readers")
        self._reading[transfer.owner] = (reader, transfer)
        if reader.agent.plain or self.store is None:
            return
        read = reader.agent._reading._entries[transfer.request.ident].read
        self._sent[transfer.owner] = read.lease_id
        rows = self.store.select("SELECT deadline_us FROM leases WHERE lease_id = ?", read.lease_id)
        until_us = reader.clock.true_us(read.valid_until)
        # By as much as its own clock is slow; the sweep waits for that.
        slow_us = round(max(0.0, 1 / reader.clock.rate - 1) * self._ttl_s * 1e6)
        if not rows or until_us > rows[0][0] + slow_us + _SLACK_US:
            late = (until_us - rows[0][0]) / 1e6 if rows else 0.0
            self.violated(
                8, f"reader of {transfer.owner[1]} believes in its lease {late:.3f} s more"
            )

    def notified(self, reader: "Engine", ident: str, owner: tuple[str, str]) -> None:
        """Note that an owner frees its blocks without a read."""
        if not reader.agent.plain:
            self._sent[owner] = reader.agent._reading._entries[ident].read.lease_id

    def _valid(self, reader: "Engine", transfer: "Transfer") -> bool:
        """Tell whether it is reading and would use what it has read."""
        ident = transfer.request.ident
        return (
            not transfer.done
            and reader.up
            and not transfer.request.finished
            and transfer.request.stage == "reading"
            and reader.agent.still_valid(ident)
        )

    def read_used(self, reader: "Engine", transfer: "Transfer") -> None:
        """1, 4 and 5: every block holds what the reader thinks it holds."""
        self.reads_checked += 1
        wrong = self._wrong(transfer)
        self.event("used", transfer.request.ident, "WRONG" if wrong else "right")
        if wrong:
            self.wrong_reads += 1
            if not reader.agent.plain:
                self.violated(1, f"{transfer.request.ident} used a wrong read: {wrong}")

    def read_dropped(self, reader: "Engine", transfer: "Transfer") -> None:
        """Dropped: it may hold anything."""
        self.reads_dropped += 1
        if not transfer.failed and self._wrong(transfer):
            self.wrong_but_dropped += 1
        self.event("dropped", transfer.request.ident)

    def _wrong(self, transfer: "Transfer") -> str:
        if self._tenants.get(transfer.owner, "") != transfer.tenant:
            return "another tenant's"
        if transfer.captured != transfer.expected:
            return f"{transfer.captured} instead of {transfer.expected}"
        return ""

    # -- holds --------------------------------------------------------------------

    def pinned(self, engine: "Engine", ident: str) -> None:
        """Note whose it is."""
        self._pinned_at[engine.engine_id, ident] = self._loop.time()
        self._tenants[engine.engine_id, ident] = engine.pins[ident].tenant
        self.event("pin", engine.engine_id, ident, f"until {engine.pins[ident].until:.3f}")

    def pin_ends(self, engine: "Engine", ident: str) -> None:
        """1: nothing frees a block between a read's start and its end."""
        self.event("unpin", engine.engine_id, ident)
        reading = self._reading.get((engine.engine_id, ident))
        if reading is not None and not engine.agent.plain and self._valid(*reading):
            self.violated(1, f"{ident} is freed while {reading[1].request.ident} reads it")

    def freed(self, engine: "Engine", blocks: list[int], why: str) -> None:
        """Note it; reuse shows in what readers get."""
        if blocks:
            self.event("free", engine.engine_id, why, blocks)

    # -- answers ------------------------------------------------------------------

    def answered(self, method: str, request: Any, answer: Any) -> None:
        """9: a request that is sent twice gets the first one's answer."""
        if self._trace and method not in ("Heartbeat",):
            self.event(method, " ".join(str(answer).split())[:160])
        if method == "EndWorkerEpoch":
            known = self._told_epochs.get(request.worker_id, 0)
            self._told_epochs[request.worker_id] = max(known, request.current_epoch)
        if method != "GrantLease":
            return
        owner = answer.ownership.tenant_id
        if request.session_id and answer.HasField("ownership") and owner != caller().tenant_id:
            self.violated(4, f"{caller().tenant_id} was given what belongs to {owner}")
        key = (request.holder.worker_id, request.request_id)
        given = answer.lease.lease_id
        first = self._grants.setdefault(key, given)
        if first != given:
            self.violated(9, f"{request.request_id} was answered {first!r} and {given!r}")

    # -- commits ------------------------------------------------------------------

    def committed(self) -> None:
        """2, 3, 4, 6, 7 and 8, on what is stored."""
        assert self.store is not None
        now_us = self.store.clock.now_us()
        epochs = dict(self.store.select("SELECT worker_id, epoch FROM worker_epochs"))
        for worker_id, told in self._told_epochs.items():
            epochs[worker_id] = max(told, epochs.get(worker_id, 0))
        ownerships = {row[0]: row for row in self.store.select(_LIVE_OWNERSHIPS)}
        rows = self.store.select(_LIVE_LEASES)
        live: dict[str, int] = {}
        open_leases = set()
        for row in rows:
            open_leases.add(row[0])
            if row[6] <= 2:
                live[row[0]] = row[7]
                self._check_lease(row, ownerships.get(row[1]), epochs, now_us)
        for row in ownerships.values():
            self._check_ownership(row, epochs, open_leases)
        self._check_sessions(list(ownerships.values()), rows)
        self._check_orders()
        holds = {ident: row[7] for ident, row in ownerships.items()}
        self._ended.update(self._leases.keys() - live.keys(), self._holds.keys() - holds.keys())
        self._leases, self._holds = live, holds

    def _check_lease(self, row: Any, own: Any, epochs: dict[str, int], now_us: int) -> None:
        lease_id, _, tenant, token, holder, epoch, _, deadline_us = row
        before_us = self._leases.get(lease_id)
        if lease_id in self._ended:
            self.violated(8, f"{lease_id} lives again")
        if before_us is not None and deadline_us < before_us:
            self.violated(8, f"{lease_id} was shortened")
        if before_us is not None and before_us <= now_us and deadline_us > before_us:
            self.violated(8, f"{lease_id} was renewed after its end")
        if epoch < epochs.get(holder, 0):
            self.violated(6, f"{lease_id} is held by {holder} of epoch {epoch}, which has ended")
        if own is None or own[9] != lease_id or own[8] != token:
            self.violated(2, f"{lease_id} is live beside what its ownership says")
            return
        if own[1] != tenant or self.kinds.get(own[2]) != self.kinds.get(holder):
            self.violated(4, f"{lease_id} crosses tenants or kinds")
        if deadline_us > own[7] - self._margin_us:
            self.violated(3, f"{lease_id} ends less than the margin before its hold")

    def _check_sessions(self, ownerships: list[Any], leases: list[Any]) -> None:
        """7: nothing is held for a session that has ended, or of a turn that is outdated."""
        assert self.store is not None
        ended = set(self.store.select(_ENDED_SESSIONS))
        for session in ended - self._ends.keys():
            self._ends[session] = self._loop.time()
        live = {row[0] for row in leases if row[6] <= 2}
        newest: dict[tuple[str, str], int] = {}
        for row in ownerships:
            if not row[12]:
                session = row[1], row[10]
                newest[session] = max(newest.get(session, 0), row[11])
        for row in ownerships:
            session = row[1], row[10]
            if session in ended and (row[6] == 1 or row[9] in live):
                self.violated(7, f"{row[5]} is held for a session that has ended")
            if row[6] == 1 and not row[12] and row[10] and row[11] < newest[session]:
                self.violated(7, f"{row[5]} of turn {row[11]} is held after a newer turn's report")

    def check_pins(self, calm_since: float) -> None:
        """7: engines soon free what they hold for a session that has ended, unless it is read.

        Also what they report later, but not what was read when its notification got lost. What
        somebody was reading, or might have been, counts from the end of that lease.
        `calm_since`: when the last fault was healed.
        """
        if self.store is None:
            return
        late = self._loop.time() - _FREED_WITHIN_S
        pins = [
            (engine.engine_id, ident)
            for engine in self.engines.values()
            if engine.up and calm_since <= late
            for ident, pin in engine.pins.items()
            if ident not in engine.unnotified
            and self._ends.get((pin.tenant, pin.session), late + 1) <= late
            and self._pinned_at[engine.engine_id, ident] <= late
        ]
        over_us = self.store.clock.now_us() - round(_FREED_WITHIN_S * 1e6)
        for owner in pins:
            if owner not in self.store.select(_OPEN_READS, over_us):
                self.violated(7, f"{owner[1]} is pinned long after its session's end")

    def _check_orders(self) -> None:
        """1: nobody is told to free what is being read."""
        assert self.store is not None
        reading = [owner for owner, (_, read) in self._reading.items() if not read.done]
        if not reading:
            return
        orders = self.store.select(
            "SELECT engine_id, request_id FROM lease_commands WHERE hold_until_us = 0"
        )
        for owner in reading:
            if owner in orders and self._valid(*self._reading[owner]):
                self.violated(1, f"{owner[1]} is to be freed while it is being read")

    def _check_ownership(self, row: Any, epochs: dict[str, int], open_leases: set[str]) -> None:
        ident, _, worker, epoch, engine_id, request_id, state, hold_us, _, lease_id = row[:10]
        if ident in self._ended:
            self.violated(2, f"the ended ownership of {request_id} lives again")
        if hold_us < self._holds.get(ident, 0):
            self.violated(8, f"the hold of {request_id} moved back")
        if epoch < epochs.get(worker, 0):
            self.violated(6, f"{request_id} is owned by {worker} of epoch {epoch}, which has ended")
        if state == 2 and lease_id not in open_leases:
            self.violated(7, f"{request_id} is leased to nobody")
        sent = self._sent.get((engine_id, request_id))
        if sent is not None and lease_id != sent:
            self.violated(2, f"{request_id} was read under {sent} and can be read again")
        engine = self.engines.get(engine_id)
        pin = engine.pins.get(request_id) if engine is not None and engine.up else None
        if pin is not None and engine is not None:
            until_us = engine.clock.true_us(pin.until)
            if hold_us > until_us + _SLACK_US:
                self.violated(
                    3, f"{request_id} is believed held {(hold_us - until_us) / 1e6} s more"
                )
