"""Where strangers connect: so many, for so long, and told nothing of the inside."""

import asyncio
import contextlib
import secrets
import socket
from collections.abc import Awaitable
from http import HTTPStatus
from typing import Any, Final

import structlog
from aiohttp import web
from aiohttp.web_protocol import RequestHandler

from kvplane.gateway.config import GatewayConfig
from kvplane.gateway.failures import Failure, unavailable

log = structlog.get_logger(__name__)

SERVER: Final = "gateway"
_ODD_REQUEST: Final = "This is not a request that the gateway can read."
_TOO_MANY: Final = "There are too many connections; try again."
_TOO_SLOW: Final = "The request's head did not arrive in time."


class Edge(web.BaseSite):
    """A TCP port. At most `max_connections` at a time; the others are told to come back."""

    def __init__(self, runner: web.AppRunner, host: str, port: int, config: GatewayConfig) -> None:
        super().__init__(runner, backlog=1024)
        self._host, self._port, self.config = host, port, config
        self.connections = 0

    @property
    def name(self) -> str:
        """The address, as a URL."""
        return f"http://{self._host}:{self._port}"

    async def start(self) -> None:
        """Listen. Raises OSError when the port is taken."""
        await super().start()
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(
            self._connection, self._host, self._port, backlog=self._backlog
        )

    def _connection(self) -> "Connection":
        server = self._runner.server
        assert server is not None
        return Connection(self, server, asyncio.get_running_loop())


class Connection(RequestHandler):
    """One client's connection: a head must come in time, and what is odd is told as JSON."""

    __slots__ = ("_counted", "_edge", "_late")

    def __init__(self, edge: Edge, server: web.Server, loop: asyncio.AbstractEventLoop) -> None:
        config = edge.config
        super().__init__(
            server,
            loop=loop,
            access_log=None,  # type: ignore[arg-type] # that is how one goes without
            keepalive_timeout=config.keepalive_timeout_s,
            max_headers=config.max_headers,
            max_field_size=config.max_header_bytes,
            max_line_size=config.max_header_bytes,
        )
        self._edge = edge
        self._counted = False
        self._late: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Count it, or turn it away."""
        if self._edge.connections >= self._edge.config.max_connections:
            self._turn_away(transport, unavailable(_TOO_MANY))
            return
        self._edge.connections += 1
        self._counted = True
        _end_when_stalled(transport, self._edge.config.write_timeout_s)
        super().connection_made(transport)

    def connection_lost(self, exc: BaseException | None) -> None:
        """Make room."""
        if self._counted:
            self._counted = False
            self._edge.connections -= 1
        self._in_time()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Begin to count at the first bytes of a head, stop at its end."""
        super().data_received(data)
        idle = self._waiter is not None or not self._request_count
        if self._messages or not idle:
            self._in_time()
        elif self._late is None and self.transport is not None:
            wait = self._edge.config.head_timeout_s
            self._late = self._loop.call_later(wait, self._too_slow)

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Return what a client is told of a request that reached no handler."""
        if request.writer.output_size > 0:
            raise ConnectionError("an answer has begun already")
        if status == HTTPStatus.BAD_REQUEST:
            failure = Failure(status, _ODD_REQUEST)
        else:  # the handlers' own errors are answered by the application
            log.error("a request failed", exc_info=exc)
            failure = Failure(500, "Something went wrong.", kind="server_error")
        response = failure.response(_headers())
        response.force_close()
        return response

    async def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        """Send an answer; what aiohttp itself refuses, such as an Expect, is told as JSON too."""
        if isinstance(resp, web.HTTPException):
            resp = Failure(resp.status, resp.reason).response(_headers())
        return await super().finish_response(request, resp, start_time)

    def log_exception(self, *args: Any, **kwargs: Any) -> None:
        """Log an error, but for a body that cannot be read: that is the client's."""
        if not isinstance(kwargs.get("exc_info"), web.RequestPayloadError):
            super().log_exception(*args, **kwargs)

    def _in_time(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None

    def _too_slow(self) -> None:
        self._late = None
        if self.transport is not None:
            self._turn_away(self.transport, Failure(408, _TOO_SLOW))

    def _turn_away(self, transport: asyncio.BaseTransport, failure: Failure) -> None:
        assert isinstance(transport, asyncio.Transport)
        transport.write(failure.raw(_headers()))
        transport.close()
        self.force_close()


def _headers() -> dict[str, str]:
    return {"Server": SERVER, "X-Request-Id": f"req-{secrets.token_hex(8)}"}


def _end_when_stalled(transport: asyncio.BaseTransport, seconds: float) -> None:
    """Have the system give up a peer that takes nothing for so long."""
    raw: Any = transport.get_extra_info("socket")
    if raw is not None and hasattr(socket, "TCP_USER_TIMEOUT"):
        with contextlib.suppress(OSError):  # no TCP
            raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(seconds * 1000))


class Stalled(ConnectionResetError):
    """The client takes nothing."""


async def bounded(http: web.BaseRequest, writing: Awaitable[None], seconds: float) -> None:
    """Write to a client; drop one that takes nothing for so long. Raises Stalled."""
    try:
        async with asyncio.timeout(seconds):
            await writing
    except TimeoutError as error:
        if http.transport is not None:
            http.transport.abort()
        raise Stalled("the client does not read") from error
