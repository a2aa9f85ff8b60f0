"""What an engine has pinned, and the orders about it. Used from both threads."""

import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from google.protobuf.duration_pb2 import Duration

from kvplane.api.lease.v1 import lease_pb2 as lease
from kvplane.client import kv_params
from kvplane.kernel.clock import Clock
from kvplane.worker.identity import AgentConfig, WorkerIdentity

_REMEMBERED_COMMANDS: Final = 1024


@dataclass(frozen=True, slots=True)
class Held:
    """Blocks that an engine has pinned after a request ended."""

    request_id: str  # the engine's own, remote_request_id of the params
    params: dict[str, Any]  # the kv_transfer_params that the engine returns
    tokens: Sequence[int]  # kept by reference and read later: never change it again
    num_tokens: int  # the first so many have KV
    hold_seconds: float  # the engine's own, from now; less is reported
    cuttable: bool  # all KV-cache groups are full attention
    tenant_id: str = ""
    session_id: str = ""
    turn: int = 0
    for_decode: bool = False  # a prefill's blocks, for the decode of the same turn
    salt: str = ""  # cache_salt
    adapter: str = ""  # LoRA name


@dataclass(frozen=True, slots=True)
class HoldLonger:
    """Keep the blocks of `request_id` for at least `seconds` from now."""

    request_id: str
    seconds: float
    command_id: str = ""


@dataclass(frozen=True, slots=True)
class FreeNow:
    """Unpin the blocks of `request_id` now."""

    request_id: str
    command_id: str = ""


Order = HoldLonger | FreeNow


@dataclass(slots=True)
class Item:
    """One pinned request. `message` is there once its digests are."""

    held: Held
    until: float  # the engine's own deadline
    message: lease.Ownership | None = None
    sent: bool = False
    refused: bool = False  # never reported: nobody wants it, or the control plane does not


@dataclass(slots=True)
class _Command:
    message: lease.Command
    until: float  # of a HoldLonger
    done: bool | None = None  # None: the engine has not answered
    held_until: float = 0.0


def duration(seconds: float) -> Duration:
    """Return it as a proto, never negative."""
    return Duration(nanos=0) if seconds <= 0 else _duration(seconds)


def _duration(seconds: float) -> Duration:
    whole = int(seconds)
    return Duration(seconds=whole, nanos=int((seconds - whole) * 1e9))


def seconds(value: Duration) -> float:
    """Return a proto's seconds."""
    return float(value.seconds) + float(value.nanos) / 1e9


