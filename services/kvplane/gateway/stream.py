"""Server-sent events: cutting a byte stream into events, and editing one of them.

Bytes are never decoded here, so a character cut in two by the network stays whole. Line
ends may be CR, LF or CRLF, mixed; comments, ids and fields of any name pass unchanged.
"""

import re
from typing import Final

from kvplane.kernel.errors import InvalidField

# An empty line. A CR that ends what has arrived ends the event: the LF that may follow
# is passed on by itself, so no event waits for it.
_EVENT_END: Final = re.compile(rb"(?:\r\n|\n|\r(?!\n))(?:\r\n|\n|\r)")
_LINE_END: Final = re.compile(rb"\r\n|\n|\r")
_BOM: Final = b"\xef\xbb\xbf"

DONE: Final = b"[DONE]"


class EventSplitter:
    """Collects bytes until they are whole events."""

    def __init__(self, max_event_bytes: int) -> None:
        self._limit = max_event_bytes
        self._rest = bytearray()
        # Of the rest, where no event can end.
        self._searched = 0
        self._after_cr = False

    def feed(self, chunk: bytes) -> list[bytes]:
        """Return the events that are complete now, each with the empty line that ends it.

        Joined with `rest`, they are the bytes that came. Raises InvalidField("event")
        for one that is too long.
        """
        events: list[bytes] = []
        if self._after_cr:
            if not chunk:
                return events
            self._after_cr = False
            if chunk.startswith(b"\n"):
                events.append(b"\n")
                chunk = chunk[1:]
        if not self._rest and b"\r" not in chunk:  # as engines write: half the time
            *whole, rest = chunk.split(b"\n\n")
            events += [event + b"\n\n" for event in whole]
            self._rest += rest
        else:
            events += self._add(chunk)
            self._after_cr = not self._rest and bool(events) and events[-1].endswith(b"\r")
        self._searched = len(self._rest)
        if self._searched > self._limit:
            raise InvalidField("event", f"is longer than {self._limit} bytes")
        return events

    def _add(self, chunk: bytes) -> list[bytes]:
        """Look at what is new only: a long event of small pieces is not searched each time."""
        self._rest += chunk
        events: list[bytes] = []
        start, search = 0, max(0, self._searched - 3)
        while (found := _EVENT_END.search(self._rest, search)) is not None:
            search = found.end()
            events.append(bytes(self._rest[start:search]))
            start = search
        del self._rest[:start]
        return events

    @property
    def rest(self) -> bytes:
        """The bytes of an event that has not ended."""
        return bytes(self._rest)


def event_data(event: bytes) -> bytes | None:
    """Return the data of an event, its lines joined with LF; None when it has none."""
    if event.startswith(b"data: ") and event.find(b"\n") == len(event) - 2 and b"\r" not in event:
        return event[6:-2]
    lines = [_value(line) for line in _lines(event) if _is_data(line)]
    return b"\n".join(lines) if lines else None


def with_data(event: bytes, data: bytes, leave_out: re.Pattern[bytes] | None = None) -> bytes:
    """Return the event with other data, its other lines and line ends as they were.

    Other lines in which `leave_out` is found are left out.
    """
    parts: list[bytes] = []
    placed = False
    position = 0
    for end in _LINE_END.finditer(event):
        line = event[position : end.start()]
        if _is_data(line.removeprefix(_BOM) if position == 0 else line):
            if not placed:
                for one in data.split(b"\n"):
                    parts += (b"data: ", one, end.group())
                placed = True
        elif leave_out is None or leave_out.search(line) is None:
            parts += (line, end.group())
        position = end.end()
    parts.append(event[position:])
    return b"".join(parts)


def _lines(event: bytes) -> list[bytes]:
    return _LINE_END.split(event.removeprefix(_BOM))


def _is_data(line: bytes) -> bool:
    return line.startswith(b"data:") or line == b"data"


def _value(line: bytes) -> bytes:
    value = line[5:]
    return value[1:] if value.startswith(b" ") else value
