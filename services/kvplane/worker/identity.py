"""Who a worker is and how it reaches the control plane."""

from dataclasses import dataclass, field
from typing import Final

from kvplane.api.lease.v1 import lease_pb2 as lease
from kvplane.api.routing.v1 import routing_pb2 as routing
from kvplane.client.tls import TlsFiles
from kvplane.kernel.compat import compatibility_key
from kvplane.kernel.errors import InvalidField

ROLES: Final = {
    "prefill": routing.WORKER_ROLE_PREFILL,
    "decode": routing.WORKER_ROLE_DECODE,
    "both": routing.WORKER_ROLE_BOTH,
}


@dataclass(frozen=True, slots=True)
class WorkerIdentity:
    """What an engine (one DP rank) says of itself when it registers."""

    worker_id: str  # stable over restarts
    role: str  # prefill, decode or both
    url: str  # http://host:port of the engine
    kv_host: str  # NIXL side channel
    kv_port: int
    engine_id: str
    model: str
    block_size: int  # tokens
    revision: str = ""
    kv_layout: str = "default"
    kv_dtype: str = "auto"
    engine_version: str = "unknown"
    served_models: tuple[str, ...] = ()  # empty: the model's own name
    data_parallel_rank: int | None = None
    bidirectional: bool = True
    max_model_len: int = 0
    recompute_threshold: int = 64  # tokens
    num_blocks: int = 0  # of its pool; 0: unknown

    def __post_init__(self) -> None:
        if self.role not in ROLES:
            raise InvalidField("role", f"must be one of {', '.join(ROLES)}, not {self.role!r}")
        if self.block_size < 1:
            raise InvalidField("block_size", "must be at least 1")

    @property
    def compatibility(self) -> str:
        """What a peer must share with it, as one string."""
        return compatibility_key(
            model=self.model,
            revision=self.revision,
            block_size=self.block_size,
            kv_layout=self.kv_layout,
            kv_dtype=self.kv_dtype,
            engine_version=self.engine_version,
        )

    def registration(self) -> routing.Worker:
        """Return the message for RegisterWorker."""
        worker = routing.Worker(
            worker_id=self.worker_id,
            role=ROLES[self.role],
            url=self.url,
            kv_host=self.kv_host,
            kv_port=self.kv_port,
            engine_id=self.engine_id,
            compatibility=routing.Compatibility(
                model=self.model,
                revision=self.revision,
                block_size=self.block_size,
                kv_layout=self.kv_layout,
                kv_dtype=self.kv_dtype,
                engine_version=self.engine_version,
            ),
            bidirectional=self.bidirectional,
            managed=True,
            max_model_len=self.max_model_len,
            recompute_threshold=self.recompute_threshold,
            served_models=self.served_models or (self.model,),
        )
        if self.data_parallel_rank is not None:
            worker.data_parallel_rank = self.data_parallel_rank
        return worker

    def holder(self, epoch: int) -> lease.Holder:
        """Return it as the holder of a lease."""
        return lease.Holder(worker_id=self.worker_id, epoch=epoch, compatibility=self.compatibility)


@dataclass(frozen=True)
class AgentConfig:
    """Where the control plane is and how long to wait for it."""

    routing: str  # host:port of the worker registry
    lease: str  # host:port of the lease service, may be the same
    token: str | None = field(default=None, repr=False)
    tls: TlsFiles | None = None  # they can be read, see kvplane.client.tls.load
    begin_wait_seconds: float = 0.3  # for BeginRead of a lease that was granted already
    grant_wait_seconds: float = 0.5  # for a grant by handle, with the wait for its report
    read_limit_seconds: float = 30.0  # a read that takes longer is given up
    lease_ttl_seconds: float = 10.0
    max_held_share: float = 0.75  # of its blocks that may be held; the cheapest beyond are freed
    hold_margin_seconds: float = 1.0  # an engine holds longer than it reports, by this
    call_timeout_seconds: float = 2.0
