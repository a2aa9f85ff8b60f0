"""The gateway's HTTP face."""

import asyncio
import re
import secrets
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any, Final
from urllib.parse import unquote_to_bytes

import orjson
import structlog
from aiohttp import web

from kvplane.api.session.v1 import session_pb2 as session
from kvplane.client.api import SessionApi
from kvplane.gateway.auth import Admitted, Tenants
from kvplane.gateway.edge import SERVER
from kvplane.gateway.failures import (
    Failure,
    from_kvplane,
    unavailable,
    unknown_model,
)
from kvplane.gateway.forward import forward
from kvplane.gateway.models import models
from kvplane.gateway.openapi import document
from kvplane.gateway.request import CHAT, COMPLETIONS, ClientRequest, parse, tenant_salt
from kvplane.gateway.tracing import span
from kvplane.gateway.turn import Parts, Turn
from kvplane.kernel import context
from kvplane.kernel.errors import InvalidField, KvplaneError

log = structlog.get_logger(__name__)

_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

# What a web page can have a browser send anywhere, without asking first; also without a type.
_FORMS: Final = frozenset(
    {"", "text/plain", "multipart/form-data", "application/x-www-form-urlencoded"}
)
_UNKNOWN_PATHS: Final = {
    404: "There is no such path.",
    405: "The path has other methods; see Allow.",
}
_OWN_ID: Final = re.compile(r"[A-Za-z0-9._-]{1,64}\Z")
_REQUEST_ID: Final = web.RequestKey("kvplane_request_id", str)


class Gateway:
    """Handlers of all endpoints."""

    def __init__(self, parts: Parts, sessions: SessionApi, tenants: Tenants) -> None:
        self._parts, self._sessions, self._tenants = parts, sessions, tenants
        self.draining = False

    def app(self) -> web.Application:
        """Return the application."""
        app = web.Application(
            client_max_size=self._parts.config.max_body_bytes, middlewares=[self._errors]
        )
        app.on_response_prepare.append(_unsigned)
        app.router.add_post(CHAT, self._complete)
        app.router.add_post(COMPLETIONS, self._complete)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/v1/models/{model:.+}", self._model)
        app.router.add_delete("/v1/sessions/{name:.+}", self._end_session)
        for path in ("/health", "/healthz"):
            app.router.add_get(path, self._alive)
        app.router.add_get("/readyz", self._ready)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_get("/openapi.json", self._document)
        return app

    # -- completions --------------------------------------------------------------

    async def _complete(self, http: web.Request) -> web.StreamResponse:
        with span(f"POST {http.path}", http.headers) as trace:
            return await self._traced(http, trace)

    async def _traced(self, http: web.Request, trace: dict[str, str]) -> web.StreamResponse:
        parts = self._parts
        begun = parts.clock.monotonic()
        admitted = await self._caller(http)
        request = await self._read(http, admitted.cache_salt)
        turn = Turn(
            parts=parts,
            request=request,
            tenant_id=admitted.caller.tenant_id,
            request_id=http[_REQUEST_ID],
            trace=trace,
            begun=begun,
        )
        parts.metrics.running.inc()
        try:
            return await self._run(turn, http)
        except (asyncio.CancelledError, ConnectionResetError):
            turn.abandon()
            turn.complete(session.TURN_OUTCOME_CANCELLED)
            raise
        except BaseException:
            turn.abandon()
            turn.complete(session.TURN_OUTCOME_FAILED)
            raise
        finally:
            parts.metrics.running.dec()

    async def _run(self, turn: Turn, http: web.Request) -> web.StreamResponse:
        answer = await turn.open()
        try:
            return await forward(turn, answer, http, _headers(turn))
        finally:
            await answer.close()

    async def _read(self, http: web.Request, salt: str) -> ClientRequest:
        config = self._parts.config
        if http.headers.get("Content-Type", "").partition(";")[0].strip().lower() in _FORMS:
            raise Failure(415, "The request's body must be JSON: `Content-Type: application/json`.")
        try:
            async with asyncio.timeout(config.body_timeout_s):
                raw = await http.read()
        except TimeoutError as error:
            raise Failure(408, "The request's body did not arrive in time.") from error
        except web.HTTPRequestEntityTooLarge as error:
            raise Failure(
                413, f"The request's body is larger than {config.max_body_bytes} bytes.",
                param="body", code="request_too_large",
            ) from error  # fmt: skip
        except web.RequestPayloadError as error:
            raise InvalidField("body", "is not what its headers say") from error
        request = parse(http.path, raw, http.headers)
        return replace(request, cache_salt=tenant_salt(salt, request.body.get("cache_salt")))

    async def _caller(self, http: web.Request) -> Admitted:
        """Say for whom everything below is done."""
        request_id = http[_REQUEST_ID]
        # A connection's requests share one context, so the last one's must go first.
        context.set_caller(context.Caller(request_id=request_id))
        admitted = await self._tenants.admit(http.headers, request_id)
        context.set_caller(admitted.caller)
        return admitted

    # -- models and sessions ------------------------------------------------------

    async def _models(self, http: web.Request) -> web.Response:
        await self._caller(http)
        return _json({"object": "list", "data": models(self._parts.watch.all())})

    async def _model(self, http: web.Request) -> web.Response:
        await self._caller(http)
        wanted = _last(http)
        for model in models(self._parts.watch.all()):
            if model["id"] == wanted:
                return _json(model)
        raise unknown_model(wanted or "")

    async def _end_session(self, http: web.Request) -> web.Response:
        await self._caller(http)
        name = _last(http)
        if name is None:  # no name at all, so nobody's
            raise Failure(404, "There is no such conversation.", code="not_found")
        try:
            async with asyncio.timeout(self._parts.config.complete_timeout_s):
                ended = await self._sessions.EndSession(session.EndSessionRequest(name=name))
        except (TimeoutError, OSError) as error:
            raise unavailable("The session service does not answer.") from error
        return _json(
            {
                "id": name,
                "object": "session.deleted",
                "deleted": True,
                "session_id": ended.session.session_id,
            }
        )

    # -- operations ---------------------------------------------------------------

    async def _alive(self, _http: web.Request) -> web.Response:
        return _json({"status": "ok"})

    async def _ready(self, _http: web.Request) -> web.Response:
        if self.draining:
            return _json({"status": "draining"}, 503)
        if not self._parts.watch.ready:
            return _json({"status": "the worker registry has not answered yet"}, 503)
        return _json({"status": "ok", "workers": len(self._parts.watch.all())})

    async def _metrics(self, http: web.Request) -> web.Response:
        context.set_caller(context.Caller(request_id=http[_REQUEST_ID]))
        await self._tenants.check_operator(http.headers)
        return web.Response(
            body=self._parts.metrics.text(),
            headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"},
        )

    async def _document(self, _http: web.Request) -> web.Response:
        return _json(document(with_keys=self._parts.config.auth != "none"))

    @web.middleware
    async def _errors(self, request: web.Request, handler: _Handler) -> web.StreamResponse:
        """Answer every error as OpenAI would, under the request's id."""
        request_id = _request_id(request)
        request[_REQUEST_ID] = request_id
        headers = {"X-Request-Id": request_id}
        try:
            return await handler(request)
        except Failure as failure:
            return failure.response(headers)
        except KvplaneError as error:
            field = error.metadata.get("field") if isinstance(error, InvalidField) else None
            told = from_kvplane(error, field)
            if told is None:  # an outage, whose words may name what is inside
                log.warning("a request was not answered", request_id=request_id, error=repr(error))
                told = unavailable("The control plane does not answer; try again.")
            return told.response(headers)
        except web.HTTPException as error:
            allow = {"Allow": error.headers["Allow"]} if "Allow" in error.headers else {}
            what = _UNKNOWN_PATHS.get(error.status, error.reason)
            return Failure(error.status, what).response({**headers, **allow})
        except (ConnectionResetError, asyncio.CancelledError):
            raise
        except Exception:
            log.exception("a request failed", request_id=request_id, path=ascii(request.path))
            message = f"Something went wrong; the request's id is {request_id}."
            return Failure(500, message, kind="server_error", code="internal_error").response(
                headers
            )


