"""Messages of any type, drawn from their descriptors and from what is there."""

import math
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, Final, TypeVar

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from hypothesis import strategies as st

from fuzz.methods import fields, is_map
from fuzz.pool import Pool

T = TypeVar("T")

_F: Final = FieldDescriptor
_BITS: Final = {
    _F.TYPE_INT32: (32, True), _F.TYPE_SINT32: (32, True), _F.TYPE_SFIXED32: (32, True),
    _F.TYPE_INT64: (64, True), _F.TYPE_SINT64: (64, True), _F.TYPE_SFIXED64: (64, True),
    _F.TYPE_UINT32: (32, False), _F.TYPE_FIXED32: (32, False),
    _F.TYPE_UINT64: (64, False), _F.TYPE_FIXED64: (64, False),
}  # fmt: skip
_FLOATS: Final = (
    0.0, 1.0, 0.5, -1.0, -0.0, math.nan, math.inf, -math.inf, 1e308, -1e308, 5e-324, 1e16,
)  # fmt: skip
_TEXTS: Final = (
    "", " ", "a", "\0", "a\0b", "a\nb", "é", "e\u0301", "\u202ex", "\ufeffa", "\U0001f600" * 40,
    "x" * 128,
    "x" * 129, "x" * 513, "é" * 300, "x" * 70_000, "../../etc/passwd", "%00", "'; DROP TABLE x; --",
    "a:b", "{}", "[" * 500, '{"a":' * 200, '{"do_remote_prefill":true}', '{"a":1e999}', "-1",
    "\x7f",
    "http://127.0.0.1:1/", "http://[::1", "\u0130", "\U0010ffff", "-a", "a b", "A" * 64, "=====",
    "AA==",
)  # fmt: skip
_BYTES: Final = (b"", b"\0", b"x" * 15, b"x" * 16, b"x" * 17, bytes(16) * 65, b"\xff" * 70_000)
_TIMES: Final = ("google.protobuf.Duration", "google.protobuf.Timestamp")
# Beyond what the well-known types allow, too.
_SECONDS: Final = (
    0, 1, 5, 400, -1, 315_576_000_000, 315_576_000_001, -315_576_000_001, 2**63 - 1, -(2**63),
    253_402_300_800, -62_135_596_801, 1_800_000_000, 9_223_372_036, 9_223_372_036_855,
)  # fmt: skip
_NANOS: Final = (0, 1, 999_999_999, -1, -999_999_999, 1_000_000_000, 2**31 - 1, -(2**31), 500)
# Most requests are small; some are at the limits of lists.
_COUNTS: Final = (1, 1, 1, 2, 2, 3, 5, 0)
_MANY: Final = (65, 1001, 5000)


@cache
def _below(count: int) -> st.SearchStrategy[int]:
    return st.integers(0, count - 1)


_TEXT: Final = st.text(max_size=12)
_ANY_BYTES: Final = st.binary(max_size=40)


