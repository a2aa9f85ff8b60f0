"""Requests into domain values. Everything a caller can get wrong is found here.

Each function raises InvalidField, naming the field by its path.
"""

import base64
import binascii
import json
import math
from collections.abc import Container, Iterable, Sequence
from dataclasses import replace
from typing import Final

from google.protobuf.duration_pb2 import Duration

from kvplane.api.lease.v1 import lease_pb2 as pb
from kvplane.kernel.digests import DIGEST_SIZE
from kvplane.kernel.errors import InvalidField
from kvplane.kernel.validate import at_most_items, between, identifier, page_size, plain, tenant_id
from kvplane.lease.store import GrantOrder, LeaseRef, Page, ReportedItem
from kvplane.lease.values import (
    Handle,
    Holder,
    LeaseState,
    Outcome,
    Ownership,
    OwnershipState,
    Payload,
)

MAX_BATCH: Final = 1000
MAX_INVENTORY: Final = 20_000
_MAX_DIGESTS: Final = 4 << 20
_MAX_TOKENS: Final = _MAX_DIGESTS // DIGEST_SIZE * (1 << 16)
_MAX_GROUPS: Final = 64
_MAX_BLOCKS: Final = _MAX_DIGESTS // DIGEST_SIZE
_MAX_EXTRA: Final = 64 << 10
_MAX_INT64: Final = (1 << 63) - 1
# A year: no hold or age is longer, and no sum of two overflows.
_MAX_SECONDS: Final = 366 * 86_400
_NANOS: Final = 1_000_000_000


def micros_of(field: str, value: Duration) -> int:
    """Return a duration of 0 to one year in microseconds, rounded down."""
    if not (0 <= value.seconds <= _MAX_SECONDS and 0 <= value.nanos < _NANOS):
        raise InvalidField(field, "must be from 0 s to 366 days")
    return value.seconds * 1_000_000 + value.nanos // 1000


def epoch(field: str, value: int) -> int:
    """Return a worker's epoch; they count from 1."""
    between(field, value, 1, _MAX_INT64)
    return value


def stream_number(field: str, value: int) -> int:
    """Return which of its streams a worker opens; they count from 1."""
    between(field, value, 1, _MAX_INT64)
    return value


def hold_limit(field: str, value: int) -> int:
    """Return how many blocks a worker lets be held; 0 is no limit."""
    between(field, value, 0, _MAX_INT64)
    return value


def worker(prefix: str, worker_id: str, number: int) -> tuple[str, int]:
    """Return a worker's id and epoch."""
    return identifier(f"{prefix}worker_id", worker_id), epoch(f"{prefix}epoch", number)


def holder(message: pb.Holder, *, compatibility: bool = False) -> Holder:
    """Return a holder, with its compatibility where that is checked."""
    worker("holder.", message.worker_id, message.epoch)
    if compatibility:
        plain("holder.compatibility", message.compatibility, 4096)
    return Holder(message.worker_id, message.epoch, message.compatibility)


def handle(field: str, message: pb.OwnedHandle) -> Handle:
    """Return an engine's name for blocks."""
    plain(f"{field}.engine_id", message.engine_id, 256)
    plain(f"{field}.request_id", message.request_id, 256)
    return Handle(message.engine_id, message.request_id)


def handles(field: str, messages: Sequence[pb.OwnedHandle], limit: int = MAX_BATCH) -> list[Handle]:
    """Return a list of them."""
    at_most_items(field, len(messages), limit)
    return [handle(f"{field}[{index}]", message) for index, message in enumerate(messages)]


