"""Tables `workers` and `routes`, on SQLite and PostgreSQL, and rows to values."""

import dataclasses
import json
from collections.abc import Sequence
from typing import Any

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    Float,
    Index,
    Integer,
    LargeBinary,
    String,
    Table,
)

from kvplane.db.metadata import metadata
from kvplane.routing.domain import Compatibility, Load, Profile, Role, State, Worker

workers = Table(
    "workers",
    metadata,
    Column("worker_id", String(128), primary_key=True),
    Column("instance_id", String(128), nullable=False),
    Column("epoch", BigInteger, nullable=False),
    Column("state", Integer, nullable=False),
    Column("role", Integer, nullable=False),
    Column("url", String(512), nullable=False),
    Column("kv_host", String(256), nullable=False),
    Column("kv_port", Integer, nullable=False),
    Column("engine_id", String(256), nullable=False),
    Column("data_parallel_rank", Integer, nullable=True),
    Column("model", String(256), nullable=False),
    Column("revision", String(256), nullable=False),
    Column("block_size", Integer, nullable=False),
    Column("kv_layout", String(256), nullable=False),
    Column("kv_dtype", String(256), nullable=False),
    Column("engine_version", String(256), nullable=False),
    Column("bidirectional", Boolean, nullable=False),
    Column("managed", Boolean, nullable=False),
    Column("max_model_len", BigInteger, nullable=False),
    Column("recompute_threshold", Integer, nullable=False),
    # A JSON list.
    Column("served_models", String, nullable=False),
    Column("running", Integer, nullable=False),
    Column("waiting", Integer, nullable=False),
    Column("kv_usage", Float, nullable=False),
    Column("held", Integer, nullable=False),
    Column("last_beat_us", BigInteger, nullable=False),
    Column("void_below", BigInteger, nullable=False),
    Column("voided_below", BigInteger, nullable=False),
    # Lost workers stay (their epochs must never begin again at 1) and may become many.
    Index(None, "state", "last_beat_us"),
)

routes = Table(
    "routes",
    metadata,
    Column("tenant_id", String(64), primary_key=True),
    Column("request_id", String(128), primary_key=True),
    Column("attempt", String(32), primary_key=True),
    # A serialised RouteResponse.
    Column("answer", LargeBinary, nullable=False),
    Column("created_us", BigInteger, nullable=False),
    Index(None, "created_us"),
)

_PROFILE_COLUMNS = tuple(
    name
    for name in Profile.__dataclass_fields__
    if name not in {"compatibility", "role", "served_models"}
)
WORKER_COLUMNS = tuple(workers.c.keys())
_LOAD_COLUMNS = tuple(Load.__dataclass_fields__)
_COMPATIBILITY_COLUMNS = tuple(Compatibility.__dataclass_fields__)


def worker_values(worker: Worker) -> dict[str, Any]:
    """Return a worker's columns."""
    profile = worker.profile
    return {
        **{name: getattr(profile, name) for name in _PROFILE_COLUMNS},
        **dataclasses.asdict(profile.compatibility),
        **dataclasses.asdict(worker.load),
        "role": int(profile.role),
        "served_models": json.dumps(profile.served_models),
        "instance_id": worker.instance_id,
        "epoch": worker.epoch,
        "state": int(worker.state),
        "last_beat_us": worker.last_beat_us,
        "void_below": worker.void_below,
        "voided_below": worker.voided_below,
    }


def worker_of(row: Sequence[Any]) -> Worker:
    """Make a Worker of a whole row."""
    values = dict(zip(WORKER_COLUMNS, row, strict=True))
    for name in ("bidirectional", "managed"):
        values[name] = bool(values[name])
    profile = Profile(
        **{name: values[name] for name in _PROFILE_COLUMNS},
        role=Role(values["role"]),
        served_models=tuple(json.loads(values["served_models"])),
        compatibility=Compatibility(**{name: values[name] for name in _COMPATIBILITY_COLUMNS}),
    )
    return Worker(
        profile=profile,
        instance_id=values["instance_id"],
        epoch=values["epoch"],
        state=State(values["state"]),
        load=Load(**{name: values[name] for name in _LOAD_COLUMNS}),
        last_beat_us=values["last_beat_us"],
        void_below=values["void_below"],
        voided_below=values["voided_below"],
    )
