"""Taking members out of a JSON object, or putting some in, without touching the rest.

Parsing and writing again would change numbers, escapes and spaces that are not ours.
"""

import json
import re
from collections.abc import Collection, Mapping
from typing import Any, Final

import orjson

# A list of nothing but numbers is one token: block ids are many.
_TOKEN: Final = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"|\[[-+.0-9eE,\s]*+\]|[{}\[\],]', re.DOTALL)
_QUOTE, _COMMA = b'",'
_OPEN_OBJECT, _OPEN_LIST = b"{["


class _Object:
    """An object being read: where its members begin and end."""

    __slots__ = ("child", "key", "members", "names", "start")

    def __init__(self, names: Collection[bytes]) -> None:
        # Names to take out; empty when this object is none of ours.
        self.names = names
        self.members: list[tuple[int, int, bool]] = []
        self.start = -1
        self.key = b""

    def end_member(self, end: int) -> None:
        if self.start >= 0:
            self.members.append((self.start, end, self.key in self.names))
            self.start = -1


class _List:
    """A list being read; `ours` when it is the choices of an answer."""

    __slots__ = ("ours",)

    def __init__(self, ours: bool) -> None:
        self.ours = ours


def without(
    data: bytes,
    top: Collection[bytes],
    in_choices: Collection[bytes] = frozenset(),
    anywhere: Collection[bytes] = frozenset(),
) -> bytes:
    """Return `data`, a valid JSON object, without some members, however they are spelled.

    `top` names members of the object itself, `in_choices` members of the objects in its
    list ``choices``, `anywhere` members of all objects. What else is there stays as it is,
    byte by byte.
    """
    here, in_choice = {*top, *anywhere}, {*in_choices, *anywhere}
    stack: list[_Object | _List] = []
    cuts: list[tuple[int, int]] = []
    for token in _TOKEN.finditer(data):
        start = token.start()
        kind = data[start]
        frame = stack[-1] if stack else None
        if kind == _QUOTE:
            if isinstance(frame, _Object) and frame.start < 0:
                frame.start = start
                frame.key = _key(data[start : token.end()])
        elif kind == _COMMA:
            if isinstance(frame, _Object):
                frame.end_member(start)
        elif kind == _OPEN_OBJECT:
            ours = isinstance(frame, _List) and frame.ours
            stack.append(_Object(here if frame is None else in_choice if ours else anywhere))
        elif kind == _OPEN_LIST:
            if token.end() > start + 1:
                continue
            at_top = len(stack) == 1 and isinstance(frame, _Object)
            stack.append(_List(at_top and frame.key == b"choices"))  # type: ignore[union-attr]
        elif stack:  # a closing bracket
            stack.pop()
            if isinstance(frame, _Object):
                frame.end_member(start)
                if frame.names:
                    cuts.extend(_cuts(frame.members))
    if not cuts:
        return data
    parts, last = [], 0
    for start, end in sorted(cuts):
        parts.append(data[last:start])
        last = max(last, end)
    parts.append(data[last:])
    return b"".join(parts)


def _key(quoted: bytes) -> bytes:
    if b"\\" not in quoted:
        return quoted[1:-1]
    key: str = json.loads(quoted)
    return key.encode("utf-8", "surrogatepass")


def _cuts(members: list[tuple[int, int, bool]]) -> list[tuple[int, int]]:
    """Return what to cut out of one object: the members and one comma each."""
    cuts = []
    kept_end: int | None = None
    for number, (start, end, out) in enumerate(members):
        if not out:
            kept_end = end
        elif any(not later[2] for later in members[number + 1 :]):
            cuts.append((start, members[number + 1][0]))
        else:
            # Nothing is kept after it: the comma before it goes instead.
            cuts.append((start if kept_end is None else kept_end, members[-1][1]))
            break
    return cuts


def with_members(data: bytes, parsed: Mapping[str, Any], members: Mapping[str, Any]) -> bytes:
    """Return `data`, a JSON object that was parsed as `parsed`, with `members` put in.

    Members of the same names must have been taken out before.
    """
    if not members:
        return data
    added = orjson.dumps(members)
    end = data.rindex(b"}")
    return data[:end] + (b"," if parsed else b"") + added[1:-1] + data[end:]
