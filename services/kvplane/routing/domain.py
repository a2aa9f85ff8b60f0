"""Workers as values, and what may happen to them. Nothing here reads a clock or a database."""

import dataclasses
from dataclasses import dataclass
from enum import IntEnum

from kvplane.kernel.compat import compatibility_key
from kvplane.kernel.errors import IllegalTransition, InvalidField, StaleEpoch

DEFAULT_RECOMPUTE_THRESHOLD = 64


@dataclass(frozen=True, slots=True)
class RoutingConfig:
    """Bounds and intervals. The suffix of a name is its unit.

    Raises ValueError naming the setting that cannot work.
    """

    heartbeat_interval_s: float = 1.0
    # Silent for longer than this: lost. Also the grace after a start or an outage.
    worker_timeout_s: float = 5.0
    sweep_interval_s: float = 1.0
    # A session leaves its decode worker when another has this many requests less.
    load_gap_requests: int = 8
    snapshot_age_s: float = 0.2
    session_bound_s: float = 0.3
    lease_bound_s: float = 0.3
    # For a report of the turn before that has not arrived yet.
    report_wait_s: float = 0.25
    # For the router's own storage, in Route.
    store_bound_s: float = 1.0
    # How long a Route can be asked for again.
    route_kept_s: float = 600.0

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            if getattr(self, field.name) < 0:
                raise ValueError(f"{field.name}: must not be negative")
        if not 0 < self.heartbeat_interval_s < self.worker_timeout_s / 2:
            raise ValueError("heartbeat_interval_s: must be less than half of worker_timeout_s")
        if not self.sweep_interval_s:
            raise ValueError("sweep_interval_s: must be more than 0")


class Role(IntEnum):
    """What a worker does; the numbers are the proto's."""

    PREFILL = 1
    DECODE = 2
    BOTH = 3


class State(IntEnum):
    """Whether it does it; the numbers are the proto's."""

    READY = 1
    DRAINING = 2
    LOST = 3


@dataclass(frozen=True, slots=True)
class Compatibility:
    """What two workers must share to read each other's KV."""

    model: str
    revision: str
    block_size: int
    kv_layout: str
    kv_dtype: str
    engine_version: str

    def key(self) -> str:
        """Return the one string that leases compare."""
        return compatibility_key(
            model=self.model,
            revision=self.revision,
            block_size=self.block_size,
            kv_layout=self.kv_layout,
            kv_dtype=self.kv_dtype,
            engine_version=self.engine_version,
        )


@dataclass(frozen=True, slots=True)
class Load:
    """What an engine last said of itself. `kv_usage` is from 0 to 1."""

    running: int = 0
    waiting: int = 0
    kv_usage: float = 0.0
    held: int = 0


@dataclass(frozen=True, slots=True)
class Profile:
    """What a worker says of itself when it registers."""

    worker_id: str
    role: Role
    url: str
    kv_host: str
    kv_port: int
    engine_id: str
    data_parallel_rank: int | None
    compatibility: Compatibility
    bidirectional: bool
    managed: bool
    max_model_len: int
    recompute_threshold: int
    served_models: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Worker:
    """One engine, or one DP rank of it, as the registry knows it."""

    profile: Profile
    instance_id: str
    epoch: int
    state: State
    load: Load
    # By the clock that all replicas share.
    last_beat_us: int
    # Epochs below `void_below` have ended; the lease service has heard of those
    # below `voided_below`. They differ while it is away.
    void_below: int
    voided_below: int

    @property
    def worker_id(self) -> str:
        """The stable name."""
        return self.profile.worker_id


def register(
    known: Worker | None, profile: Profile, instance_id: str, now_us: int, seen: int = 0
) -> Worker:
    """Begin an epoch, or go on with it when the same process comes back.

    A process that was declared lost gets a new epoch: what it owned is void already. `seen`
    is the highest epoch that the worker has heard of: a registry that was emptied or put
    back to an older state must not begin one again that has ended.
    """
    if known is None:
        epoch = seen + 1
        return Worker(profile, instance_id, epoch, State.READY, Load(), now_us, epoch, 1)
    same = known.instance_id == instance_id and known.epoch >= seen
    if same and known.state is not State.LOST:
        return dataclasses.replace(known, profile=profile, last_beat_us=now_us)
    epoch = max(known.epoch, seen) + 1
    return dataclasses.replace(
        known,
        profile=profile,
        instance_id=instance_id,
        epoch=epoch,
        state=State.READY,
        load=Load(),
        last_beat_us=now_us,
        void_below=max(known.void_below, epoch),
    )


def knows(worker: Worker | None, epoch: int) -> bool:
    """Tell whether a beat of that epoch keeps this worker alive."""
    return worker is not None and worker.epoch == epoch and worker.state is not State.LOST


def drain(worker: Worker, *, undo: bool) -> Worker:
    """Take a worker out of service, or back into it. Repeating changes nothing.

    Raises IllegalTransition for a lost one.
    """
    if worker.state is State.LOST:
        wanted = "take it back into service" if undo else "drain it"
        raise IllegalTransition("worker", worker.worker_id, worker.state.name, wanted)
    return dataclasses.replace(worker, state=State.READY if undo else State.DRAINING)


def deregister(worker: Worker, epoch: int) -> Worker:
    """End the epoch at the worker's word. Repeating changes nothing.

    Raises StaleEpoch when the worker has registered again since.
    """
    if epoch < worker.epoch:
        raise StaleEpoch(worker.worker_id, epoch)
    if epoch > worker.epoch:
        raise InvalidField("epoch", f"the worker is at {worker.epoch}, not at {epoch}")
    return lose(worker)


def lose(worker: Worker) -> Worker:
    """End the epoch: everything that it owned or read is void."""
    return dataclasses.replace(
        worker, state=State.LOST, void_below=max(worker.void_below, worker.epoch + 1)
    )