def sent_by(prefix: str, message: pb.TimeAnchor) -> int:
    """Return the instant, on the server's clock, that a message was sent no earlier than."""
    field = f"{prefix}time_anchor"
    if message.anchor <= 0:
        raise InvalidField(f"{field}.anchor", "must be one that this server has given out")
    between(f"{field}.anchor", message.anchor, 1, _MAX_INT64 // 2)
    return message.anchor + micros_of(f"{field}.elapsed", message.elapsed)


def reported(
    prefix: str, worker_id: str, epoch: int, messages: Sequence[pb.Ownership]
) -> list[ReportedItem]:
    """Return what a worker reports."""
    field = f"{prefix}ownerships"
    at_most_items(field, len(messages), MAX_BATCH)
    return [
        _reported_item(f"{field}[{index}]", worker_id, epoch, message)
        for index, message in enumerate(messages)
    ]


def _reported_item(field: str, worker_id: str, epoch: int, message: pb.Ownership) -> ReportedItem:
    tenant_id(f"{field}.tenant_id", message.tenant_id)
    if message.session_id:
        identifier(f"{field}.session_id", message.session_id)
    between(f"{field}.turn", message.turn, 1 if message.session_id else 0, _MAX_INT64)
    if message.worker_id not in ("", worker_id):
        raise InvalidField(f"{field}.worker_id", "must be the reporting worker's, or empty")
    if message.epoch not in (0, epoch):
        raise InvalidField(f"{field}.epoch", "must be the reporting worker's, or 0")
    between(f"{field}.num_tokens", message.num_tokens, 1, _MAX_TOKENS)
    between(f"{field}.block_size", message.block_size, 1, 1 << 16)
    if len(message.digests) > _MAX_DIGESTS:
        raise InvalidField(f"{field}.digests", f"at most {_MAX_DIGESTS} bytes")
    blocks = -(-message.num_tokens // message.block_size)
    if len(message.digests) != blocks * DIGEST_SIZE:
        raise InvalidField(
            f"{field}.digests",
            f"must be {blocks * DIGEST_SIZE} bytes, {DIGEST_SIZE} for each of {blocks} blocks",
        )
    plain(f"{field}.compatibility", message.compatibility, 4096)
    source = _params(f"{field}.params", message.params)
    hold_us = None
    if message.HasField("hold"):
        hold_us = micros_of(f"{field}.hold", message.hold)
    own = Ownership(
        ownership_id=source.ownership_id,
        tenant_id=message.tenant_id,
        session_id=message.session_id,
        turn=message.turn,
        worker_id=worker_id,
        epoch=epoch,
        engine_id=source.engine_id,
        request_id=source.request_id,
        num_tokens=message.num_tokens,
        block_size=message.block_size,
        compatibility=message.compatibility,
        cuttable=message.cuttable,
        for_decode=message.for_decode,
        reported_us=0,
        state=OwnershipState.HELD,
        hold_deadline_us=0,
        blocks=sum(len(group.ids) for group in message.params.remote_block_ids) or blocks,
    )
    return ReportedItem(own, Payload(message.params.SerializeToString(), message.digests), hold_us)


def _params(field: str, params: pb.KvTransferParams) -> Handle:
    """Check a handle and return the engine's name for its blocks."""
    plain(f"{field}.remote_engine_id", params.remote_engine_id, 256)
    plain(f"{field}.remote_request_id", params.remote_request_id, 256)
    if params.HasField("remote_host"):
        plain(f"{field}.remote_host", params.remote_host, 255)
    if params.HasField("remote_port"):
        between(f"{field}.remote_port", params.remote_port, 1, 65_535)
    for name in ("tp_size", "dcp_size", "pp_size"):
        if params.HasField(name):
            between(f"{field}.{name}", getattr(params, name), 1, 1 << 16)
    if params.HasField("remote_num_tokens"):
        between(f"{field}.remote_num_tokens", params.remote_num_tokens, 0, _MAX_TOKENS)
    if not math.isfinite(params.remote_blocks_expiry_time):
        raise InvalidField(f"{field}.remote_blocks_expiry_time", "must be a finite number")
    if params.HasField("transfer_mode"):
        plain(f"{field}.transfer_mode", params.transfer_mode, 64)
    at_most_items(f"{field}.remote_block_ids", len(params.remote_block_ids), _MAX_GROUPS)
    for index, group in enumerate(params.remote_block_ids):
        at_most_items(f"{field}.remote_block_ids[{index}].ids", len(group.ids), _MAX_BLOCKS)
        if min(group.ids, default=0) < 0:
            raise InvalidField(f"{field}.remote_block_ids[{index}].ids", "must not be negative")
    if params.extra_json:
        _json_object(f"{field}.extra_json", params.extra_json)
    return Handle(params.remote_engine_id, params.remote_request_id)


def _json_object(field: str, text: str) -> None:
    if len(text) > _MAX_EXTRA:
        raise InvalidField(field, f"at most {_MAX_EXTRA} characters")
    try:
        value = json.loads(text, parse_constant=_finite, parse_float=_finite)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise InvalidField(field, "must be a JSON object")


def _finite(text: str) -> float:
    """Refuse what Python reads as infinity and other parsers do not read at all."""
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(text)
    return value


def grant_order(message: pb.GrantLeaseRequest, tenant_id: str) -> tuple[GrantOrder, int]:
    """Return a request for a lease, and how long to wait in microseconds."""
    plain("request_id", message.request_id, 128)
    ownership_id = session_id = ""
    scope: str | None = tenant_id
    match message.WhichOneof("target"):
        case "ownership_id":
            ownership_id = plain("ownership_id", message.ownership_id, 128)
        case "session_id":
            session_id = plain("session_id", message.session_id, 128)
        case "handle":
            ownership_id = handle("handle", message.handle).ownership_id
            scope = None  # workers name no tenant; the ownership has one
        case _:
            raise InvalidField("target", "set one of ownership_id, handle, session_id")
    between("min_tokens", message.min_tokens, 0, _MAX_INT64)
    order = GrantOrder(
        request_id=message.request_id,
        tenant_id=scope,
        holder=holder(message.holder, compatibility=True),
        ownership_id=ownership_id,
        session_id=session_id,
        ttl_us=micros_of("ttl", message.ttl),
        min_tokens=message.min_tokens,
        begin_read=message.begin_read,
    )
    return order, micros_of("wait", message.wait)


def lease_refs(messages: Iterable[pb.LeaseRef], count: int) -> list[LeaseRef]:
    """Return what is to be renewed."""
    at_most_items("leases", count, MAX_BATCH)
    return [
        lease_ref(f"leases[{index}].", ref.lease_id, ref.fencing_token)
        for index, ref in enumerate(messages)
    ]


def releases(messages: Sequence[pb.LeaseRelease]) -> list[LeaseRef]:
    """Return what is to be released."""
    at_most_items("releases", len(messages), MAX_BATCH)
    refs = []
    for index, message in enumerate(messages):
        at = f"releases[{index}]."
        ref = lease_ref(at, message.lease_id, message.fencing_token)
        if message.outcome not in (1, 2, 3):
            raise InvalidField(f"{at}outcome", "must be CONSUMED, UNUSED or NEVER_BEGUN")
        refs.append(replace(ref, outcome=Outcome(message.outcome)))
    return refs


def lease_ref(at: str, lease_id: str, fencing_token: int) -> LeaseRef:
    """Return a grant as its holder names it. A strange one is no mistake: it is unknown."""
    plain(f"{at}lease_id", lease_id, 128)
    between(f"{at}fencing_token", fencing_token, 1, _MAX_INT64)
    return LeaseRef(lease_id, fencing_token)


def ownership_states(values: Sequence[int]) -> list[OwnershipState]:
    """Return a filter by state."""
    return [OwnershipState(value) for value in _states(values, set(OwnershipState))]


def lease_states(values: Sequence[int]) -> list[LeaseState]:
    """Return a filter by state."""
    return [LeaseState(value) for value in _states(values, set(LeaseState))]


def _states(values: Sequence[int], known: Container[int]) -> list[int]:
    """Return them once each: they are parameters of a statement."""
    at_most_items("states", len(values), MAX_BATCH)
    if unknown := [value for value in values if value not in known]:
        raise InvalidField("states", f"unknown state {unknown[0]}")
    return sorted(set(values))


def filters(session_id: str, worker_id: str) -> tuple[str, str]:
    """Return filters by session and worker; empty ones filter nothing."""
    if session_id:
        plain("session_id", session_id, 128)
    if worker_id:
        plain("worker_id", worker_id, 128)
    return session_id, worker_id


def page(size: int, token: str) -> Page:
    """Return where a page begins and how long it is."""
    if not token:
        return Page(page_size(size))
    if len(token) > 512:
        raise InvalidField("page_token", "is not one of this server's")
    try:
        raw = base64.urlsafe_b64decode(token.encode("ascii"))
        instant, separator, ident = raw.decode("ascii").partition(":")
        after = (int(instant), ident)
    except (ValueError, binascii.Error) as error:
        raise InvalidField("page_token", "is not one of this server's") from error
    if not separator or not 0 <= after[0] <= _MAX_INT64 or "\0" in ident:
        raise InvalidField("page_token", "is not one of this server's")
    return Page(page_size(size), after)


def page_token(after: tuple[int, str] | None) -> str:
    """Return the token of the page that begins after that row, "" when there is none."""
    if after is None:
        return ""
    return base64.urlsafe_b64encode(f"{after[0]}:{after[1]}".encode()).decode()
