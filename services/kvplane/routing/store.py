"""What storage must do for the registry and the router. Every method is one atomic step."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvplane.routing.domain import Load, Profile, Role, State, Worker


@dataclass(frozen=True, slots=True)
class Beat:
    """One worker's sign of life."""

    worker_id: str
    epoch: int
    load: Load


@dataclass(frozen=True, slots=True)
class BeatAnswer:
    """Whether the registry knew that worker in that epoch; `state` None for a stranger."""

    known: bool
    state: State | None


@dataclass(frozen=True, slots=True)
class Seen:
    """A worker and how long it had been silent when it was read."""

    worker: Worker
    silent_us: int


@dataclass(frozen=True, slots=True)
class WorkerFilter:
    """What to list; empty fields mean all."""

    role: Role | None = None
    states: tuple[State, ...] = ()
    model: str = ""


@dataclass(frozen=True, slots=True)
class Live:
    """All workers that are not lost, at one moment of the shared clock."""

    workers: tuple[Worker, ...]
    now_us: int


@dataclass(frozen=True, slots=True)
class Sweep:
    """What a sweep found: workers lost now, and epochs to be ended (id, current epoch)."""

    lost: tuple[str, ...]
    pending: tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True)
class RouteKey:
    """What makes two Route requests the same one.

    `attempt` differs when the caller excludes other workers or forbids reuse: that is a
    new question about the same turn, not the old one sent twice.
    """

    tenant_id: str
    request_id: str
    attempt: str


class WorkerStore(Protocol):
    """The registry's rows. Its clock is the one that all replicas share."""

    async def register(self, profile: Profile, instance_id: str, seen: int) -> Worker:
        """Apply `domain.register` to the worker's row, made if there is none.

        Raises AlreadyExists while another live worker has its engine id, or, as a plain one
        that says none, its side channel: readers would be sent to the other's blocks.
        """
        ...

    async def beat(self, beats: Sequence[Beat]) -> list[BeatAnswer]:
        """Note the beats of workers that are known in that epoch and not lost.

        Answers are in the order of `beats`; of two for one worker the later stays.
        """
        ...

    async def drain(self, worker_id: str, *, undo: bool) -> Seen:
        """Apply `domain.drain`. Raises NotFound, IllegalTransition."""
        ...

    async def deregister(self, worker_id: str, epoch: int) -> Worker:
        """Apply `domain.deregister`. Raises NotFound, StaleEpoch."""
        ...

    async def get(self, worker_id: str) -> Seen:
        """Read one. Raises NotFound."""
        ...

    async def page(self, wanted: WorkerFilter, after: str, limit: int) -> list[Seen]:
        """Read up to `limit` that match, by worker id, beginning after that id."""
        ...

    async def live(self) -> Live:
        """Read all that are not lost."""
        ...

    async def sweep(self, silent_us: int | None, in_time: Callable[[], bool]) -> Sweep:
        """Lose who has been silent for longer than `silent_us`; None loses nobody.

        Nor does an answer that was not `in_time`: what came in the meantime is not in it.
        `pending` are the workers (also from before, at most 100) of whose ended epochs
        the lease service has not heard.
        """
        ...

    async def voided(self, worker_id: str, current_epoch: int) -> None:
        """Note that the lease service has ended the epochs below `current_epoch`."""
        ...


class RouteStore(Protocol):
    """Answers of Route, kept so that a repeated request gets the first one's."""

    async def settle(self, key: RouteKey, answer: bytes) -> tuple[bytes, int]:
        """Keep `answer` unless there is one for that key already.

        Returns the one that counts and its age in microseconds, 0 when it is `answer`.
        """
        ...

    async def purge(self, kept_us: int) -> int:
        """Forget answers older than `kept_us`, some thousands at a time; return how many."""
        ...
