"""Requests spoilt on the wire: bytes that no stub would send."""

from collections.abc import Callable
from typing import Final

from hypothesis import strategies as st

from fuzz.drawing import Drawing

_NOT_UTF8: Final = (b"\xff", b"\xed\xa0\x80", b"\xc0\x80", b"\xe2\x82")
# A field of a number that nobody has, groups without an end, lengths beyond the end.
_PIECES: Final = (
    b"\xc2\x3e\x03abc", b"\x0b", b"\x0c", b"\x0a\xff\xff\xff\xff\x0f", b"\x08" + b"\xff" * 10,
    b"\x00", b"\x0f\x01", b"\x0a\x00" * 50, b"\x12\x02\xff\xfe", b"\x0a\x03\xed\xa0\x80",
    b"\x0b" * 200,
    b"\x15\x00\x00\xc0\x7f", b"\x1a\x80\x80\x80\x80\x80\x80\x80\x80\x80\x01",
)  # fmt: skip
_BYTES: Final = st.binary(max_size=60)


def _cut(raw: bytes, drawing: Drawing) -> bytes:
    return raw[: drawing.below(len(raw) + 1)]


def _with_piece(raw: bytes, drawing: Drawing) -> bytes:
    at = drawing.below(len(raw) + 1)
    return raw[:at] + drawing.one_of(_PIECES) + raw[at:]


def _appended(raw: bytes, drawing: Drawing) -> bytes:
    return raw + drawing.one_of(_PIECES)


def _twice(raw: bytes, drawing: Drawing) -> bytes:
    return raw + raw[: drawing.below(len(raw) + 1)]


def _overwritten(raw: bytes, drawing: Drawing) -> bytes:
    wrong = drawing.one_of(_NOT_UTF8)
    at = drawing.below(max(1, len(raw) - len(wrong)))
    return raw[:at] + wrong + raw[at + len(wrong) :]


def _flipped(raw: bytes, drawing: Drawing) -> bytes:
    if not raw:
        return raw
    at = drawing.below(len(raw))
    return raw[:at] + bytes([raw[at] ^ 1 << drawing.below(8)]) + raw[at + 1 :]


def _nested(raw: bytes, drawing: Drawing) -> bytes:
    """Return it within itself, as field 1 of field 1 and so on."""
    for _ in range(drawing.one_of((1, 5, 60, 150))):
        length, head = len(raw), b""
        while True:
            more = length > 0x7F
            head += bytes([length & 0x7F | (0x80 if more else 0)])
            length >>= 7
            if not more:
                break
        raw = b"\x0a" + head + raw
    return raw


def _random(raw: bytes, drawing: Drawing) -> bytes:
    return bytes(drawing.draw(_BYTES))


_WAYS: Final[tuple[Callable[[bytes, Drawing], bytes], ...]] = (
    _cut, _with_piece, _appended, _twice, _overwritten, _flipped, _nested, _random,
)  # fmt: skip


def spoilt(raw: bytes, drawing: Drawing) -> bytes:
    """Return the request with something wrong in its bytes."""
    return drawing.one_of(_WAYS)(raw, drawing)