class Holdings:
    """The table of pinned requests and of commands about them."""

    def __init__(self, identity: WorkerIdentity, config: AgentConfig, clock: Clock) -> None:
        self._identity, self._config, self._clock = identity, config, clock
        self._lock = threading.Lock()
        self._items: dict[str, Item] = {}
        self._orders: list[Order] = []
        self._commands: OrderedDict[str, _Command] = OrderedDict()

    # -- the engine's thread ------------------------------------------------------

    def add(self, held: Held) -> bool:
        """Note a new one; return whether it is to be reported.

        What nobody can come back to is to be freed, and not reported.
        """
        until = self._clock.monotonic() + held.hold_seconds
        wanted = held.for_decode or bool(held.session_id)
        with self._lock:
            self._items[held.request_id] = Item(held, until, refused=not wanted)
            if not wanted:
                self._orders.append(FreeNow(held.request_id))
        return wanted

    def remove(self, request_ids: Iterable[str]) -> list[str]:
        """Forget them; return those that the control plane may have heard of."""
        with self._lock:
            gone = [(ident, self._items.pop(ident, None)) for ident in request_ids]
        return [ident for ident, item in gone if item is not None and item.sent]

    def take_orders(self) -> list[Order]:
        """Return what is new."""
        if not self._orders:
            return []
        with self._lock:
            orders, self._orders = self._orders, []
            now = self._clock.monotonic()
            live = [self._age(order, now) for order in orders if order.request_id in self._items]
            for order in orders:
                command = self._commands.get(order.command_id)
                if command is not None and order.request_id not in self._items:
                    command.done = False  # freed meanwhile; the next repetition is answered
            return live

    def _age(self, order: Order, now: float) -> Order:
        command = self._commands.get(order.command_id)
        if isinstance(order, HoldLonger) and command is not None:
            return HoldLonger(order.request_id, max(command.until - now, 0.0), order.command_id)
        return order

    def answered(self, order: Order, done: bool, hold_seconds: float) -> str | None:
        """Note the engine's answer; return the id of a command to acknowledge."""
        now = self._clock.monotonic()
        with self._lock:
            item = self._items.get(order.request_id)
            if done and item is not None and isinstance(order, HoldLonger):
                item.until = max(item.until, now + hold_seconds)
            command = self._commands.get(order.command_id)
            if command is None:
                return None
            command.done, command.held_until = done, now + hold_seconds
            return order.command_id

    def __len__(self) -> int:
        return len(self._items)

    # -- the background thread ----------------------------------------------------

    def unprepared(self) -> list[Item]:
        """Return those whose digests are still to be made, oldest first."""
        with self._lock:
            items = self._items.values()
            return [item for item in items if item.message is None and not item.refused]

    def still_held(self, item: Item) -> bool:
        """Return whether it is the one that is held now."""
        return self._items.get(item.held.request_id) is item

    def prepare(self, item: Item, digests: bytes) -> None:
        """Make its message. Raises InvalidField for params that no reader could use."""
        held = item.held
        params = {k: v for k, v in held.params.items() if k != "kvplane"}
        item.message = lease.Ownership(
            tenant_id=held.tenant_id,
            session_id=held.session_id,
            turn=held.turn,
            worker_id=self._identity.worker_id,
            params=kv_params.from_dict(params),
            num_tokens=held.num_tokens,
            block_size=self._identity.block_size,
            digests=digests,
            compatibility=self._identity.compatibility,
            cuttable=held.cuttable,
            for_decode=held.for_decode,
        )

    def drop(self, item: Item) -> None:
        """Forget one that cannot be reported; the engine lets it run out."""
        with self._lock:
            if self._items.get(item.held.request_id) is item:
                del self._items[item.held.request_id]

    def never_report(self, request_ids: Iterable[str]) -> None:
        """The control plane refused them; the engine lets them run out."""
        with self._lock:
            for ident in request_ids:
                if ident in self._items:
                    self._items[ident].refused = True

    def reports(self, epoch: int, *, again: bool) -> list[lease.Ownership]:
        """Return messages with what is left of each hold, and take them as sent.

        `again`: all that are held, after a reconnect; otherwise only the new ones.
        """
        now = self._clock.monotonic()
        messages: list[lease.Ownership] = []
        with self._lock:
            for item in self._items.values():
                if item.message is None or item.refused or (item.sent and not again):
                    continue
                left = item.until - now - self._config.hold_margin_seconds
                if left <= 0:
                    continue
                item.sent = True
                item.message.epoch = epoch
                item.message.hold.CopyFrom(duration(left))
                messages.append(item.message)
        return messages

    def handles(self) -> list[lease.OwnedHandle]:
        """Return all that is held, for Hello."""
        with self._lock:
            return [self.handle(ident) for ident in self._items]

    @property
    def limit_blocks(self) -> int:
        """How many blocks may be held, 0 where the engine's number is not known."""
        blocks = self._identity.num_blocks
        return max(int(blocks * self._config.max_held_share), 1) if blocks else 0

    def handle(self, request_id: str) -> lease.OwnedHandle:
        """Return a request's name."""
        return lease.OwnedHandle(engine_id=self._identity.engine_id, request_id=request_id)

    def command(self, message: lease.Command) -> str | None:
        """Take an order in; return its id when there is an answer already."""
        ident, request_id = message.command_id, message.handle.request_id
        with self._lock:
            known = self._commands.get(ident)
            if known is not None:
                return None if known.done is None else ident
            now = self._clock.monotonic()
            until = now + seconds(message.hold_longer.hold)
            command = self._commands[ident] = _Command(message, until)
            while len(self._commands) > _REMEMBERED_COMMANDS:
                self._commands.popitem(last=False)
            here = message.handle.engine_id == self._identity.engine_id
            if not here or request_id not in self._items:
                command.done = False
                return ident
            if message.WhichOneof("order") == "hold_longer":
                self._orders.append(HoldLonger(request_id, until - now, ident))
            else:
                self._orders.append(FreeNow(request_id, ident))
        return None

    def acknowledgement(self, command_id: str, anchor: lease.TimeAnchor) -> lease.CommandAck | None:
        """Return the answer to a command as it is now."""
        with self._lock:
            command = self._commands.get(command_id)
            if command is None or command.done is None:
                return None
            ack = lease.CommandAck(command_id=command_id, time_anchor=anchor, done=command.done)
            left = command.held_until - self._clock.monotonic() - self._config.hold_margin_seconds
            if command.message.WhichOneof("order") == "hold_longer" and command.done:
                ack.hold.CopyFrom(duration(left))
            return ack
