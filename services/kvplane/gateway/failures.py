"""Errors as OpenAI's clients expect them."""

from collections.abc import Mapping
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


class Failure(Exception):
    """What a client is told in place of an answer."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
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
        sent = dict(headers or {})
        if self.retry_after is not None:
            sent["Retry-After"] = str(max(1, round(self.retry_after)))
        if self.status == 401:
            sent["WWW-Authenticate"] = "Bearer"
        return web.Response(
            status=self.status,
            body=orjson.dumps({"error": self.error}),
            content_type="application/json",
            headers=sent,
        )

    def event(self) -> bytes:
        """Return it as an event of a stream."""
        return b"data: " + orjson.dumps({"error": self.error}) + b"\n\n"


class ClientError(Exception):
    """An engine's own 4xx answer, which the client gets as it is."""

    def __init__(self, status: int, body: bytes, content_type: str) -> None:
        super().__init__(f"the engine answered {status}")
        self.status, self.body, self.content_type = status, body, content_type


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
    QuotaExceeded: (429, "rate_limit_error", "rate_limit_exceeded"),
    NoWorker: (503, "server_error", "service_unavailable"),
}


def from_kvplane(error: KvplaneError, param: str | None = None) -> Failure | None:
    """Return what a client is told of an error of ours, None for an outage.

    `param` is the client's name for the field, where it differs from ours.
    """
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
