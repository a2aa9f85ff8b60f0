"""Errors as OpenAI's clients expect them."""

import math
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any, Final

import orjson
from aiohttp import web

from kvplane.kernel.errors import (
    InvalidField,
    KvplaneError,
    NotFound,
    NoWorker,
    PermissionDenied,
    QuotaExceeded,
    Unauthenticated,
)

# An engine's other refusals, such as of the gateway's own key, are not the client's.
CLIENTS_FAULT: Final = frozenset({400, 404, 413, 422})
# Characters of an engine's message.
_MAX_SAID: Final = 2_000


class Failure(Exception):
    """What a client is told in place of an answer."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | int | None = None,
        retry_after: float | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.retry_after = retry_after
        self.error: dict[str, Any] = {
            "message": message,
            "type": kind,
            "param": param,
            "code": code,
        }

    def response(self, headers: Mapping[str, str] | None = None) -> web.Response:
        """Return it as an HTTP answer."""
        return web.Response(
            status=self.status,
            body=orjson.dumps({"error": self.error}),
            content_type="application/json",
            headers=self._headers(headers or {}),
        )

    def raw(self, headers: Mapping[str, str]) -> bytes:
        """Return it as the last bytes of a connection that no request was read from."""
        body = orjson.dumps({"error": self.error})
        lines = [f"HTTP/1.1 {self.status} {HTTPStatus(self.status).phrase}"]
        lines += [f"{name}: {value}" for name, value in self._headers(headers).items()]
        lines += ["Content-Type: application/json", f"Content-Length: {len(body)}"]
        return "\r\n".join([*lines, "Connection: close", "", ""]).encode() + body

    def _headers(self, headers: Mapping[str, str]) -> dict[str, str]:
        sent = dict(headers)
        if self.retry_after is not None:
            sent["Retry-After"] = str(max(1, math.ceil(self.retry_after)))
        if self.status == HTTPStatus.UNAUTHORIZED:
            sent["WWW-Authenticate"] = "Bearer"
        return sent

    def event(self) -> bytes:
        """Return it as an event of a stream."""
        return b"data: " + orjson.dumps({"error": self.error}) + b"\n\n"


class ClientError(Failure):
    """An engine's own refusal, for something in the request."""


def client_error(status: int, raw: bytes) -> ClientError:
    """Return an engine's 4xx answer as the client gets it: what it says and nothing else."""
    try:
        said = orjson.loads(raw)
    except orjson.JSONDecodeError:
        said = None
    return ClientError(status, **_told(said))


def error_inside(error: Any) -> Failure:
    """Return an error that an engine reports in an answer of status 200 as the client gets it.

    Of an engine's own failure a client hears only that there was one.
    """
    told = _told({"error": error})
    if told["code"] in CLIENTS_FAULT:
        return ClientError(told["code"], **told)
    return upstream_failed("The worker failed in the middle of the answer.")


def _told(said: Any) -> dict[str, Any]:
    """Return an error's own words as arguments of a Failure."""
    error = said.get("error") if isinstance(said, dict) else None
    if not isinstance(error, dict):
        error = said if isinstance(said, dict) else {}
    message, kind, param, code = (error.get(name) for name in ("message", "type", "param", "code"))
    return {
        "message": _text(message) or "The engine refuses this request.",
        "kind": _text(kind) or "invalid_request_error",
        "param": _text(param),
        "code": code if type(code) is int and abs(code) < 1000 else _text(code),
    }


def _text(said: Any) -> str | None:
    """Return a text that JSON can carry: Python's own parser also takes half characters."""
    return said[:_MAX_SAID].encode(errors="replace").decode() if isinstance(said, str) else None


def unavailable(message: str, retry_after: float = 1.0) -> Failure:
    """Return 503: try again."""
    return Failure(
        503, message, kind="server_error", code="service_unavailable", retry_after=retry_after
    )


def upstream_failed(message: str) -> Failure:
    """Return 502: the engines fail."""
    return Failure(502, message, kind="server_error", code="upstream_error")


def unknown_model(model: str) -> Failure:
    """Return 404 as OpenAI does."""
    return Failure(
        404, f"The model {model!r} does not exist.", param="model", code="model_not_found"
    )


_KINDS: Final[dict[type[KvplaneError], tuple[int, str, str | None]]] = {
    InvalidField: (400, "invalid_request_error", None),
    NotFound: (404, "invalid_request_error", "not_found"),
    Unauthenticated: (401, "invalid_request_error", "invalid_api_key"),
    PermissionDenied: (403, "invalid_request_error", "permission_denied"),
    QuotaExceeded: (429, "rate_limit_error", "quota_exceeded"),
    NoWorker: (503, "server_error", "service_unavailable"),
}


def from_kvplane(error: KvplaneError, param: str | None = None) -> Failure | None:
    """Return what a client is told of an error of ours, None for an outage.

    `param` is the client's name for the field, where it differs from ours.
    """
    if isinstance(error, QuotaExceeded) and error.metadata.get("quota") == "request_bytes":
        # Nothing that time would mend.
        return Failure(413, error.message, param="body", code="request_too_large")
    for kind, (status, type_, code) in _KINDS.items():
        if isinstance(error, kind):
            if isinstance(error, InvalidField):
                param = param or error.metadata.get("field")
            return Failure(
                status,
                error.message,
                kind=type_,
                param=param,
                code=code,
                retry_after=error.retry_after,
            )
    return None
