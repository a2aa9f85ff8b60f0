import datetime

from google.protobuf import duration_pb2 as _duration_pb2
from kvplane.api.lease.v1 import lease_pb2 as _lease_pb2
from kvplane.api.session.v1 import session_pb2 as _session_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class WorkerRole(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    WORKER_ROLE_UNSPECIFIED: _ClassVar[WorkerRole]
    WORKER_ROLE_PREFILL: _ClassVar[WorkerRole]
    WORKER_ROLE_DECODE: _ClassVar[WorkerRole]
    WORKER_ROLE_BOTH: _ClassVar[WorkerRole]

class WorkerState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    WORKER_STATE_UNSPECIFIED: _ClassVar[WorkerState]
    WORKER_STATE_READY: _ClassVar[WorkerState]
    WORKER_STATE_DRAINING: _ClassVar[WorkerState]
    WORKER_STATE_LOST: _ClassVar[WorkerState]

class Decision(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    DECISION_UNSPECIFIED: _ClassVar[Decision]
    DECISION_REUSE: _ClassVar[Decision]
    DECISION_RECOMPUTE: _ClassVar[Decision]

class DecisionReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    DECISION_REASON_UNSPECIFIED: _ClassVar[DecisionReason]
    DECISION_REASON_OWNER_HOLDS: _ClassVar[DecisionReason]
    DECISION_REASON_FIRST_TURN: _ClassVar[DecisionReason]
    DECISION_REASON_NOTHING_HELD: _ClassVar[DecisionReason]
    DECISION_REASON_ALREADY_LEASED: _ClassVar[DecisionReason]
    DECISION_REASON_EXPIRING: _ClassVar[DecisionReason]
    DECISION_REASON_INCOMPATIBLE: _ClassVar[DecisionReason]
    DECISION_REASON_BELOW_THRESHOLD: _ClassVar[DecisionReason]
    DECISION_REASON_OWNER_LOST: _ClassVar[DecisionReason]
    DECISION_REASON_OWNER_DRAINING: _ClassVar[DecisionReason]
    DECISION_REASON_NOT_BIDIRECTIONAL: _ClassVar[DecisionReason]
    DECISION_REASON_LEASE_SERVICE_UNAVAILABLE: _ClassVar[DecisionReason]
    DECISION_REASON_SESSION_SERVICE_UNAVAILABLE: _ClassVar[DecisionReason]
    DECISION_REASON_FORCED: _ClassVar[DecisionReason]
    DECISION_REASON_SINGLE_WORKER: _ClassVar[DecisionReason]
    DECISION_REASON_OWNER_OVERLOADED: _ClassVar[DecisionReason]
    DECISION_REASON_OVER_QUOTA: _ClassVar[DecisionReason]
WORKER_ROLE_UNSPECIFIED: WorkerRole
WORKER_ROLE_PREFILL: WorkerRole
WORKER_ROLE_DECODE: WorkerRole
WORKER_ROLE_BOTH: WorkerRole
WORKER_STATE_UNSPECIFIED: WorkerState
WORKER_STATE_READY: WorkerState
WORKER_STATE_DRAINING: WorkerState
WORKER_STATE_LOST: WorkerState
DECISION_UNSPECIFIED: Decision
DECISION_REUSE: Decision
DECISION_RECOMPUTE: Decision
DECISION_REASON_UNSPECIFIED: DecisionReason
DECISION_REASON_OWNER_HOLDS: DecisionReason
DECISION_REASON_FIRST_TURN: DecisionReason
DECISION_REASON_NOTHING_HELD: DecisionReason
DECISION_REASON_ALREADY_LEASED: DecisionReason
DECISION_REASON_EXPIRING: DecisionReason
DECISION_REASON_INCOMPATIBLE: DecisionReason
DECISION_REASON_BELOW_THRESHOLD: DecisionReason
DECISION_REASON_OWNER_LOST: DecisionReason
DECISION_REASON_OWNER_DRAINING: DecisionReason
DECISION_REASON_NOT_BIDIRECTIONAL: DecisionReason
DECISION_REASON_LEASE_SERVICE_UNAVAILABLE: DecisionReason
DECISION_REASON_SESSION_SERVICE_UNAVAILABLE: DecisionReason
DECISION_REASON_FORCED: DecisionReason
DECISION_REASON_SINGLE_WORKER: DecisionReason
DECISION_REASON_OWNER_OVERLOADED: DecisionReason
DECISION_REASON_OVER_QUOTA: DecisionReason

class Compatibility(_message.Message):
    __slots__ = ("model", "revision", "block_size", "kv_layout", "kv_dtype", "engine_version")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    KV_LAYOUT_FIELD_NUMBER: _ClassVar[int]
    KV_DTYPE_FIELD_NUMBER: _ClassVar[int]
    ENGINE_VERSION_FIELD_NUMBER: _ClassVar[int]
    model: str
    revision: str
    block_size: int
    kv_layout: str
    kv_dtype: str
    engine_version: str
    def __init__(self, model: _Optional[str] = ..., revision: _Optional[str] = ..., block_size: _Optional[int] = ..., kv_layout: _Optional[str] = ..., kv_dtype: _Optional[str] = ..., engine_version: _Optional[str] = ...) -> None: ...

class Load(_message.Message):
    __slots__ = ("running", "waiting", "kv_usage", "held")
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    KV_USAGE_FIELD_NUMBER: _ClassVar[int]
    HELD_FIELD_NUMBER: _ClassVar[int]
    running: int
    waiting: int
    kv_usage: float
    held: int
    def __init__(self, running: _Optional[int] = ..., waiting: _Optional[int] = ..., kv_usage: _Optional[float] = ..., held: _Optional[int] = ...) -> None: ...

class Worker(_message.Message):
    __slots__ = ("worker_id", "epoch", "role", "url", "kv_host", "kv_port", "engine_id", "data_parallel_rank", "compatibility", "bidirectional", "managed", "max_model_len", "recompute_threshold", "state", "load", "served_models", "silent_for")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    URL_FIELD_NUMBER: _ClassVar[int]
    KV_HOST_FIELD_NUMBER: _ClassVar[int]
    KV_PORT_FIELD_NUMBER: _ClassVar[int]
    ENGINE_ID_FIELD_NUMBER: _ClassVar[int]
    DATA_PARALLEL_RANK_FIELD_NUMBER: _ClassVar[int]
    COMPATIBILITY_FIELD_NUMBER: _ClassVar[int]
    BIDIRECTIONAL_FIELD_NUMBER: _ClassVar[int]
    MANAGED_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    RECOMPUTE_THRESHOLD_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    SERVED_MODELS_FIELD_NUMBER: _ClassVar[int]
    SILENT_FOR_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    epoch: int
    role: WorkerRole
    url: str
    kv_host: str
    kv_port: int
    engine_id: str
    data_parallel_rank: int
    compatibility: Compatibility
    bidirectional: bool
    managed: bool
    max_model_len: int
    recompute_threshold: int
    state: WorkerState
    load: Load
    served_models: _containers.RepeatedScalarFieldContainer[str]
    silent_for: _duration_pb2.Duration
    def __init__(self, worker_id: _Optional[str] = ..., epoch: _Optional[int] = ..., role: _Optional[_Union[WorkerRole, str]] = ..., url: _Optional[str] = ..., kv_host: _Optional[str] = ..., kv_port: _Optional[int] = ..., engine_id: _Optional[str] = ..., data_parallel_rank: _Optional[int] = ..., compatibility: _Optional[_Union[Compatibility, _Mapping]] = ..., bidirectional: bool = ..., managed: bool = ..., max_model_len: _Optional[int] = ..., recompute_threshold: _Optional[int] = ..., state: _Optional[_Union[WorkerState, str]] = ..., load: _Optional[_Union[Load, _Mapping]] = ..., served_models: _Optional[_Iterable[str]] = ..., silent_for: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class RegisterWorkerRequest(_message.Message):
    __slots__ = ("worker", "instance_id")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    worker: Worker
    instance_id: str
    def __init__(self, worker: _Optional[_Union[Worker, _Mapping]] = ..., instance_id: _Optional[str] = ...) -> None: ...

class RegisterWorkerResponse(_message.Message):
    __slots__ = ("worker", "heartbeat_interval")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_INTERVAL_FIELD_NUMBER: _ClassVar[int]
    worker: Worker
    heartbeat_interval: _duration_pb2.Duration
    def __init__(self, worker: _Optional[_Union[Worker, _Mapping]] = ..., heartbeat_interval: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class HeartbeatRequest(_message.Message):
    __slots__ = ("beats",)
    BEATS_FIELD_NUMBER: _ClassVar[int]
    beats: _containers.RepeatedCompositeFieldContainer[WorkerBeat]
    def __init__(self, beats: _Optional[_Iterable[_Union[WorkerBeat, _Mapping]]] = ...) -> None: ...

class WorkerBeat(_message.Message):
    __slots__ = ("worker_id", "epoch", "load")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    epoch: int
    load: Load
    def __init__(self, worker_id: _Optional[str] = ..., epoch: _Optional[int] = ..., load: _Optional[_Union[Load, _Mapping]] = ...) -> None: ...

class HeartbeatResponse(_message.Message):
    __slots__ = ("results",)
    RESULTS_FIELD_NUMBER: _ClassVar[int]
    results: _containers.RepeatedCompositeFieldContainer[BeatResult]
    def __init__(self, results: _Optional[_Iterable[_Union[BeatResult, _Mapping]]] = ...) -> None: ...

class BeatResult(_message.Message):
    __slots__ = ("worker_id", "known", "state")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    KNOWN_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    known: bool
    state: WorkerState
    def __init__(self, worker_id: _Optional[str] = ..., known: bool = ..., state: _Optional[_Union[WorkerState, str]] = ...) -> None: ...

class DrainWorkerRequest(_message.Message):
    __slots__ = ("worker_id", "undo")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    UNDO_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    undo: bool
    def __init__(self, worker_id: _Optional[str] = ..., undo: bool = ...) -> None: ...

class DrainWorkerResponse(_message.Message):
    __slots__ = ("worker",)
    WORKER_FIELD_NUMBER: _ClassVar[int]
    worker: Worker
    def __init__(self, worker: _Optional[_Union[Worker, _Mapping]] = ...) -> None: ...

class DeregisterWorkerRequest(_message.Message):
    __slots__ = ("worker_id", "epoch")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    epoch: int
    def __init__(self, worker_id: _Optional[str] = ..., epoch: _Optional[int] = ...) -> None: ...

class DeregisterWorkerResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetWorkerRequest(_message.Message):
    __slots__ = ("worker_id",)
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    def __init__(self, worker_id: _Optional[str] = ...) -> None: ...

class GetWorkerResponse(_message.Message):
    __slots__ = ("worker",)
    WORKER_FIELD_NUMBER: _ClassVar[int]
    worker: Worker
    def __init__(self, worker: _Optional[_Union[Worker, _Mapping]] = ...) -> None: ...

class ListWorkersRequest(_message.Message):
    __slots__ = ("role", "states", "model", "page_size", "page_token")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    STATES_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    role: WorkerRole
    states: _containers.RepeatedScalarFieldContainer[WorkerState]
    model: str
    page_size: int
    page_token: str
    def __init__(self, role: _Optional[_Union[WorkerRole, str]] = ..., states: _Optional[_Iterable[_Union[WorkerState, str]]] = ..., model: _Optional[str] = ..., page_size: _Optional[int] = ..., page_token: _Optional[str] = ...) -> None: ...

class ListWorkersResponse(_message.Message):
    __slots__ = ("workers", "next_page_token")
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    workers: _containers.RepeatedCompositeFieldContainer[Worker]
    next_page_token: str
    def __init__(self, workers: _Optional[_Iterable[_Union[Worker, _Mapping]]] = ..., next_page_token: _Optional[str] = ...) -> None: ...

class RouteRequest(_message.Message):
    __slots__ = ("request_id", "session", "model", "prompt_tokens_estimate", "exclude_worker_ids", "force_recompute", "request_bytes")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_ESTIMATE_FIELD_NUMBER: _ClassVar[int]
    EXCLUDE_WORKER_IDS_FIELD_NUMBER: _ClassVar[int]
    FORCE_RECOMPUTE_FIELD_NUMBER: _ClassVar[int]
    REQUEST_BYTES_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    session: _session_pb2.SessionKey
    model: str
    prompt_tokens_estimate: int
    exclude_worker_ids: _containers.RepeatedScalarFieldContainer[str]
    force_recompute: bool
    request_bytes: int
    def __init__(self, request_id: _Optional[str] = ..., session: _Optional[_Union[_session_pb2.SessionKey, _Mapping]] = ..., model: _Optional[str] = ..., prompt_tokens_estimate: _Optional[int] = ..., exclude_worker_ids: _Optional[_Iterable[str]] = ..., force_recompute: bool = ..., request_bytes: _Optional[int] = ...) -> None: ...

class Target(_message.Message):
    __slots__ = ("worker_id", "epoch", "url", "headers", "managed")
    class HeadersEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    URL_FIELD_NUMBER: _ClassVar[int]
    HEADERS_FIELD_NUMBER: _ClassVar[int]
    MANAGED_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    epoch: int
    url: str
    headers: _containers.ScalarMap[str, str]
    managed: bool
    def __init__(self, worker_id: _Optional[str] = ..., epoch: _Optional[int] = ..., url: _Optional[str] = ..., headers: _Optional[_Mapping[str, str]] = ..., managed: bool = ...) -> None: ...

class RouteResponse(_message.Message):
    __slots__ = ("session_id", "turn", "prefill", "decode", "decision", "reason", "prefill_params", "decode_params", "lease", "held_tokens")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    TURN_FIELD_NUMBER: _ClassVar[int]
    PREFILL_FIELD_NUMBER: _ClassVar[int]
    DECODE_FIELD_NUMBER: _ClassVar[int]
    DECISION_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    PREFILL_PARAMS_FIELD_NUMBER: _ClassVar[int]
    DECODE_PARAMS_FIELD_NUMBER: _ClassVar[int]
    LEASE_FIELD_NUMBER: _ClassVar[int]
    HELD_TOKENS_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    turn: int
    prefill: Target
    decode: Target
    decision: Decision
    reason: DecisionReason
    prefill_params: _lease_pb2.KvTransferParams
    decode_params: _lease_pb2.KvTransferParams
    lease: _lease_pb2.Lease
    held_tokens: int
    def __init__(self, session_id: _Optional[str] = ..., turn: _Optional[int] = ..., prefill: _Optional[_Union[Target, _Mapping]] = ..., decode: _Optional[_Union[Target, _Mapping]] = ..., decision: _Optional[_Union[Decision, str]] = ..., reason: _Optional[_Union[DecisionReason, str]] = ..., prefill_params: _Optional[_Union[_lease_pb2.KvTransferParams, _Mapping]] = ..., decode_params: _Optional[_Union[_lease_pb2.KvTransferParams, _Mapping]] = ..., lease: _Optional[_Union[_lease_pb2.Lease, _Mapping]] = ..., held_tokens: _Optional[int] = ...) -> None: ...

class CompleteRequest(_message.Message):
    __slots__ = ("turn",)
    TURN_FIELD_NUMBER: _ClassVar[int]
    turn: _session_pb2.CompleteTurnRequest
    def __init__(self, turn: _Optional[_Union[_session_pb2.CompleteTurnRequest, _Mapping]] = ...) -> None: ...

class CompleteResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
