"""Bytes to the gateway and bytes back, read as HTTP/1.1 says."""

import asyncio
from dataclasses import dataclass, field
from typing import Final

TIMEOUT_S: Final = 20.0


@dataclass
class Heard:
    """An answer. `status` 0: the connection was closed without one."""

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    # All that came, interim answers too.
    raw: bytes = b""
    # It did not end in time.
    late: bool = False
    # The connection was reset, as one is whose rest nobody reads.
    reset: bool = False


async def exchange(port: int, raw: bytes, *, close: bool) -> Heard:
    """Send bytes, and read until the answer is whole. `close`: then say no more."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    heard = Heard()
    try:
        async with asyncio.timeout(TIMEOUT_S):
            writer.write(raw)
            if close and writer.can_write_eof():
                writer.write_eof()
            # To the end of the answer; the server may linger for a body that never comes.
            while not _whole(heard) and (more := await reader.read(1 << 16)):
                heard.raw += more
                _read(heard)
    except TimeoutError:
        heard.late = True
    except ConnectionError:
        heard.reset = True
    finally:
        writer.transport.abort()
    return heard


def _whole(heard: Heard) -> bool:
    length = heard.headers.get("content-length", "")
    if heard.status < 200 or not length:
        return heard.raw.endswith(b"\r\n0\r\n\r\n")
    return len(heard.body) >= int(length) > 0


def _read(heard: Heard) -> None:
    rest = heard.raw
    while b"\r\n\r\n" in rest:
        head, _, rest = rest.partition(b"\r\n\r\n")
        first, *lines = head.decode("latin-1").split("\r\n")
        heard.status = int(first.split(" ")[1])
        heard.headers = {
            name.strip().lower(): value.strip()
            for name, _, value in (line.partition(":") for line in lines)
        }
        if heard.status >= 200:
            break
    chunked = heard.headers.get("transfer-encoding", "").lower() == "chunked"
    length = heard.headers.get("content-length")
    if chunked:
        heard.body = _chunks(rest)
    else:
        heard.body = rest[: int(length)] if length is not None else rest


def _chunks(raw: bytes) -> bytes:
    body = b""
    while raw:
        size, _, raw = raw.partition(b"\r\n")
        count = int(size.split(b";")[0] or b"0", 16)
        if not count or len(raw) < count:
            break
        body, raw = body + raw[:count], raw[count + 2 :]
    return body
