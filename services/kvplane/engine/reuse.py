"""Who may read what: the seam between the engine and the lease work."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from kvplane.engine.faults import Faults
from kvplane.engine.pool import Pins
from kvplane.engine.stats import Stats

Params = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Grant:
    """Leave to read: with these kv_transfer_params, at most so many tokens."""

    params: Params
    # None: what params say is believed.
    num_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Holding:
    """A request that has ended and whose blocks are held for a reader."""

    request_id: str
    # Never changed again; the first `num_tokens` have KV.
    tokens: Sequence[int]
    num_tokens: int
    hold_s: float
    # What the request came with, and what it returns.
    asked: Params
    returned: Params
    salt: str = ""


class Reuse(Protocol):
    """What the engine asks and tells about reads and holds. Nothing here raises or blocks."""

    managed: bool

    async def permit(
        self, request_id: str, prompt: Sequence[int], params: Params, min_tokens: int, salt: str
    ) -> Grant | None:
        """Return leave to read, or None: compute, and send the owner nothing."""
        ...

    def started(self, request_id: str) -> bool:
        """Call right before a read or its notification is sent; False: do not send."""
        ...

    def still_valid(self, request_id: str) -> bool:
        """Return whether a permitted read may go on, and be used."""
        ...

    def finished(self, request_id: str, *, sent: bool, failed: bool = False) -> None:
        """Say that a permitted read is over, or will not be."""
        ...

    def ended(self, request_id: str) -> None:
        """Say that a request has ended and holds nothing; a read under way goes on."""
        ...

    def held(self, holding: Holding) -> None:
        """Say what is held now."""
        ...

    def freed(self, request_ids: Iterable[str]) -> None:
        """Say what is held no more: read, expired or ordered."""
        ...

    def carry_out_orders(self, pins: Pins, now: float, faults: Faults, stats: Stats) -> None:
        """Do what the control plane wants done with held blocks."""
        ...

    def load(self, running: int, waiting: int, usage: float) -> None:
        """Say how busy the engine is; `usage` is 0 to 1."""
        ...


class Unmanaged:
    """No control plane: kv_transfer_params are believed, as plain vLLM does."""

    managed = False

    async def permit(
        self, request_id: str, prompt: Sequence[int], params: Params, min_tokens: int, salt: str
    ) -> Grant | None:
        """Believe them."""
        return Grant(params)

    def started(self, request_id: str) -> bool:
        """Go on."""
        return True

    def still_valid(self, request_id: str) -> bool:
        """Nobody would know."""
        return True

    def finished(self, request_id: str, *, sent: bool, failed: bool = False) -> None:
        """Tell nobody."""

    def ended(self, request_id: str) -> None:
        """Tell nobody."""

    def held(self, holding: Holding) -> None:
        """Tell nobody."""

    def freed(self, request_ids: Iterable[str]) -> None:
        """Tell nobody."""

    def carry_out_orders(self, pins: Pins, now: float, faults: Faults, stats: Stats) -> None:
        """There are none."""

    def load(self, running: int, waiting: int, usage: float) -> None:
        """Tell nobody."""
