"""Worker messages to values and back, and the checks of every request."""

import base64
import binascii
import re
from collections.abc import Iterable
from urllib.parse import urlsplit

from google.protobuf.duration_pb2 import Duration

from kvplane.api.routing.v1 import routing_pb2
from kvplane.api.session.v1 import session_pb2
from kvplane.kernel import validate
from kvplane.kernel.digests import DIGEST_SIZE
from kvplane.kernel.errors import InvalidField
from kvplane.routing.domain import (
    DEFAULT_RECOMPUTE_THRESHOLD,
    Compatibility,
    Load,
    Profile,
    Role,
    State,
    Worker,
)
from kvplane.routing.store import Beat, WorkerFilter

_MAX_ITEMS = 1000
_MAX_COUNT = 2**31 - 1
_MAX_TOKENS = 2**53
# It becomes an HTTP header of the engine's request.
_PRINTABLE = re.compile(r"[\x21-\x7e]+\Z")
_HOST = re.compile(r"[A-Za-z0-9._-]+\Z|[0-9A-Fa-f:.]+\Z")


def profile(worker: routing_pb2.Worker, *, by_itself: bool = False) -> Profile:
    """Check what a worker says of itself, or a gateway of a plain engine. Raises InvalidField."""
    at = "worker."
    validate.identifier(f"{at}worker_id", worker.worker_id)
    _url(f"{at}url", worker.url)
    # A plain engine, registered from settings, may not tell where its side channel is.
    if worker.managed or worker.kv_host or worker.kv_port:
        validate.text(f"{at}kv_host", worker.kv_host, 256)
        if not _HOST.match(worker.kv_host):
            raise InvalidField(f"{at}kv_host", "must be a host name or an address")
        validate.between(f"{at}kv_port", worker.kv_port, 1, 65535)
    _text(f"{at}engine_id", worker.engine_id, required=worker.managed or by_itself)
    rank = worker.data_parallel_rank if worker.HasField("data_parallel_rank") else None
    if rank is not None:
        validate.between(f"{at}data_parallel_rank", rank, 0, 65535)
    validate.between(f"{at}max_model_len", worker.max_model_len, 0, _MAX_TOKENS)
    validate.between(f"{at}recompute_threshold", worker.recompute_threshold, 0, _MAX_COUNT)
    compatibility = _compatibility(f"{at}compatibility.", worker)
    validate.at_most_items(f"{at}served_models", len(worker.served_models), 64)
    for i, name in enumerate(worker.served_models):
        _text(f"{at}served_models[{i}]", name, required=True)
    return Profile(
        worker_id=worker.worker_id,
        role=_role(f"{at}role", worker.role),
        url=worker.url,
        kv_host=worker.kv_host,
        kv_port=worker.kv_port,
        engine_id=worker.engine_id,
        data_parallel_rank=rank,
        compatibility=compatibility,
        bidirectional=worker.bidirectional,
        managed=worker.managed,
        max_model_len=worker.max_model_len,
        recompute_threshold=worker.recompute_threshold or DEFAULT_RECOMPUTE_THRESHOLD,
        served_models=tuple(dict.fromkeys(worker.served_models)) or (compatibility.model,),
    )


def instance_id(request: routing_pb2.RegisterWorkerRequest) -> str:
    """Check the name of an engine's process. Raises InvalidField."""
    return validate.identifier("instance_id", request.instance_id)


def beats(request: routing_pb2.HeartbeatRequest) -> list[Beat]:
    """Check signs of life. Raises InvalidField, for all of them."""
    validate.at_most_items("beats", len(request.beats), _MAX_ITEMS)
    return [_beat(f"beats[{i}].", beat) for i, beat in enumerate(request.beats)]


def seen_epoch(worker: routing_pb2.Worker) -> int:
    """Check the highest epoch that a worker has heard of, 0 for none. Raises InvalidField."""
    validate.between("worker.epoch", worker.epoch, 0, 2**62)
    return worker.epoch


