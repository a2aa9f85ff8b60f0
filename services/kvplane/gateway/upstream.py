"""HTTP to the engines."""

from collections.abc import Awaitable, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Final

import aiohttp
import orjson

from kvplane.api.routing.v1 import routing_pb2 as routing
from kvplane.gateway.config import GatewayConfig

# An engine's server closes an idle connection after 5 s; a request that is sent at
# that moment is lost. So connections are not kept that long.
_KEEPALIVE_S: Final = 2.0
_MAX_HEADER: Final = 16_384
# Of what is asked beside completions: health, models, version, metrics.
_MAX_SMALL: Final = 4 * 1024 * 1024


@dataclass(slots=True)
class Sent:
    """Whether a request may have reached the engine."""

    sent: bool = False


async def read_all(response: aiohttp.ClientResponse, limit: int) -> bytes:
    """Return a whole answer of at most `limit` bytes. Raises aiohttp.ClientError for more."""
    parts: list[bytes] = []
    size = 0
    async for part in response.content.iter_any():
        size += len(part)
        if size > limit:
            raise aiohttp.ClientPayloadError(f"the answer is larger than {limit} bytes")
        parts.append(part)
    return b"".join(parts)


class Exchange:
    """A request and its answer, to be used with `async with`."""

    __slots__ = ("_request", "_response")

    def __init__(self, request: Awaitable[aiohttp.ClientResponse]) -> None:
        self._request = request
        self._response: aiohttp.ClientResponse | None = None

    async def __aenter__(self) -> aiohttp.ClientResponse:
        self._response = await self._request
        return self._response

    async def __aexit__(self, *error: object) -> None:
        if self._response is None:
            return
        if self._response.content.at_eof():
            self._response.release()
        else:
            self._response.close()


class Upstream:
    """A pool of connections to all engines."""

    def __init__(self, config: GatewayConfig) -> None:
        self._config = config
        self._session: aiohttp.ClientSession | None = None
        self._headers = {"Accept-Encoding": "identity"}
        if config.upstream_api_key:
            self._headers["Authorization"] = f"Bearer {config.upstream_api_key}"

    async def start(self) -> None:
        """Open the pool."""
        trace = aiohttp.TraceConfig()
        trace.on_request_headers_sent.append(_on_sent)
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEPALIVE_S),
            timeout=aiohttp.ClientTimeout(total=None, connect=self._config.connect_timeout_s),
            auto_decompress=False,
            cookie_jar=aiohttp.DummyCookieJar(),
            trace_configs=[trace],
            read_bufsize=1 << 18,
            max_line_size=_MAX_HEADER,
            max_field_size=_MAX_HEADER,
        )

    async def stop(self) -> None:
        """Close all connections."""
        if self._session is not None:
            await self._session.close()

    def post(
        self,
        target: routing.Target,
        path: str,
        body: bytes,
        *,
        request_id: str = "",
        trace: Mapping[str, str] | None = None,
        sent: Sent | None = None,
    ) -> "Exchange":
        """Send a JSON body; leaving early closes the connection, so the engine aborts.

        `sent.sent` is set as soon as anything may have arrived there. Raises
        aiohttp.ClientError and TimeoutError.
        """
        assert self._session is not None
        headers = {**self._headers, "Content-Type": "application/json", **(trace or {})}
        headers.update(target.headers)
        if request_id:
            headers["X-Request-Id"] = request_id
        request = self._session.post(
            target.url.rstrip("/") + path,
            data=body,
            headers=headers,
            allow_redirects=False,
            trace_request_ctx=sent,
        )
        return Exchange(request)

    async def get_json(self, url: str, seconds: float) -> Any:
        """Return what GET answers, parsed when it is JSON, else None.

        Raises aiohttp.ClientError, also for a status that is not 200, and TimeoutError.
        """
        status, raw = await self.get(url, seconds)
        if status != 200:
            raise aiohttp.ClientError(f"{url} answered {status}")
        try:
            return orjson.loads(raw)
        except orjson.JSONDecodeError:
            return None

    async def healthy(self, engine: str, seconds: float) -> bool:
        """Ask the engine at a base URL whether it is up."""
        try:
            status, _ = await self.get(f"{engine.rstrip('/')}/health", seconds)
        except (aiohttp.ClientError, TimeoutError, OSError):
            return False
        return status == 200

    async def get(self, url: str, seconds: float) -> tuple[int, bytes]:
        """Return status and body. Raises aiohttp.ClientError and TimeoutError."""
        assert self._session is not None
        timeout = aiohttp.ClientTimeout(total=seconds)
        async with self._session.get(
            url, headers=self._headers, timeout=timeout, allow_redirects=False
        ) as response:
            return response.status, await read_all(response, _MAX_SMALL)


async def _on_sent(_session: aiohttp.ClientSession, context: SimpleNamespace, _: Any) -> None:
    if context.trace_request_ctx is not None:
        context.trace_request_ctx.sent = True
