"""vllm's kv_transfer_params: a JSON object on the engine's side, KvTransferParams on ours.

Integers stay integers, absent stays absent, unknown keys survive. What the typed fields
cannot say (a null, an empty or a flat `remote_block_ids`) travels in `extra_json` under
its own name, so that `to_dict(from_dict(d)) == d` but for the engine's private keys.
"""

import json
from collections.abc import Mapping
from typing import Any, Final

from kvplane.api.lease.v1 import lease_pb2 as lease
from kvplane.kernel.errors import InvalidField

# Notes that an engine leaves in its own copy; another engine must not see them.
PRIVATE_KEYS: Final = frozenset({"_remote_blocks_processed", "_p_side_truncated"})

_BOOLS: Final = frozenset({"do_remote_prefill", "do_remote_decode"})
_TEXTS: Final = frozenset({"remote_engine_id", "remote_request_id", "remote_host", "transfer_mode"})
_INTS: Final = {
    "remote_port": 32,
    "tp_size": 32,
    "dcp_size": 32,
    "pp_size": 32,
    "remote_num_tokens": 64,
    "remote_registration_generation": 64,
}
_FLOATS: Final = frozenset({"remote_blocks_expiry_time"})
_BLOCKS: Final = "remote_block_ids"
_SCALARS: Final = (*sorted(_BOOLS), *sorted(_TEXTS), *_INTS, *_FLOATS)


def from_dict(params: Mapping[str, Any]) -> lease.KvTransferParams:
    """Return the message for an engine's kv_transfer_params.

    Raises InvalidField("kv_transfer_params.<key>") for a known key of another type or
    out of range, and for a value that JSON cannot carry.
    """
    message = lease.KvTransferParams()
    extra: dict[str, Any] = {}
    for key, value in params.items():
        if key in PRIVATE_KEYS:
            continue
        if value is None:
            extra[key] = None
        elif key == _BLOCKS:
            _put_blocks(message, extra, value)
        elif key in _BOOLS:
            setattr(message, key, _typed(key, value, bool, "true or false"))
        elif key in _TEXTS:
            setattr(message, key, _typed(key, value, str, "a string"))
        elif key in _INTS:
            setattr(message, key, _integer(key, value, _INTS[key]))
        elif key in _FLOATS:
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise InvalidField(f"kv_transfer_params.{key}", "must be a number")
            setattr(message, key, float(value))
        else:
            extra[key] = value
    if extra:
        message.extra_json = _dump(extra)
    return message


def to_dict(message: lease.KvTransferParams) -> dict[str, Any]:
    """Return the JSON object for an engine. Raises InvalidField("extra_json")."""
    params: dict[str, Any] = {}
    for key in _SCALARS:
        if message.HasField(key):
            params[key] = getattr(message, key)
    if message.remote_block_ids:
        params[_BLOCKS] = [list(group.ids) for group in message.remote_block_ids]
    if message.extra_json:
        for key, value in extra(message).items():
            if key not in PRIVATE_KEYS:
                params.setdefault(key, value)
    return params


def extra(message: lease.KvTransferParams) -> dict[str, Any]:
    """Return the keys without a field of their own, {} when there are none.

    Raises InvalidField("extra_json") when it is not a JSON object.
    """
    if not message.extra_json:
        return {}
    try:
        value = json.loads(message.extra_json)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise InvalidField("extra_json", "must be a JSON object")
    return value


def with_extra(message: lease.KvTransferParams, **keys: Any) -> lease.KvTransferParams:
    """Return a copy that carries these extra keys too, in place of older ones."""
    copy = lease.KvTransferParams()
    copy.CopyFrom(message)
    copy.extra_json = _dump({**extra(message), **keys})
    return copy


def _put_blocks(message: lease.KvTransferParams, extra: dict[str, Any], value: Any) -> None:
    field = f"kv_transfer_params.{_BLOCKS}"
    if not isinstance(value, list | tuple):
        raise InvalidField(field, "must be a list of lists of block ids")
    grouped = all(isinstance(group, list | tuple) for group in value)
    flat = value if not grouped else [ident for group in value for ident in group]
    for ident in flat:
        if isinstance(ident, bool) or not isinstance(ident, int) or not 0 <= ident < 1 << 63:
            raise InvalidField(field, "block ids are integers from 0")
    if not value or not grouped:
        extra[_BLOCKS] = list(value)
        return
    for group in value:
        message.remote_block_ids.add(ids=group)


def _typed(key: str, value: Any, kind: type, wanted: str) -> Any:
    if not isinstance(value, kind):
        raise InvalidField(f"kv_transfer_params.{key}", f"must be {wanted}")
    return value


def _integer(key: str, value: Any, bits: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidField(f"kv_transfer_params.{key}", "must be an integer")
    if not -(1 << (bits - 1)) <= value < 1 << (bits - 1):
        raise InvalidField(f"kv_transfer_params.{key}", f"does not fit into {bits} bits")
    return value


def _dump(extra: dict[str, Any]) -> str:
    try:
        return json.dumps(extra, separators=(",", ":"), allow_nan=False)
    except (TypeError, ValueError) as error:
        raise InvalidField("kv_transfer_params", f"is not JSON: {error}") from error