def worker_id(value: str) -> str:
    """Check the name of a worker. Raises InvalidField."""
    return validate.identifier("worker_id", value)


def epoch(value: int) -> int:
    """Check an epoch. Raises InvalidField."""
    validate.between("epoch", value, 1, 2**62)
    return value


def worker_filter(request: routing_pb2.ListWorkersRequest) -> WorkerFilter:
    """Check what to list. Raises InvalidField."""
    _text("model", request.model)
    validate.at_most_items("states", len(request.states), _MAX_ITEMS)
    states = tuple(_state(f"states[{i}]", state) for i, state in enumerate(request.states))
    return WorkerFilter(
        _role("role", request.role) if request.role else None, states, request.model
    )


def page_start(token: str) -> str:
    """Return the id after which a page begins. Raises InvalidField."""
    if not token:
        return ""
    try:
        raw = base64.b64decode(token.encode("ascii"), altchars=b"-_", validate=True)
        return validate.identifier("page_token", raw.decode())
    except (binascii.Error, UnicodeError, InvalidField):
        raise InvalidField("page_token", "use next_page_token of the page before") from None


def page_token(last_id: str) -> str:
    """Return the token of the page that begins after an id."""
    return base64.urlsafe_b64encode(last_id.encode()).decode()


def worker_message(worker: Worker, silent_us: int) -> routing_pb2.Worker:
    """Return a worker as it is shown."""
    mine = worker.profile
    silent_for = Duration()
    silent_for.FromMicroseconds(max(0, silent_us))
    same = mine.compatibility
    return routing_pb2.Worker(
        worker_id=mine.worker_id,
        epoch=worker.epoch,
        role=f"WORKER_ROLE_{mine.role.name}",
        url=mine.url,
        kv_host=mine.kv_host,
        kv_port=mine.kv_port,
        engine_id=mine.engine_id,
        data_parallel_rank=mine.data_parallel_rank,
        compatibility=routing_pb2.Compatibility(
            model=same.model,
            revision=same.revision,
            block_size=same.block_size,
            kv_layout=same.kv_layout,
            kv_dtype=same.kv_dtype,
            engine_version=same.engine_version,
        ),
        bidirectional=mine.bidirectional,
        managed=mine.managed,
        max_model_len=mine.max_model_len,
        recompute_threshold=mine.recompute_threshold,
        state=state_message(worker.state),
        load=routing_pb2.Load(
            running=worker.load.running,
            waiting=worker.load.waiting,
            kv_usage=worker.load.kv_usage,
            held=worker.load.held,
        ),
        served_models=mine.served_models,
        silent_for=silent_for,
    )


def state_message(state: State | None) -> str:
    """Return a state as it is shown; UNSPECIFIED for a stranger's."""
    return f"WORKER_STATE_{state.name if state else 'UNSPECIFIED'}"


def check_route(request: routing_pb2.RouteRequest) -> None:
    """Raise InvalidField if the question cannot be answered."""
    _request_id("request_id", request.request_id)
    _text("model", request.model, required=True)
    if request.session.name:
        validate.text("session.name", request.session.name, 512)
    _digests("session.history", request.session.history)
    validate.between("prompt_tokens_estimate", request.prompt_tokens_estimate, 0, _MAX_TOKENS)
    validate.between("request_bytes", request.request_bytes, 0, _MAX_TOKENS)
    validate.at_most_items("exclude_worker_ids", len(request.exclude_worker_ids), _MAX_ITEMS)
    for i, ident in enumerate(request.exclude_worker_ids):
        validate.identifier(f"exclude_worker_ids[{i}]", ident)


