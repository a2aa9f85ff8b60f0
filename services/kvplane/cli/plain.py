"""Messages as plain values: for `--json` as they are, for people as short text."""

from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from typing import Any

from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.protobuf.timestamp_pb2 import Timestamp


def plain(message: Message) -> dict[str, Any]:
    """Return a message as JSON values.

    Durations are seconds, times ISO 8601, enums their short name in lower case, bytes
    hexadecimal. Absent messages and optional fields are null.
    """
    return {field.name: _field(message, field) for field in message.DESCRIPTOR.fields}


def _field(message: Message, field: Any) -> Any:
    value = getattr(message, field.name)
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        return dict(value)
    if field.is_repeated:
        return [_value(item, field) for item in value]
    if field.has_presence and not message.HasField(field.name):
        return None
    return _value(value, field)


def _value(value: Any, field: Any) -> Any:
    if isinstance(value, Duration):
        return value.seconds + value.nanos / 1e9
    if isinstance(value, Timestamp):
        moment: datetime = value.ToDatetime(tzinfo=UTC)
        return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")
    if isinstance(value, Message):
        return plain(value)
    if field.enum_type is not None:
        return enum_name(field.enum_type, value)
    return value.hex() if isinstance(value, bytes) else value


def enum_name(enum: Any, number: int) -> str:
    """Return ``held`` for OWNERSHIP_STATE_HELD; the number for one that is not known."""
    known = enum.values_by_number.get(number)
    if known is None:
        return str(number)
    return str(known.name).removeprefix(enum_prefix(enum)).lower()


def enum_prefix(enum: Any) -> str:
    """Return what all names of an enum begin with, by its zero value."""
    return str(enum.values_by_number[0].name).removesuffix("UNSPECIFIED")


def enum_choices(enum: Any) -> list[str]:
    """Return the short names, without the zero value."""
    return [enum_name(enum, number) for number in enum.values_by_number if number]


def duration(seconds: float | None) -> str:
    """Return a duration for people: ``0.4 s``, ``3 min 5 s``, ``2 h 10 min``, ``5 d 3 h``."""
    if seconds is None:
        return "-"
    sign = "-" if seconds < 0 else ""
    seconds = abs(seconds)
    if seconds < 9.95:
        return f"{sign}{seconds:.1f} s"
    whole = round(seconds)
    for size, unit, small_size, small in (
        (86_400, "d", 3_600, "h"),
        (3_600, "h", 60, "min"),
        (60, "min", 1, "s"),
    ):
        if whole >= size:
            rest = whole % size // small_size
            return f"{sign}{whole // size} {unit}" + (f" {rest} {small}" if rest else "")
    return f"{sign}{whole} s"


def ago(moment: str | None, now: datetime) -> str:
    """Return how long an ISO time is past, or ``in ...`` when it is to come."""
    if moment is None:
        return "-"
    seconds = (now - datetime.fromisoformat(moment)).total_seconds()
    return f"in {duration(-seconds)}" if seconds < 0 else f"{duration(seconds)} ago"


def text(value: Any) -> str:
    """Return a value for a table's cell."""
    if value is None or value in ("", [], {}):
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, Mapping):
        return " ".join(f"{key}={text(item)}" for key, item in value.items())
    if isinstance(value, Iterable) and not isinstance(value, str):
        return ", ".join(text(item) for item in value)
    return f"{value:,}" if isinstance(value, int) else str(value)