def _request_id(http: web.Request) -> str:
    """Return a new id; it begins with the client's own, so that both find it in logs."""
    own = http.headers.get("X-Request-Id", "")
    prefix = own if _OWN_ID.match(own) else "req"
    return f"{prefix}-{secrets.token_hex(8)}"


async def _unsigned(http: web.Request, response: web.StreamResponse) -> None:
    """Say nothing of what serves here, and in which version; but which request this answers."""
    response.headers["Server"] = SERVER
    request_id = http.get(_REQUEST_ID)
    if request_id is not None:
        response.headers.setdefault("X-Request-Id", request_id)


def _last(http: web.Request) -> str | None:
    """Return what the path names after its second part; None when it is no UTF-8.

    From the bytes that came: two names must not become one by a tolerant decoding.
    """
    raw = http.rel_url.raw_path.split("/", 3)[3].encode("utf-8", "surrogateescape")
    try:
        return unquote_to_bytes(raw).decode()
    except UnicodeDecodeError:
        return None


def _headers(turn: Turn) -> dict[str, str]:
    headers = {"X-Request-Id": turn.request_id}
    plan = turn.plan
    if plan is not None:
        headers["X-Kvplane-Decision"] = f"{plan.decision}; reason={plan.reason}"
        headers["X-Kvplane-Reused-Tokens"] = str(turn.reused_tokens)
        if plan.session_id:
            headers["X-Kvplane-Session-Id"] = plan.session_id
            headers["X-Kvplane-Turn"] = str(plan.turn)
    return headers


def _json(value: Any, status: int = 200) -> web.Response:
    return web.Response(status=status, body=orjson.dumps(value), content_type="application/json")
