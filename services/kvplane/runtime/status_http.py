"""/metrics, /healthz and /readyz over HTTP, on the standard library alone."""

import asyncio
import contextlib
import json
from typing import Final

from prometheus_client import REGISTRY, CollectorRegistry
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from kvplane.runtime.readiness import Readiness

_REQUEST_TIMEOUT: Final = 5.0
_JSON: Final = "application/json"
_REASONS: Final = {200: "OK", 404: "Not Found", 405: "Method Not Allowed", 503: "Unavailable"}


class StatusHttp:
    """Answers GET and HEAD, one request a connection."""

    def __init__(self, readiness: Readiness, registry: CollectorRegistry = REGISTRY) -> None:
        self._readiness = readiness
        self._registry = registry
        self._server: asyncio.Server | None = None

    async def start(self, host: str, port: int) -> int:
        """Listen and return the port, a free one for 0. Raises OSError."""
        self._server = await asyncio.start_server(self._serve, host, port, limit=16 * 1024)
        bound: int = self._server.sockets[0].getsockname()[1]
        return bound

    async def stop(self) -> None:
        """Stop listening."""
        if self._server is not None:
            self._server.close()
            await self._server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, EOFError, ValueError, TimeoutError):
            async with asyncio.timeout(_REQUEST_TIMEOUT):
                head = await reader.readuntil(b"\r\n\r\n")
                method, target, _ = head.split(b"\r\n", 1)[0].decode("latin-1").split(" ", 2)
                code, kind, body = self._answer(method, target.partition("?")[0])
                writer.write(
                    f"HTTP/1.1 {code} {_REASONS[code]}\r\n"
                    f"Content-Type: {kind}\r\nContent-Length: {len(body)}\r\n"
                    "Connection: close\r\n\r\n".encode()
                )
                if method != "HEAD":
                    writer.write(body)
                await writer.drain()
        writer.close()

    def _answer(self, method: str, path: str) -> tuple[int, str, bytes]:
        if method not in {"GET", "HEAD"}:
            return 405, _JSON, b'{"error":"use GET"}'
        if path == "/metrics":
            return 200, CONTENT_TYPE_LATEST, generate_latest(self._registry)
        if path == "/healthz":
            return 200, _JSON, b'{"alive":true}'
        if path == "/readyz":
            ready = self._readiness.ready
            answer = {"ready": ready, "problems": self._readiness.problems}
            return (200 if ready else 503), _JSON, json.dumps(answer).encode()
        return 404, _JSON, b'{"error":"there are /metrics, /healthz and /readyz"}'
