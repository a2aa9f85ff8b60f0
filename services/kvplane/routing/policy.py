"""Where a turn goes, as pure functions over a snapshot of the workers."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from enum import IntEnum

from kvplane.routing.domain import Compatibility, Role, State, Worker


class Reason(IntEnum):
    """Why a turn reuses or recomputes; the numbers are the proto's."""

    OWNER_HOLDS = 1
    FIRST_TURN = 2
    NOTHING_HELD = 3
    ALREADY_LEASED = 4
    EXPIRING = 5
    INCOMPATIBLE = 6
    BELOW_THRESHOLD = 7
    OWNER_LOST = 8
    OWNER_DRAINING = 9
    NOT_BIDIRECTIONAL = 10
    LEASE_SERVICE_UNAVAILABLE = 11
    SESSION_SERVICE_UNAVAILABLE = 12
    FORCED = 13
    SINGLE_WORKER = 14
    OWNER_OVERLOADED = 15
    OVER_QUOTA = 16


@dataclass(frozen=True, slots=True)
class Turn:
    """What the session registry says of the turn that is to be routed."""

    # Empty, and `turn` 0, when the tenant is beyond a soft limit.
    session_id: str
    turn: int
    # The worker that decoded last, empty when there is none.
    last_decode: str
    # The turn before ended well; its report may still be under way.
    previous_completed: bool


@dataclass(frozen=True, slots=True)
class Pool:
    """The workers that may serve one model now, by what they can do."""

    workers: Mapping[str, Worker]
    decode: tuple[str, ...]
    prefill: tuple[str, ...]
    prefill_by_compatibility: Mapping[Compatibility, tuple[str, ...]]
    # Decode workers that some other worker can prefill for.
    paired: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Choice:
    """The workers of a turn."""

    decode: Worker
    # None: the decode worker does the whole request.
    prefill: Worker | None
    # The session had to leave its decode worker because of its load.
    owner_overloaded: bool


def make_pool(workers: Iterable[Worker], model: str, exclude: Collection[str] = ()) -> Pool:
    """Sort out who may serve `model`: ready, serving that name, not excluded."""
    fit = {
        w.worker_id: w
        for w in workers
        if w.state is State.READY
        and model in w.profile.served_models
        and w.worker_id not in exclude
    }
    decode = tuple(i for i, w in fit.items() if w.profile.role is not Role.PREFILL)
    prefill = tuple(i for i, w in fit.items() if w.profile.role is not Role.DECODE)
    groups: dict[Compatibility, tuple[str, ...]] = {}
    for ident in prefill:
        key = fit[ident].profile.compatibility
        groups[key] = (*groups.get(key, ()), ident)
    paired = tuple(
        i for i in decode if set(groups.get(fit[i].profile.compatibility, ())).difference((i,))
    )
    return Pool(fit, decode, prefill, groups, paired)


def choose(
    pool: Pool,
    loads: Mapping[str, int],
    chosen_decode: Mapping[str, int],
    chosen_prefill: Mapping[str, int],
    *,
    last_decode: str,
    gap: int,
) -> Choice | None:
    """Pick the workers of a turn; None when nobody is there.

    `loads` has the requests of every worker of the pool. `chosen_decode` and
    `chosen_prefill` say of each when it was last chosen, as a number that grows with each
    choice and begins at 0: among equally loaded workers the one that has waited longest
    is next, so that one-at-a-time traffic spreads too.

    The session stays with `last_decode` unless that has more than `gap` requests more
    than the least loaded. Without a decode worker one that prefills does it all.
    """
    candidates = pool.decode or pool.prefill
    if not candidates:
        return None
    preferred = pool.paired or candidates
    decode, overloaded = "", False
    if last_decode in pool.workers and last_decode in candidates:
        overloaded = loads[last_decode] - min(map(loads.__getitem__, preferred)) > gap
        decode = "" if overloaded else last_decode
    decode = decode or _least_loaded(preferred, loads, chosen_decode)
    worker = pool.workers[decode]
    prefill: Worker | None = None
    if pool.decode:
        partners = pool.prefill_by_compatibility.get(worker.profile.compatibility, ())
        if worker.profile.role is Role.BOTH:
            partners = tuple(i for i in partners if i != decode)
        if partners:
            prefill = pool.workers[_least_loaded(partners, loads, chosen_prefill)]
    return Choice(worker, prefill, overloaded)


def obstacle(
    choice: Choice,
    turn: Turn | None,
    owner: Worker | None,
    *,
    exclude: Collection[str] = (),
    force_recompute: bool = False,
) -> Reason | None:
    """Return why a lease is not even asked for; None when it should be.

    `turn` is None while the session registry is away. `owner` is the session's last
    decode worker if that is alive. A draining one can still be read.
    """
    if turn is None:
        return Reason.SESSION_SERVICE_UNAVAILABLE
    if not turn.session_id:
        return Reason.OVER_QUOTA
    if choice.prefill is None:
        return Reason.SINGLE_WORKER
    if turn.turn <= 1:
        return Reason.FIRST_TURN
    if force_recompute:
        return Reason.FORCED
    if turn.last_decode and (owner is None or turn.last_decode in exclude):
        return Reason.OWNER_LOST
    if choice.owner_overloaded:
        return Reason.OWNER_OVERLOADED
    if not choice.prefill.profile.bidirectional:
        return Reason.NOT_BIDIRECTIONAL
    return owner_obstacle(choice.prefill, owner) if owner is not None else None


def owner_obstacle(prefill: Worker, owner: Worker) -> Reason | None:
    """Return why `prefill` cannot read what `owner` holds; None when it can."""
    if owner.worker_id == prefill.worker_id:
        # It has in its own cache what it would read from itself.
        return Reason.NOTHING_HELD
    if not owner.profile.bidirectional:
        return Reason.NOT_BIDIRECTIONAL
    if owner.profile.compatibility != prefill.profile.compatibility:
        return Reason.INCOMPATIBLE
    return None


def _least_loaded(
    candidates: tuple[str, ...], loads: Mapping[str, int], chosen: Mapping[str, int]
) -> str:
    if len(candidates) == 1:
        return candidates[0]
    lowest = min(map(loads.__getitem__, candidates))
    return min([i for i in candidates if loads[i] == lowest], key=chosen.__getitem__)