def check_complete(turn: session_pb2.CompleteTurnRequest) -> bool:
    """Return whether the session registry knows the turn, which Route could not ask always.

    Raises InvalidField if that cannot be how a turn went.
    """
    has_session = bool(turn.session_id or turn.turn)
    if has_session:
        validate.identifier("turn.session_id", turn.session_id)
        validate.between("turn.turn", turn.turn, 1, _MAX_TOKENS)
    if turn.request_id:
        _request_id("turn.request_id", turn.request_id)
        if has_session:
            raise InvalidField("turn.request_id", "set it, or session_id and turn, not both")
    if turn.outcome not in session_pb2.TurnOutcome.values() or not turn.outcome:
        raise InvalidField("turn.outcome", "must be OK, CANCELLED or FAILED")
    for name in ("prompt_tokens", "completion_tokens", "tokens_reused"):
        validate.between(f"turn.{name}", getattr(turn, name), 0, _MAX_TOKENS)
    if turn.history_digest:
        _digest("turn.history_digest", turn.history_digest)
    for name in ("prefill_worker_id", "decode_worker_id"):
        if getattr(turn, name):
            validate.identifier(f"turn.{name}", getattr(turn, name))
    return has_session or bool(turn.request_id)


def _beat(at: str, beat: routing_pb2.WorkerBeat) -> Beat:
    validate.identifier(f"{at}worker_id", beat.worker_id)
    validate.between(f"{at}epoch", beat.epoch, 1, 2**62)
    for name in ("running", "waiting", "held"):
        validate.between(f"{at}load.{name}", getattr(beat.load, name), 0, _MAX_COUNT)
    validate.between(f"{at}load.kv_usage", beat.load.kv_usage, 0, 1)
    load = beat.load
    return Beat(
        beat.worker_id, beat.epoch, Load(load.running, load.waiting, load.kv_usage, load.held)
    )


def _compatibility(at: str, worker: routing_pb2.Worker) -> Compatibility:
    same = worker.compatibility
    _text(f"{at}model", same.model, required=True)
    _text(f"{at}revision", same.revision)
    validate.between(f"{at}block_size", same.block_size, 1, 65536)
    # A plain engine does not say these; its owner may.
    for name in ("kv_layout", "kv_dtype", "engine_version"):
        _text(f"{at}{name}", getattr(same, name), required=worker.managed)
    return Compatibility(
        same.model,
        same.revision,
        same.block_size,
        same.kv_layout,
        same.kv_dtype,
        same.engine_version,
    )


def _url(field: str, value: str) -> None:
    validate.text(field, value, 512)
    problem = "must be http://host:port or https://host:port, with nothing after the port"
    if not _PRINTABLE.match(value):
        raise InvalidField(field, problem)
    try:
        parts = urlsplit(value)
        port = parts.port
    except ValueError:
        raise InvalidField(field, f"{problem}; the port is from 1 to 65535") from None
    if parts.username is not None or parts.password is not None:
        raise InvalidField(field, f"{problem}; no credentials")
    if parts.scheme not in {"http", "https"} or not parts.hostname or not port:
        raise InvalidField(field, problem)
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    # Nothing but these: no path, query, fragment, empty user or odd spelling.
    if not _HOST.match(parts.hostname) or value.lower() != f"{parts.scheme}://{host}:{port}":
        raise InvalidField(field, problem)


def _role(field: str, value: int) -> Role:
    try:
        return Role(value)
    except ValueError:
        raise InvalidField(field, "must be PREFILL, DECODE or BOTH") from None


def _state(field: str, value: int) -> State:
    try:
        return State(value)
    except ValueError:
        raise InvalidField(field, "must be READY, DRAINING or LOST") from None


def _request_id(field: str, value: str) -> None:
    validate.text(field, value, 128)
    if not _PRINTABLE.match(value):
        raise InvalidField(field, "use printable ASCII characters without spaces")


def _text(field: str, value: str, *, required: bool = False) -> None:
    if value or required:
        validate.text(field, value, 256)
        if not value.isprintable():
            raise InvalidField(field, "must be printable")


def _digests(field: str, values: Iterable[bytes]) -> None:
    values = list(values)
    validate.at_most_items(field, len(values), 64)
    for i, value in enumerate(values):
        _digest(f"{field}[{i}]", value)


def _digest(field: str, value: bytes) -> None:
    if len(value) != DIGEST_SIZE:
        raise InvalidField(field, f"must be {DIGEST_SIZE} bytes, not {len(value)}")