class Drawing:
    """Draws from a pool of what is there, and from what is odd."""

    def __init__(self, draw: Callable[[st.SearchStrategy[Any]], Any], pool: Pool) -> None:
        self.draw, self._pool = draw, pool

    def below(self, count: int) -> int:
        """Return a number from 0, which is the simplest, to `count` - 1."""
        return int(self.draw(_below(count)))

    def one_of(self, choices: Sequence[T]) -> T:
        """Return one of them; the first is the simplest."""
        return choices[self.below(len(choices))]

    def rarely(self, one_in: int) -> bool:
        """Return True once in so many times."""
        return self.below(one_in) == one_in - 1

    # -- whole messages -----------------------------------------------------------

    def message(self, descriptor: Descriptor) -> Message:
        """Return a message of any content."""
        made = GetMessageClass(descriptor)()
        if descriptor.full_name in _TIMES:
            self._time(made)
        else:
            for field in fields(descriptor):
                if self.below(4):
                    self._set(made, field)
        return made

    def changed(self, right: Message) -> Message:
        """Return a right request with a few fields changed."""
        made = type(right)()
        made.CopyFrom(right)
        for _ in range(self.one_of((1, 1, 2, 3, 0, 0, 0))):
            self._change(made)
        return made

    def _change(self, message: Message) -> None:
        choices = fields(message.DESCRIPTOR)
        if not choices:
            return
        field = self.one_of(choices)
        if message.DESCRIPTOR.full_name in _TIMES:
            self._time(message)
            return
        inner: list[Message] = []
        if field.message_type is not None and not is_map(field):
            if field.is_repeated:
                inner = list(getattr(message, field.name))
            elif message.HasField(field.name):
                inner = [getattr(message, field.name)]
        if inner and self.below(4):
            self._change(self.one_of(inner))
            return
        message.ClearField(field.name)
        if self.below(5):
            self._set(message, field)

    # -- fields -------------------------------------------------------------------

    def _set(self, message: Message, field: FieldDescriptor) -> None:
        if is_map(field):
            target = getattr(message, field.name)
            key, value = fields(field.message_type)
            for _ in range(self.one_of(_COUNTS)):
                if value.message_type is not None:
                    target[self._value(key)].CopyFrom(self._value(value))
                else:
                    target[self._value(key)] = self._value(value)
        elif field.is_repeated:
            values = [self._value(field) for _ in range(self.one_of(_COUNTS))]
            if values and self.rarely(40):
                values = values[:1] * self.one_of(_MANY)
            getattr(message, field.name).extend(values)
        elif field.message_type is not None:
            getattr(message, field.name).CopyFrom(self._value(field))
        else:
            setattr(message, field.name, self._value(field))

    def _value(self, field: FieldDescriptor) -> Any:
        if field.type == _F.TYPE_MESSAGE:
            return self.message(field.message_type)
        if field.type == _F.TYPE_STRING:
            return self.text(field.name)
        if field.type == _F.TYPE_BYTES:
            return self._bytes(field.name)
        if field.type == _F.TYPE_BOOL:
            return bool(self.below(2))
        if field.type == _F.TYPE_ENUM:
            known = [value.number for value in field.enum_type.values]
            return self.one_of((*known, *known, 99, -1, 2**31 - 1, -(2**31)))
        if field.type in (_F.TYPE_DOUBLE, _F.TYPE_FLOAT):
            return self.one_of(_FLOATS)
        return self._integer(field)

    def text(self, name: str) -> str:
        """Return a text for a field of that name."""
        kind = self.below(10)
        if kind < 5:
            return self.one_of(self._pool.texts(name))
        if kind == 5:
            return self.one_of(self._pool.all_texts)
        if kind == 6:
            return self._like(self.one_of(self._pool.texts(name)))
        if kind == 7:
            return self._encodable(self.draw(_TEXT))
        return self.one_of(_TEXTS)

    def _like(self, text: str) -> str:
        """Return a text that a careless comparison takes for this one."""
        return self.one_of(
            (text + " ", " " + text, text.upper(), text + "\0", text[:-1], text + "%", text + "/",
             text.replace("-", "_"), text * 2)
        )  # fmt: skip

    @staticmethod
    def _encodable(text: str) -> str:
        return text.encode("utf-8", "ignore").decode()

    def _bytes(self, name: str) -> bytes:
        kind = self.below(4)
        if kind < 2:
            return self.one_of(self._pool.raws(name))
        return self.one_of(_BYTES) if kind == 2 else bytes(self.draw(_ANY_BYTES))

    def _integer(self, field: FieldDescriptor) -> int:
        bits, signed = _BITS[field.type]
        low, high = (-(1 << bits - 1), (1 << bits - 1) - 1) if signed else (0, (1 << bits) - 1)
        if self.below(5) < 3:
            found = self.one_of(self._pool.numbers(field.name))
            if low <= found <= high:
                return found
        odd = (0, 1, 2, 3, 16, 100, 1000, 65_535, 65_536, 1 << 20, 1 << 31, (1 << 53) + 1)
        edges = (*(n for n in odd if n <= high), -1, low, high, high - 1)
        return self.one_of([n for n in edges if low <= n <= high])

    def _time(self, message: Any) -> None:
        message.seconds = self.one_of(_SECONDS)
        if not self.below(3):
            message.nanos = self.one_of(_NANOS)
