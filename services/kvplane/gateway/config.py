"""The gateway's settings: plain values with defaults, units in the names."""

import json
import re
from dataclasses import dataclass, field, fields
from typing import Any, Final, Literal

from kvplane.kernel import validate
from kvplane.kernel.errors import InvalidField

Role = Literal["prefill", "decode", "both"]


@dataclass(frozen=True, slots=True)
class StaticWorker:
    """An engine without our connector; the gateway registers it and does its lease work.

    KV is handed over only between workers whose `kv_host` and `kv_port` are set: what
    an engine says of itself is checked against them. `model`, `revision`, `block_size`,
    `kv_layout`, `kv_dtype` and `engine_version` must be equal on both sides; name them
    as the engines were started. An empty `served_models`, `max_model_len` or
    `engine_version` is asked from the engine (/v1/models, /version).
    """

    worker_id: str
    # The engine's HTTP address, http://host:port.
    url: str
    role: Role
    # What its KV was made by; also a name that clients may use.
    model: str
    revision: str = ""
    served_models: tuple[str, ...] = ()
    # Tokens in a KV block.
    block_size: int = 16
    kv_layout: str = ""
    kv_dtype: str = ""
    engine_version: str = ""
    # NIXL side channel, as the engine names it in kv_transfer_params.
    kv_host: str = ""
    kv_port: int = 0
    data_parallel_rank: int | None = None
    # Started with bidirectional_kv_xfer.
    bidirectional: bool = False
    # All layers are full attention, so that a prefix can be read alone.
    cuttable: bool = True
    max_model_len: int = 0
    # kv_recompute_threshold: reads of fewer tokens are not done.
    recompute_threshold: int = 64
    # kv_lease_duration: how long a prefill holds blocks for its decode.
    prefill_hold_s: float = 30.0
    # decoder_kv_blocks_ttl: how long a decode holds blocks for the next turn.
    decode_hold_s: float = 480.0

    def __post_init__(self) -> None:
        """Raise InvalidField naming the field that cannot work."""
        validate.identifier("worker_id", self.worker_id)
        validate.text("model", self.model, 512)
        if not re.match(r"https?://[^/?#@\\\s]+/?\Z", self.url):
            raise InvalidField("url", "must be http://host:port")
        if self.role not in ("prefill", "decode", "both"):
            raise InvalidField("role", "must be prefill, decode or both")
        validate.between("block_size", self.block_size, 1, 1 << 20)
        validate.between("kv_port", self.kv_port, 0, 65535)
        validate.between("prefill_hold_s", self.prefill_hold_s, 0, 1e6)
        validate.between("decode_hold_s", self.decode_hold_s, 0, 1e6)
        if bool(self.kv_host) != bool(self.kv_port):
            raise InvalidField("kv_port", "kv_host and kv_port belong together")


@dataclass(frozen=True, slots=True)
class GatewayConfig:
    """Bounds and switches. The suffix of a name is its unit."""

    # none: everybody is tenant "default". api_key: the bearer token names the tenant.
    auth: Literal["none", "api_key"] = "none"
    # Our own services' bearer token: believed as to the tenant that it names; empty: none.
    internal_token: str = field(default="", repr=False)
    # How long a resolved API key is believed without asking again.
    auth_cache_s: float = 5.0
    # The same while the tenant service does not answer.
    auth_stale_s: float = 300.0
    # Sent to the engines as a bearer token; empty: none.
    upstream_api_key: str = ""

    max_body_bytes: int = 32 * 1024 * 1024
    # How long a client may take to send its body.
    body_timeout_s: float = 60.0
    max_headers: int = 128
    # One header, or the request line with its URL.
    max_header_bytes: int = 16_384
    # From the first byte of a request to the end of its headers.
    head_timeout_s: float = 10.0
    # An idle connection; longer than most proxies keep theirs.
    keepalive_timeout_s: float = 75.0
    # How long a client may take nothing of its answer.
    write_timeout_s: float = 60.0
    max_connections: int = 10_000

    # How long Route may take before the gateway goes on without it.
    route_timeout_s: float = 1.0
    # How long the end of an answer may wait for Complete; it goes on in the background.
    complete_wait_s: float = 0.05
    complete_timeout_s: float = 5.0
    # How often the list of workers is asked for.
    refresh_interval_s: float = 1.0
    # A list this old no longer tells that a worker is lost.
    refresh_stale_s: float = 5.0

    connect_timeout_s: float = 2.0
    prefill_timeout_s: float = 300.0
    # For a prefill that reads KV: then it is cancelled and the prompt computed.
    reuse_timeout_s: float = 10.0
    # Until a decode's first byte (streams) or its whole answer (the others).
    first_byte_timeout_s: float = 300.0
    answer_timeout_s: float = 1800.0
    # Between two chunks of a stream, comments not counted.
    idle_timeout_s: float = 300.0
    # A whole stream.
    stream_timeout_s: float = 14_400.0
    # Between two chunks of a stream whose worker the registry calls lost.
    lost_idle_timeout_s: float = 3.0
    # Decode workers that are tried for one request.
    decode_tries: int = 3
    # Largest event of an engine's stream, and its largest answer that is no stream.
    max_event_bytes: int = 16 * 1024 * 1024
    max_answer_bytes: int = 64 * 1024 * 1024
    max_stream_bytes: int = 1024 * 1024 * 1024

    # Requests under way get this long to finish at a stop.
    drain_s: float = 30.0
    # Between two health checks of static workers.
    health_interval_s: float = 1.0
    static_workers: tuple[StaticWorker, ...] = ()


_STATIC_FIELDS: Final = {field.name for field in fields(StaticWorker)}


def static_workers_from_json(text: str) -> tuple[StaticWorker, ...]:
    """Return the workers of a JSON list of objects, with StaticWorker's fields as keys.

    Raises InvalidField("static_workers...") naming the item, the field and the reason.
    """
    try:
        items = json.loads(text) if text.strip() else []
    except ValueError as error:
        raise InvalidField("static_workers", f"is not JSON: {error}") from error
    if not isinstance(items, list):
        raise InvalidField("static_workers", "must be a list of objects")
    workers = tuple(_static_worker(number, item) for number, item in enumerate(items))
    names = [worker.worker_id for worker in workers]
    if len(set(names)) < len(names):
        raise InvalidField("static_workers", "each worker_id may come once")
    return workers


def _static_worker(number: int, item: Any) -> StaticWorker:
    where = f"static_workers[{number}]"
    if not isinstance(item, dict):
        raise InvalidField(where, "must be an object")
    for key in item:
        if key not in _STATIC_FIELDS:
            raise InvalidField(f"{where}.{key}", "there is no such field")
    for key in ("worker_id", "url", "role", "model"):
        if not isinstance(item.get(key), str):
            raise InvalidField(f"{where}.{key}", "must be set")
    values = dict(item)
    if "served_models" in values:
        names = values["served_models"]
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise InvalidField(f"{where}.served_models", "must be a list of names")
        values["served_models"] = tuple(names)
    try:
        return StaticWorker(**values)
    except InvalidField as error:
        field = error.metadata["field"]
        problem = error.message.removeprefix(f"{field}: ")
        raise InvalidField(f"{where}.{field}", problem) from error
    except TypeError as error:
        raise InvalidField(where, f"a field has the wrong type: {error}") from error
