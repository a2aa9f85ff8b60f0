import datetime

from google.protobuf import duration_pb2 as _duration_pb2
from google.protobuf import timestamp_pb2 as _timestamp_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class SessionState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    SESSION_STATE_UNSPECIFIED: _ClassVar[SessionState]
    SESSION_STATE_ACTIVE: _ClassVar[SessionState]
    SESSION_STATE_ENDED: _ClassVar[SessionState]
    SESSION_STATE_EXPIRED: _ClassVar[SessionState]

class TurnOutcome(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    TURN_OUTCOME_UNSPECIFIED: _ClassVar[TurnOutcome]
    TURN_OUTCOME_OK: _ClassVar[TurnOutcome]
    TURN_OUTCOME_CANCELLED: _ClassVar[TurnOutcome]
    TURN_OUTCOME_FAILED: _ClassVar[TurnOutcome]
SESSION_STATE_UNSPECIFIED: SessionState
SESSION_STATE_ACTIVE: SessionState
SESSION_STATE_ENDED: SessionState
SESSION_STATE_EXPIRED: SessionState
TURN_OUTCOME_UNSPECIFIED: TurnOutcome
TURN_OUTCOME_OK: TurnOutcome
TURN_OUTCOME_CANCELLED: TurnOutcome
TURN_OUTCOME_FAILED: TurnOutcome

class Session(_message.Message):
    __slots__ = ("session_id", "tenant_id", "name", "model", "state", "turns", "last_prefill_worker_id", "last_decode_worker_id", "tokens_reused", "tokens_recomputed", "create_time", "last_turn_time", "expire_time", "ownership_ids")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    TENANT_ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    TURNS_FIELD_NUMBER: _ClassVar[int]
    LAST_PREFILL_WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    LAST_DECODE_WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    TOKENS_REUSED_FIELD_NUMBER: _ClassVar[int]
    TOKENS_RECOMPUTED_FIELD_NUMBER: _ClassVar[int]
    CREATE_TIME_FIELD_NUMBER: _ClassVar[int]
    LAST_TURN_TIME_FIELD_NUMBER: _ClassVar[int]
    EXPIRE_TIME_FIELD_NUMBER: _ClassVar[int]
    OWNERSHIP_IDS_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    tenant_id: str
    name: str
    model: str
    state: SessionState
    turns: int
    last_prefill_worker_id: str
    last_decode_worker_id: str
    tokens_reused: int
    tokens_recomputed: int
    create_time: _timestamp_pb2.Timestamp
    last_turn_time: _timestamp_pb2.Timestamp
    expire_time: _timestamp_pb2.Timestamp
    ownership_ids: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, session_id: _Optional[str] = ..., tenant_id: _Optional[str] = ..., name: _Optional[str] = ..., model: _Optional[str] = ..., state: _Optional[_Union[SessionState, str]] = ..., turns: _Optional[int] = ..., last_prefill_worker_id: _Optional[str] = ..., last_decode_worker_id: _Optional[str] = ..., tokens_reused: _Optional[int] = ..., tokens_recomputed: _Optional[int] = ..., create_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., last_turn_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., expire_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., ownership_ids: _Optional[_Iterable[str]] = ...) -> None: ...

class SessionKey(_message.Message):
    __slots__ = ("name", "history")
    NAME_FIELD_NUMBER: _ClassVar[int]
    HISTORY_FIELD_NUMBER: _ClassVar[int]
    name: str
    history: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, name: _Optional[str] = ..., history: _Optional[_Iterable[bytes]] = ...) -> None: ...

class CreateSessionRequest(_message.Message):
    __slots__ = ("name", "model")
    NAME_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    name: str
    model: str
    def __init__(self, name: _Optional[str] = ..., model: _Optional[str] = ...) -> None: ...

class CreateSessionResponse(_message.Message):
    __slots__ = ("session", "created")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    CREATED_FIELD_NUMBER: _ClassVar[int]
    session: Session
    created: bool
    def __init__(self, session: _Optional[_Union[Session, _Mapping]] = ..., created: bool = ...) -> None: ...

class GetSessionRequest(_message.Message):
    __slots__ = ("session_id", "name")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    name: str
    def __init__(self, session_id: _Optional[str] = ..., name: _Optional[str] = ...) -> None: ...

class GetSessionResponse(_message.Message):
    __slots__ = ("session",)
    SESSION_FIELD_NUMBER: _ClassVar[int]
    session: Session
    def __init__(self, session: _Optional[_Union[Session, _Mapping]] = ...) -> None: ...

class ListSessionsRequest(_message.Message):
    __slots__ = ("states", "model", "worker_id", "page_size", "page_token")
    STATES_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    states: _containers.RepeatedScalarFieldContainer[SessionState]
    model: str
    worker_id: str
    page_size: int
    page_token: str
    def __init__(self, states: _Optional[_Iterable[_Union[SessionState, str]]] = ..., model: _Optional[str] = ..., worker_id: _Optional[str] = ..., page_size: _Optional[int] = ..., page_token: _Optional[str] = ...) -> None: ...

class ListSessionsResponse(_message.Message):
    __slots__ = ("sessions", "next_page_token")
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    sessions: _containers.RepeatedCompositeFieldContainer[Session]
    next_page_token: str
    def __init__(self, sessions: _Optional[_Iterable[_Union[Session, _Mapping]]] = ..., next_page_token: _Optional[str] = ...) -> None: ...

