"""Memory and the way to it: what blocks hold, reads block by block, notifications."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kvplane.worker.agent import Held, Permit

from simulation.loop import Process, VirtualLoop

if TYPE_CHECKING:
    from simulation.engine import Engine

BLOCK = 4


class Contents:
    """Names for what a block may hold: the tokens in it and all before them."""

    def __init__(self) -> None:
        self._names: dict[tuple[Any, ...], int] = {}

    def name(self, before: int, tokens: tuple[Any, ...]) -> int:
        """Return the one number of this content."""
        return self._names.setdefault((before, tokens), len(self._names) + 1)

    def of(self, space: tuple[str, str], tokens: list[int]) -> list[int]:
        """Return the contents of the blocks of `tokens`, under an engine's kind and salt."""
        before, names = self.name(0, space), []
        for start in range(0, len(tokens), BLOCK):
            before = self.name(before, tuple(tokens[start : start + BLOCK]))
            names.append(before)
        return names


@dataclass
class Request:
    """One request, in one engine."""

    ident: str
    tokens: list[int]
    params: dict[str, Any]
    max_tokens: int
    salt: str
    answer: asyncio.Future[dict[str, Any]]
    leg: str = "whole"
    stage: str = "none"  # none, asked, reading, done
    blocks: list[int] = field(default_factory=list)
    ready_at: float | None = None  # computing: when it is done
    read_tokens: int = 0
    finished: bool = False

    @property
    def tag(self) -> dict[str, Any]:
        """Our own key."""
        return self.params.get("kvplane") or {}


@dataclass
class Transfer:
    """A read on its way."""

    request: Request
    owner: tuple[str, str]  # engine id, request id
    expected: list[int]
    captured: list[int] = field(default_factory=list)
    local: list[int] = field(default_factory=list)
    tenant: str = ""
    failed: bool = False
    done: bool = False


class Fabric:
    """NIXL: reads another engine's memory block by block, then notifies it."""

    def __init__(self, loop: VirtualLoop, rng: random.Random) -> None:
        self._loop, self._rng = loop, rng
        self.engines: dict[str, Engine] = {}  # by address
        self.nics: dict[str, Process] = {}
        self.lose_notifications = 0.0
        self.slow_chance, self.slow_s = 0.0, 0.0
        self.faults = 0

    def start(
        self,
        reader: Engine,
        transfer: Transfer,
        params: dict[str, Any],
        ids: list[int],
        block_s: float,
    ) -> None:
        """Begin a read. It goes on while the reader's process is frozen."""
        nic = self.nics[reader.engine_id]
        self._loop.spawn(nic, self._run(reader, transfer, params, ids, block_s))

    async def _run(
        self,
        reader: Engine,
        transfer: Transfer,
        params: dict[str, Any],
        ids: list[int],
        block_s: float,
    ) -> None:
        rng = self._rng
        if rng.random() < self.slow_chance:
            block_s = self.slow_s / len(ids)
        for index, block in enumerate(ids):
            await asyncio.sleep(block_s * (0.5 + rng.random()))
            owner = self._owner(params)
            if owner is None:
                transfer.failed = True
                break
            held = owner.memory[block]
            transfer.captured.append(held)
            reader.memory[transfer.local[index]] = held
        transfer.done = True
        if not transfer.failed:
            self.notify(reader, params)
        self._loop.post(reader.process, reader.arrived, transfer)

    def notify(self, reader: Engine, params: dict[str, Any]) -> None:
        """Tell the owner that its blocks have been read."""
        owner = self._owner(params)
        if owner is None:
            return
        if self._rng.random() < self.lose_notifications:
            self.faults += 1
            owner.unnotified.add(params["remote_request_id"])
            return
        at = self._loop.time() + self._rng.random() * 0.01
        self._loop.post_at(at, owner.process, owner.notified, params["remote_request_id"])

    def _owner(self, params: dict[str, Any]) -> Engine | None:
        """Return who is read. NIXL's handshake refuses another engine at the same address."""
        owner = self.engines.get(params["remote_host"])
        if owner is None or not owner.up or owner.engine_id != params["remote_engine_id"]:
            return None
        return owner


class PlainAgent:
    """What today's proxies have: the last handle, no lease, no comparison."""

    plain = True

    def __init__(self) -> None:
        self._asked: dict[str, tuple[dict[str, Any], int]] = {}

    def begin_read(self, ident: str, tokens: list[int], *, plain: Any = None, **_: Any) -> None:
        if plain:
            self._asked[ident] = (plain, len(tokens))

    def poll_read(self, ident: str) -> Any:
        params, mine = self._asked.get(ident, (None, 0))
        if not params:
            return None
        count = min(params["remote_num_tokens"], mine)
        if count < params["remote_num_tokens"]:
            count -= count % BLOCK
        if count < 1:
            return None
        blocks = params["remote_block_ids"][0][: -(-count // BLOCK)]
        return Permit(count, {**params, "remote_block_ids": [blocks]})

    def read_started(self, ident: str) -> bool:
        return True

    def still_valid(self, ident: str) -> bool:
        return True

    def read_finished(self, ident: str, *, sent: bool, failed: bool = False) -> None: ...
    def abandon(self, ident: str) -> None: ...
    def report_held(self, held: Held) -> None: ...
    def report_freed(self, request_ids: Any) -> None: ...
    def order_done(self, order: Any, *, done: bool, hold_seconds: float = 0.0) -> None: ...

    def take_orders(self) -> list[Any]:
        return []
