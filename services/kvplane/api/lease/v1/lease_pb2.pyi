import datetime

from google.protobuf import duration_pb2 as _duration_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class OwnershipState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    OWNERSHIP_STATE_UNSPECIFIED: _ClassVar[OwnershipState]
    OWNERSHIP_STATE_HELD: _ClassVar[OwnershipState]
    OWNERSHIP_STATE_LEASED: _ClassVar[OwnershipState]
    OWNERSHIP_STATE_CONSUMED: _ClassVar[OwnershipState]
    OWNERSHIP_STATE_EXPIRED: _ClassVar[OwnershipState]
    OWNERSHIP_STATE_RELEASED: _ClassVar[OwnershipState]
    OWNERSHIP_STATE_LOST: _ClassVar[OwnershipState]

class LeaseState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    LEASE_STATE_UNSPECIFIED: _ClassVar[LeaseState]
    LEASE_STATE_GRANTED: _ClassVar[LeaseState]
    LEASE_STATE_READING: _ClassVar[LeaseState]
    LEASE_STATE_CONSUMED: _ClassVar[LeaseState]
    LEASE_STATE_RELEASED: _ClassVar[LeaseState]
    LEASE_STATE_REVOKED: _ClassVar[LeaseState]
    LEASE_STATE_EXPIRED: _ClassVar[LeaseState]
    LEASE_STATE_LOST: _ClassVar[LeaseState]

class RefusalReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    REFUSAL_REASON_UNSPECIFIED: _ClassVar[RefusalReason]
    REFUSAL_REASON_NOT_HELD: _ClassVar[RefusalReason]
    REFUSAL_REASON_ALREADY_LEASED: _ClassVar[RefusalReason]
    REFUSAL_REASON_EXPIRING: _ClassVar[RefusalReason]
    REFUSAL_REASON_INCOMPATIBLE: _ClassVar[RefusalReason]
    REFUSAL_REASON_BELOW_THRESHOLD: _ClassVar[RefusalReason]
    REFUSAL_REASON_OWNER_LOST: _ClassVar[RefusalReason]
    REFUSAL_REASON_OVER_QUOTA: _ClassVar[RefusalReason]