class EndSessionRequest(_message.Message):
    __slots__ = ("session_id", "name")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    name: str
    def __init__(self, session_id: _Optional[str] = ..., name: _Optional[str] = ...) -> None: ...

class EndSessionResponse(_message.Message):
    __slots__ = ("session", "already_ended")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    ALREADY_ENDED_FIELD_NUMBER: _ClassVar[int]
    session: Session
    already_ended: bool
    def __init__(self, session: _Optional[_Union[Session, _Mapping]] = ..., already_ended: bool = ...) -> None: ...

class WatchSessionsRequest(_message.Message):
    __slots__ = ("session_id",)
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    def __init__(self, session_id: _Optional[str] = ...) -> None: ...

class WatchSessionsResponse(_message.Message):
    __slots__ = ("session",)
    SESSION_FIELD_NUMBER: _ClassVar[int]
    session: Session
    def __init__(self, session: _Optional[_Union[Session, _Mapping]] = ...) -> None: ...

class BeginTurnRequest(_message.Message):
    __slots__ = ("request_id", "key", "model", "prompt_tokens_estimate", "request_bytes")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_ESTIMATE_FIELD_NUMBER: _ClassVar[int]
    REQUEST_BYTES_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    key: SessionKey
    model: str
    prompt_tokens_estimate: int
    request_bytes: int
    def __init__(self, request_id: _Optional[str] = ..., key: _Optional[_Union[SessionKey, _Mapping]] = ..., model: _Optional[str] = ..., prompt_tokens_estimate: _Optional[int] = ..., request_bytes: _Optional[int] = ...) -> None: ...

class BeginTurnResponse(_message.Message):
    __slots__ = ("session", "turn", "previous_completed", "open_turns", "over_quota")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    TURN_FIELD_NUMBER: _ClassVar[int]
    PREVIOUS_COMPLETED_FIELD_NUMBER: _ClassVar[int]
    OPEN_TURNS_FIELD_NUMBER: _ClassVar[int]
    OVER_QUOTA_FIELD_NUMBER: _ClassVar[int]
    session: Session
    turn: int
    previous_completed: bool
    open_turns: int
    over_quota: str
    def __init__(self, session: _Optional[_Union[Session, _Mapping]] = ..., turn: _Optional[int] = ..., previous_completed: bool = ..., open_turns: _Optional[int] = ..., over_quota: _Optional[str] = ...) -> None: ...

class CompleteTurnRequest(_message.Message):
    __slots__ = ("session_id", "turn", "outcome", "prompt_tokens", "completion_tokens", "tokens_reused", "history_digest", "prefill_worker_id", "decode_worker_id", "time_to_first_token", "request_id")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    TURN_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COMPLETION_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_REUSED_FIELD_NUMBER: _ClassVar[int]
    HISTORY_DIGEST_FIELD_NUMBER: _ClassVar[int]
    PREFILL_WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    DECODE_WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    TIME_TO_FIRST_TOKEN_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    turn: int
    outcome: TurnOutcome
    prompt_tokens: int
    completion_tokens: int
    tokens_reused: int
    history_digest: bytes
    prefill_worker_id: str
    decode_worker_id: str
    time_to_first_token: _duration_pb2.Duration
    request_id: str
    def __init__(self, session_id: _Optional[str] = ..., turn: _Optional[int] = ..., outcome: _Optional[_Union[TurnOutcome, str]] = ..., prompt_tokens: _Optional[int] = ..., completion_tokens: _Optional[int] = ..., tokens_reused: _Optional[int] = ..., history_digest: _Optional[bytes] = ..., prefill_worker_id: _Optional[str] = ..., decode_worker_id: _Optional[str] = ..., time_to_first_token: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., request_id: _Optional[str] = ...) -> None: ...

class CompleteTurnResponse(_message.Message):
    __slots__ = ("session",)
    SESSION_FIELD_NUMBER: _ClassVar[int]
    session: Session
    def __init__(self, session: _Optional[_Union[Session, _Mapping]] = ...) -> None: ...

class GetUsageRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetUsageResponse(_message.Message):
    __slots__ = ("active_sessions", "turns", "prompt_tokens", "completion_tokens", "tokens_reused", "tokens_recomputed", "tenant_id")
    ACTIVE_SESSIONS_FIELD_NUMBER: _ClassVar[int]
    TURNS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COMPLETION_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_REUSED_FIELD_NUMBER: _ClassVar[int]
    TOKENS_RECOMPUTED_FIELD_NUMBER: _ClassVar[int]
    TENANT_ID_FIELD_NUMBER: _ClassVar[int]
    active_sessions: int
    turns: int
    prompt_tokens: int
    completion_tokens: int
    tokens_reused: int
    tokens_recomputed: int
    tenant_id: str
    def __init__(self, active_sessions: _Optional[int] = ..., turns: _Optional[int] = ..., prompt_tokens: _Optional[int] = ..., completion_tokens: _Optional[int] = ..., tokens_reused: _Optional[int] = ..., tokens_recomputed: _Optional[int] = ..., tenant_id: _Optional[str] = ...) -> None: ...