class ReadOutcome(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    READ_OUTCOME_UNSPECIFIED: _ClassVar[ReadOutcome]
    READ_OUTCOME_CONSUMED: _ClassVar[ReadOutcome]
    READ_OUTCOME_UNUSED: _ClassVar[ReadOutcome]
    READ_OUTCOME_NEVER_BEGUN: _ClassVar[ReadOutcome]
OWNERSHIP_STATE_UNSPECIFIED: OwnershipState
OWNERSHIP_STATE_HELD: OwnershipState
OWNERSHIP_STATE_LEASED: OwnershipState
OWNERSHIP_STATE_CONSUMED: OwnershipState
OWNERSHIP_STATE_EXPIRED: OwnershipState
OWNERSHIP_STATE_RELEASED: OwnershipState
OWNERSHIP_STATE_LOST: OwnershipState
LEASE_STATE_UNSPECIFIED: LeaseState
LEASE_STATE_GRANTED: LeaseState
LEASE_STATE_READING: LeaseState
LEASE_STATE_CONSUMED: LeaseState
LEASE_STATE_RELEASED: LeaseState
LEASE_STATE_REVOKED: LeaseState
LEASE_STATE_EXPIRED: LeaseState
LEASE_STATE_LOST: LeaseState
REFUSAL_REASON_UNSPECIFIED: RefusalReason
REFUSAL_REASON_NOT_HELD: RefusalReason
REFUSAL_REASON_ALREADY_LEASED: RefusalReason
REFUSAL_REASON_EXPIRING: RefusalReason
REFUSAL_REASON_INCOMPATIBLE: RefusalReason
REFUSAL_REASON_BELOW_THRESHOLD: RefusalReason
REFUSAL_REASON_OWNER_LOST: RefusalReason
REFUSAL_REASON_OVER_QUOTA: RefusalReason
READ_OUTCOME_UNSPECIFIED: ReadOutcome
READ_OUTCOME_CONSUMED: ReadOutcome
READ_OUTCOME_UNUSED: ReadOutcome
READ_OUTCOME_NEVER_BEGUN: ReadOutcome

class KvTransferParams(_message.Message):
    __slots__ = ("do_remote_prefill", "do_remote_decode", "remote_block_ids", "remote_engine_id", "remote_request_id", "remote_host", "remote_port", "tp_size", "dcp_size", "pp_size", "remote_num_tokens", "remote_blocks_expiry_time", "remote_registration_generation", "transfer_mode", "extra_json")
    DO_REMOTE_PREFILL_FIELD_NUMBER: _ClassVar[int]
    DO_REMOTE_DECODE_FIELD_NUMBER: _ClassVar[int]
    REMOTE_BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    REMOTE_ENGINE_ID_FIELD_NUMBER: _ClassVar[int]
    REMOTE_REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    REMOTE_HOST_FIELD_NUMBER: _ClassVar[int]
    REMOTE_PORT_FIELD_NUMBER: _ClassVar[int]
    TP_SIZE_FIELD_NUMBER: _ClassVar[int]
    DCP_SIZE_FIELD_NUMBER: _ClassVar[int]
    PP_SIZE_FIELD_NUMBER: _ClassVar[int]
    REMOTE_NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    REMOTE_BLOCKS_EXPIRY_TIME_FIELD_NUMBER: _ClassVar[int]
    REMOTE_REGISTRATION_GENERATION_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_MODE_FIELD_NUMBER: _ClassVar[int]
    EXTRA_JSON_FIELD_NUMBER: _ClassVar[int]
    do_remote_prefill: bool
    do_remote_decode: bool
    remote_block_ids: _containers.RepeatedCompositeFieldContainer[BlockGroup]
    remote_engine_id: str
    remote_request_id: str
    remote_host: str
    remote_port: int
    tp_size: int
    dcp_size: int
    pp_size: int
    remote_num_tokens: int
    remote_blocks_expiry_time: float
    remote_registration_generation: int
    transfer_mode: str
    extra_json: str
    def __init__(self, do_remote_prefill: bool = ..., do_remote_decode: bool = ..., remote_block_ids: _Optional[_Iterable[_Union[BlockGroup, _Mapping]]] = ..., remote_engine_id: _Optional[str] = ..., remote_request_id: _Optional[str] = ..., remote_host: _Optional[str] = ..., remote_port: _Optional[int] = ..., tp_size: _Optional[int] = ..., dcp_size: _Optional[int] = ..., pp_size: _Optional[int] = ..., remote_num_tokens: _Optional[int] = ..., remote_blocks_expiry_time: _Optional[float] = ..., remote_registration_generation: _Optional[int] = ..., transfer_mode: _Optional[str] = ..., extra_json: _Optional[str] = ...) -> None: ...

class BlockGroup(_message.Message):
    __slots__ = ("ids",)
    IDS_FIELD_NUMBER: _ClassVar[int]
    ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, ids: _Optional[_Iterable[int]] = ...) -> None: ...

class TimeAnchor(_message.Message):
    __slots__ = ("anchor", "elapsed")
    ANCHOR_FIELD_NUMBER: _ClassVar[int]
    ELAPSED_FIELD_NUMBER: _ClassVar[int]
    anchor: int
    elapsed: _duration_pb2.Duration
    def __init__(self, anchor: _Optional[int] = ..., elapsed: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class Ownership(_message.Message):
    __slots__ = ("ownership_id", "tenant_id", "session_id", "turn", "worker_id", "epoch", "params", "num_tokens", "block_size", "digests", "compatibility", "cuttable", "hold", "state", "lease_id", "for_decode")
    OWNERSHIP_ID_FIELD_NUMBER: _ClassVar[int]
    TENANT_ID_FIELD_NUMBER: _ClassVar[int]
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    TURN_FIELD_NUMBER: _ClassVar[int]
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    PARAMS_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    DIGESTS_FIELD_NUMBER: _ClassVar[int]
    COMPATIBILITY_FIELD_NUMBER: _ClassVar[int]
    CUTTABLE_FIELD_NUMBER: _ClassVar[int]
    HOLD_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    FOR_DECODE_FIELD_NUMBER: _ClassVar[int]
    ownership_id: str
    tenant_id: str
    session_id: str
    turn: int
    worker_id: str
    epoch: int
    params: KvTransferParams
    num_tokens: int
    block_size: int
    digests: bytes
    compatibility: str
    cuttable: bool
    hold: _duration_pb2.Duration
    state: OwnershipState
    lease_id: str
    for_decode: bool
    def __init__(self, ownership_id: _Optional[str] = ..., tenant_id: _Optional[str] = ..., session_id: _Optional[str] = ..., turn: _Optional[int] = ..., worker_id: _Optional[str] = ..., epoch: _Optional[int] = ..., params: _Optional[_Union[KvTransferParams, _Mapping]] = ..., num_tokens: _Optional[int] = ..., block_size: _Optional[int] = ..., digests: _Optional[bytes] = ..., compatibility: _Optional[str] = ..., cuttable: bool = ..., hold: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., state: _Optional[_Union[OwnershipState, str]] = ..., lease_id: _Optional[str] = ..., for_decode: bool = ...) -> None: ...

class Holder(_message.Message):
    __slots__ = ("worker_id", "epoch", "compatibility")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    COMPATIBILITY_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    epoch: int
    compatibility: str
    def __init__(self, worker_id: _Optional[str] = ..., epoch: _Optional[int] = ..., compatibility: _Optional[str] = ...) -> None: ...

class Lease(_message.Message):
    __slots__ = ("lease_id", "fencing_token", "ownership_id", "tenant_id", "session_id", "holder", "state", "ttl", "draining")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    FENCING_TOKEN_FIELD_NUMBER: _ClassVar[int]
    OWNERSHIP_ID_FIELD_NUMBER: _ClassVar[int]
    TENANT_ID_FIELD_NUMBER: _ClassVar[int]
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    HOLDER_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    TTL_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    lease_id: str
    fencing_token: int
    ownership_id: str
    tenant_id: str
    session_id: str
    holder: Holder
    state: LeaseState
    ttl: _duration_pb2.Duration
    draining: bool
    def __init__(self, lease_id: _Optional[str] = ..., fencing_token: _Optional[int] = ..., ownership_id: _Optional[str] = ..., tenant_id: _Optional[str] = ..., session_id: _Optional[str] = ..., holder: _Optional[_Union[Holder, _Mapping]] = ..., state: _Optional[_Union[LeaseState, str]] = ..., ttl: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., draining: bool = ...) -> None: ...

class OwnedHandle(_message.Message):
    __slots__ = ("engine_id", "request_id")
    ENGINE_ID_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    engine_id: str
    request_id: str
    def __init__(self, engine_id: _Optional[str] = ..., request_id: _Optional[str] = ...) -> None: ...

class ReportOwnershipRequest(_message.Message):
    __slots__ = ("worker_id", "epoch", "time_anchor", "ownerships")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    TIME_ANCHOR_FIELD_NUMBER: _ClassVar[int]
    OWNERSHIPS_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    epoch: int
    time_anchor: TimeAnchor
    ownerships: _containers.RepeatedCompositeFieldContainer[Ownership]
    def __init__(self, worker_id: _Optional[str] = ..., epoch: _Optional[int] = ..., time_anchor: _Optional[_Union[TimeAnchor, _Mapping]] = ..., ownerships: _Optional[_Iterable[_Union[Ownership, _Mapping]]] = ...) -> None: ...

class ReportOwnershipResponse(_message.Message):
    __slots__ = ("ownerships", "anchor")
    OWNERSHIPS_FIELD_NUMBER: _ClassVar[int]
    ANCHOR_FIELD_NUMBER: _ClassVar[int]
    ownerships: _containers.RepeatedCompositeFieldContainer[Ownership]
    anchor: int
    def __init__(self, ownerships: _Optional[_Iterable[_Union[Ownership, _Mapping]]] = ..., anchor: _Optional[int] = ...) -> None: ...

class WithdrawOwnershipRequest(_message.Message):
    __slots__ = ("worker_id", "epoch", "handles")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    HANDLES_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    epoch: int
    handles: _containers.RepeatedCompositeFieldContainer[OwnedHandle]
    def __init__(self, worker_id: _Optional[str] = ..., epoch: _Optional[int] = ..., handles: _Optional[_Iterable[_Union[OwnedHandle, _Mapping]]] = ...) -> None: ...

class WithdrawOwnershipResponse(_message.Message):
    __slots__ = ("states",)
    STATES_FIELD_NUMBER: _ClassVar[int]
    states: _containers.RepeatedScalarFieldContainer[OwnershipState]
    def __init__(self, states: _Optional[_Iterable[_Union[OwnershipState, str]]] = ...) -> None: ...

class GetOwnershipRequest(_message.Message):
    __slots__ = ("ownership_id",)
    OWNERSHIP_ID_FIELD_NUMBER: _ClassVar[int]
    ownership_id: str
    def __init__(self, ownership_id: _Optional[str] = ...) -> None: ...

class GetOwnershipResponse(_message.Message):
    __slots__ = ("ownership",)
    OWNERSHIP_FIELD_NUMBER: _ClassVar[int]
    ownership: Ownership
    def __init__(self, ownership: _Optional[_Union[Ownership, _Mapping]] = ...) -> None: ...

class ListOwnershipsRequest(_message.Message):
    __slots__ = ("session_id", "worker_id", "states", "page_size", "page_token")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    STATES_FIELD_NUMBER: _ClassVar[int]
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    worker_id: str
    states: _containers.RepeatedScalarFieldContainer[OwnershipState]
    page_size: int
    page_token: str
    def __init__(self, session_id: _Optional[str] = ..., worker_id: _Optional[str] = ..., states: _Optional[_Iterable[_Union[OwnershipState, str]]] = ..., page_size: _Optional[int] = ..., page_token: _Optional[str] = ...) -> None: ...

class ListOwnershipsResponse(_message.Message):
    __slots__ = ("ownerships", "next_page_token")
    OWNERSHIPS_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    ownerships: _containers.RepeatedCompositeFieldContainer[Ownership]
    next_page_token: str
    def __init__(self, ownerships: _Optional[_Iterable[_Union[Ownership, _Mapping]]] = ..., next_page_token: _Optional[str] = ...) -> None: ...

class GrantLeaseRequest(_message.Message):
    __slots__ = ("request_id", "holder", "ownership_id", "handle", "session_id", "ttl", "min_tokens", "wait", "begin_read")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    HOLDER_FIELD_NUMBER: _ClassVar[int]
    OWNERSHIP_ID_FIELD_NUMBER: _ClassVar[int]
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    TTL_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    WAIT_FIELD_NUMBER: _ClassVar[int]
    BEGIN_READ_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    holder: Holder
    ownership_id: str
    handle: OwnedHandle
    session_id: str
    ttl: _duration_pb2.Duration
    min_tokens: int
    wait: _duration_pb2.Duration
    begin_read: bool
    def __init__(self, request_id: _Optional[str] = ..., holder: _Optional[_Union[Holder, _Mapping]] = ..., ownership_id: _Optional[str] = ..., handle: _Optional[_Union[OwnedHandle, _Mapping]] = ..., session_id: _Optional[str] = ..., ttl: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., min_tokens: _Optional[int] = ..., wait: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., begin_read: bool = ...) -> None: ...

class GrantLeaseResponse(_message.Message):
    __slots__ = ("lease", "ownership", "refusal_reason")
    LEASE_FIELD_NUMBER: _ClassVar[int]
    OWNERSHIP_FIELD_NUMBER: _ClassVar[int]
    REFUSAL_REASON_FIELD_NUMBER: _ClassVar[int]
    lease: Lease
    ownership: Ownership
    refusal_reason: RefusalReason
    def __init__(self, lease: _Optional[_Union[Lease, _Mapping]] = ..., ownership: _Optional[_Union[Ownership, _Mapping]] = ..., refusal_reason: _Optional[_Union[RefusalReason, str]] = ...) -> None: ...

class BeginReadRequest(_message.Message):
    __slots__ = ("lease_id", "fencing_token", "holder", "ttl")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    FENCING_TOKEN_FIELD_NUMBER: _ClassVar[int]
    HOLDER_FIELD_NUMBER: _ClassVar[int]
    TTL_FIELD_NUMBER: _ClassVar[int]
    lease_id: str
    fencing_token: int
    holder: Holder
    ttl: _duration_pb2.Duration
    def __init__(self, lease_id: _Optional[str] = ..., fencing_token: _Optional[int] = ..., holder: _Optional[_Union[Holder, _Mapping]] = ..., ttl: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class BeginReadResponse(_message.Message):
    __slots__ = ("lease", "ownership")
    LEASE_FIELD_NUMBER: _ClassVar[int]
    OWNERSHIP_FIELD_NUMBER: _ClassVar[int]
    lease: Lease
    ownership: Ownership
    def __init__(self, lease: _Optional[_Union[Lease, _Mapping]] = ..., ownership: _Optional[_Union[Ownership, _Mapping]] = ...) -> None: ...

class LeaseRef(_message.Message):
    __slots__ = ("lease_id", "fencing_token")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    FENCING_TOKEN_FIELD_NUMBER: _ClassVar[int]
    lease_id: str
    fencing_token: int
    def __init__(self, lease_id: _Optional[str] = ..., fencing_token: _Optional[int] = ...) -> None: ...

class RenewLeasesRequest(_message.Message):
    __slots__ = ("holder", "leases", "ttl")
    HOLDER_FIELD_NUMBER: _ClassVar[int]
    LEASES_FIELD_NUMBER: _ClassVar[int]
    TTL_FIELD_NUMBER: _ClassVar[int]
    holder: Holder
    leases: _containers.RepeatedCompositeFieldContainer[LeaseRef]
    ttl: _duration_pb2.Duration
    def __init__(self, holder: _Optional[_Union[Holder, _Mapping]] = ..., leases: _Optional[_Iterable[_Union[LeaseRef, _Mapping]]] = ..., ttl: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class RenewLeasesResponse(_message.Message):
    __slots__ = ("results",)
    RESULTS_FIELD_NUMBER: _ClassVar[int]
    results: _containers.RepeatedCompositeFieldContainer[RenewResult]
    def __init__(self, results: _Optional[_Iterable[_Union[RenewResult, _Mapping]]] = ...) -> None: ...

class RenewResult(_message.Message):
    __slots__ = ("lease_id", "renewed", "state", "ttl", "draining")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    RENEWED_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    TTL_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    lease_id: str
    renewed: bool
    state: LeaseState
    ttl: _duration_pb2.Duration
    draining: bool
    def __init__(self, lease_id: _Optional[str] = ..., renewed: bool = ..., state: _Optional[_Union[LeaseState, str]] = ..., ttl: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., draining: bool = ...) -> None: ...

class LeaseRelease(_message.Message):
    __slots__ = ("lease_id", "fencing_token", "outcome")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    FENCING_TOKEN_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    lease_id: str
    fencing_token: int
    outcome: ReadOutcome
    def __init__(self, lease_id: _Optional[str] = ..., fencing_token: _Optional[int] = ..., outcome: _Optional[_Union[ReadOutcome, str]] = ...) -> None: ...

class ReleaseLeasesRequest(_message.Message):
    __slots__ = ("holder", "releases")
    HOLDER_FIELD_NUMBER: _ClassVar[int]
    RELEASES_FIELD_NUMBER: _ClassVar[int]
    holder: Holder
    releases: _containers.RepeatedCompositeFieldContainer[LeaseRelease]
    def __init__(self, holder: _Optional[_Union[Holder, _Mapping]] = ..., releases: _Optional[_Iterable[_Union[LeaseRelease, _Mapping]]] = ...) -> None: ...

class ReleaseLeasesResponse(_message.Message):
    __slots__ = ("results",)
    RESULTS_FIELD_NUMBER: _ClassVar[int]
    results: _containers.RepeatedCompositeFieldContainer[ReleaseResult]
    def __init__(self, results: _Optional[_Iterable[_Union[ReleaseResult, _Mapping]]] = ...) -> None: ...

class ReleaseResult(_message.Message):
    __slots__ = ("lease_id", "state")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    lease_id: str
    state: LeaseState
    def __init__(self, lease_id: _Optional[str] = ..., state: _Optional[_Union[LeaseState, str]] = ...) -> None: ...

class RevokeLeaseRequest(_message.Message):
    __slots__ = ("lease_id",)
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    lease_id: str
    def __init__(self, lease_id: _Optional[str] = ...) -> None: ...

class RevokeLeaseResponse(_message.Message):
    __slots__ = ("lease",)
    LEASE_FIELD_NUMBER: _ClassVar[int]
    lease: Lease
    def __init__(self, lease: _Optional[_Union[Lease, _Mapping]] = ...) -> None: ...

class GetLeaseRequest(_message.Message):
    __slots__ = ("lease_id",)
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    lease_id: str
    def __init__(self, lease_id: _Optional[str] = ...) -> None: ...

class GetLeaseResponse(_message.Message):
    __slots__ = ("lease",)
    LEASE_FIELD_NUMBER: _ClassVar[int]
    lease: Lease
    def __init__(self, lease: _Optional[_Union[Lease, _Mapping]] = ...) -> None: ...

class ListLeasesRequest(_message.Message):
    __slots__ = ("session_id", "worker_id", "states", "page_size", "page_token")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    STATES_FIELD_NUMBER: _ClassVar[int]
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    worker_id: str
    states: _containers.RepeatedScalarFieldContainer[LeaseState]
    page_size: int
    page_token: str
    def __init__(self, session_id: _Optional[str] = ..., worker_id: _Optional[str] = ..., states: _Optional[_Iterable[_Union[LeaseState, str]]] = ..., page_size: _Optional[int] = ..., page_token: _Optional[str] = ...) -> None: ...

class ListLeasesResponse(_message.Message):
    __slots__ = ("leases", "next_page_token")
    LEASES_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    leases: _containers.RepeatedCompositeFieldContainer[Lease]
    next_page_token: str
    def __init__(self, leases: _Optional[_Iterable[_Union[Lease, _Mapping]]] = ..., next_page_token: _Optional[str] = ...) -> None: ...

class ExtendHoldRequest(_message.Message):
    __slots__ = ("session_id", "hold")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    HOLD_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    hold: _duration_pb2.Duration
    def __init__(self, session_id: _Optional[str] = ..., hold: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class ExtendHoldResponse(_message.Message):
    __slots__ = ("asked",)
    ASKED_FIELD_NUMBER: _ClassVar[int]
    asked: int
    def __init__(self, asked: _Optional[int] = ...) -> None: ...

class FreeSessionRequest(_message.Message):
    __slots__ = ("session_id",)
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    def __init__(self, session_id: _Optional[str] = ...) -> None: ...

class FreeSessionResponse(_message.Message):
    __slots__ = ("freed", "draining")
    FREED_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    freed: int
    draining: int
    def __init__(self, freed: _Optional[int] = ..., draining: _Optional[int] = ...) -> None: ...

class EndWorkerEpochRequest(_message.Message):
    __slots__ = ("worker_id", "current_epoch")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    CURRENT_EPOCH_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    current_epoch: int
    def __init__(self, worker_id: _Optional[str] = ..., current_epoch: _Optional[int] = ...) -> None: ...

class EndWorkerEpochResponse(_message.Message):
    __slots__ = ("ownerships_lost", "leases_lost")
    OWNERSHIPS_LOST_FIELD_NUMBER: _ClassVar[int]
    LEASES_LOST_FIELD_NUMBER: _ClassVar[int]
    ownerships_lost: int
    leases_lost: int
    def __init__(self, ownerships_lost: _Optional[int] = ..., leases_lost: _Optional[int] = ...) -> None: ...

class GetUsageRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetUsageResponse(_message.Message):
    __slots__ = ("held_tokens", "held_blocks", "live_leases", "held_token_seconds")
    HELD_TOKENS_FIELD_NUMBER: _ClassVar[int]
    HELD_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    LIVE_LEASES_FIELD_NUMBER: _ClassVar[int]
    HELD_TOKEN_SECONDS_FIELD_NUMBER: _ClassVar[int]
    held_tokens: int
    held_blocks: int
    live_leases: int
    held_token_seconds: float
    def __init__(self, held_tokens: _Optional[int] = ..., held_blocks: _Optional[int] = ..., live_leases: _Optional[int] = ..., held_token_seconds: _Optional[float] = ...) -> None: ...

class ConnectRequest(_message.Message):
    __slots__ = ("hello", "report", "withdraw", "command_ack")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    REPORT_FIELD_NUMBER: _ClassVar[int]
    WITHDRAW_FIELD_NUMBER: _ClassVar[int]
    COMMAND_ACK_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    report: Report
    withdraw: Withdraw
    command_ack: CommandAck
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., report: _Optional[_Union[Report, _Mapping]] = ..., withdraw: _Optional[_Union[Withdraw, _Mapping]] = ..., command_ack: _Optional[_Union[CommandAck, _Mapping]] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("worker_id", "epoch", "held", "number", "hold_limit_blocks")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    HELD_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    HOLD_LIMIT_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    epoch: int
    held: _containers.RepeatedCompositeFieldContainer[OwnedHandle]
    number: int
    hold_limit_blocks: int
    def __init__(self, worker_id: _Optional[str] = ..., epoch: _Optional[int] = ..., held: _Optional[_Iterable[_Union[OwnedHandle, _Mapping]]] = ..., number: _Optional[int] = ..., hold_limit_blocks: _Optional[int] = ...) -> None: ...

class Report(_message.Message):
    __slots__ = ("sequence", "time_anchor", "ownerships")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    TIME_ANCHOR_FIELD_NUMBER: _ClassVar[int]
    OWNERSHIPS_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    time_anchor: TimeAnchor
    ownerships: _containers.RepeatedCompositeFieldContainer[Ownership]
    def __init__(self, sequence: _Optional[int] = ..., time_anchor: _Optional[_Union[TimeAnchor, _Mapping]] = ..., ownerships: _Optional[_Iterable[_Union[Ownership, _Mapping]]] = ...) -> None: ...

class Withdraw(_message.Message):
    __slots__ = ("sequence", "handles")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    HANDLES_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    handles: _containers.RepeatedCompositeFieldContainer[OwnedHandle]
    def __init__(self, sequence: _Optional[int] = ..., handles: _Optional[_Iterable[_Union[OwnedHandle, _Mapping]]] = ...) -> None: ...

class CommandAck(_message.Message):
    __slots__ = ("command_id", "time_anchor", "done", "hold")
    COMMAND_ID_FIELD_NUMBER: _ClassVar[int]
    TIME_ANCHOR_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    HOLD_FIELD_NUMBER: _ClassVar[int]
    command_id: str
    time_anchor: TimeAnchor
    done: bool
    hold: _duration_pb2.Duration
    def __init__(self, command_id: _Optional[str] = ..., time_anchor: _Optional[_Union[TimeAnchor, _Mapping]] = ..., done: bool = ..., hold: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class ConnectResponse(_message.Message):
    __slots__ = ("welcome", "acknowledged", "tick", "command")
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    ACKNOWLEDGED_FIELD_NUMBER: _ClassVar[int]
    TICK_FIELD_NUMBER: _ClassVar[int]
    COMMAND_FIELD_NUMBER: _ClassVar[int]
    welcome: Welcome
    acknowledged: Acknowledged
    tick: Tick
    command: Command
    def __init__(self, welcome: _Optional[_Union[Welcome, _Mapping]] = ..., acknowledged: _Optional[_Union[Acknowledged, _Mapping]] = ..., tick: _Optional[_Union[Tick, _Mapping]] = ..., command: _Optional[_Union[Command, _Mapping]] = ...) -> None: ...

class Welcome(_message.Message):
    __slots__ = ("anchor", "tick_interval")
    ANCHOR_FIELD_NUMBER: _ClassVar[int]
    TICK_INTERVAL_FIELD_NUMBER: _ClassVar[int]
    anchor: int
    tick_interval: _duration_pb2.Duration
    def __init__(self, anchor: _Optional[int] = ..., tick_interval: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class Acknowledged(_message.Message):
    __slots__ = ("sequence",)
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    def __init__(self, sequence: _Optional[int] = ...) -> None: ...

class Tick(_message.Message):
    __slots__ = ("anchor",)
    ANCHOR_FIELD_NUMBER: _ClassVar[int]
    anchor: int
    def __init__(self, anchor: _Optional[int] = ...) -> None: ...

class Command(_message.Message):
    __slots__ = ("command_id", "handle", "hold_longer", "free_now")
    COMMAND_ID_FIELD_NUMBER: _ClassVar[int]
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    HOLD_LONGER_FIELD_NUMBER: _ClassVar[int]
    FREE_NOW_FIELD_NUMBER: _ClassVar[int]
    command_id: str
    handle: OwnedHandle
    hold_longer: HoldLonger
    free_now: FreeNow
    def __init__(self, command_id: _Optional[str] = ..., handle: _Optional[_Union[OwnedHandle, _Mapping]] = ..., hold_longer: _Optional[_Union[HoldLonger, _Mapping]] = ..., free_now: _Optional[_Union[FreeNow, _Mapping]] = ...) -> None: ...

class HoldLonger(_message.Message):
    __slots__ = ("hold",)
    HOLD_FIELD_NUMBER: _ClassVar[int]
    hold: _duration_pb2.Duration
    def __init__(self, hold: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class FreeNow(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
