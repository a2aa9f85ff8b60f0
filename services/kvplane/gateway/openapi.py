"""The gateway's own description of itself: GET /openapi.json.

It says what the gateway checks and answers. Fields of a completion that it does not name
are the engine's to check.
"""

from typing import Any, Final

from kvplane.gateway.request import (
    MAX_CHOICES,
    MAX_MESSAGES,
    MAX_MODEL_BYTES,
    MAX_PROMPTS,
    MAX_TOOLS,
    MAX_WORDS,
    WORDS,
)
from kvplane.gateway.session_key import BODY_FIELDS, MAX_BYTES, METADATA_FIELDS

_Json = dict[str, Any]

_WHY: Final = {
    400: "The request is wrong; `param` names the field.",
    401: "No API key, or one that is not valid.",
    403: "The API key does not allow this.",
    404: "There is no such thing, or it is not the tenant's.",
    405: "The path has other methods; `Allow` names them.",
    408: "The body did not arrive in time.",
    413: "The request is larger than the gateway or the tenant's quota allows.",
    415: "The body is not JSON.",
    422: "The engine cannot process the request.",
    429: "A limit of the tenant is reached; `Retry-After` says when to come back.",
    502: "The engines fail.",
    503: "Nobody can answer now; try again.",
    504: "The engines did not answer in time.",
}


def document(*, with_keys: bool) -> _Json:
    """Return the OpenAPI 3.1 document; `with_keys`: /v1 asks for an API key."""
    security: list[_Json] = [{"apiKey": []}] if with_keys else []
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "kvplane gateway",
            "version": "1",
            "description": "OpenAI-compatible completions whose later turns read the KV cache "
            "of the turns before.",
        },
        "paths": {
            "/v1/chat/completions": {"post": _completion("chat", "ChatRequest", security)},
            "/v1/completions": {"post": _completion("text", "CompletionRequest", security)},
            "/v1/models": {
                "get": _operation(
                    "listModels", "The models that live workers serve.", "Models",
                    (401, 403, 503), security,
                )
            },
            "/v1/models/{model}": {
                "get": _operation(
                    "getModel", "One model.", "Model", (401, 403, 404, 503), security,
                    parameters=[_in_path("model", MAX_MODEL_BYTES)],
                )
            },
            "/v1/sessions/{name}": {
                "delete": _operation(
                    "endSession", "Ends a conversation and frees its blocks.", "SessionDeleted",
                    (401, 403, 404, 429, 503), security,
                    parameters=[_in_path("name", MAX_BYTES)],
                )
            },
            **{
                path: {"get": _operation(f"get{path[1:].title()}", what, "Status", codes, [])}
                for path, what, codes in (
                    ("/health", "The process is alive.", ()),
                    ("/healthz", "The process is alive.", ()),
                )
            },
            "/readyz": {"get": _readiness()},
            "/metrics": {"get": _metrics(security)},
            "/openapi.json": {
                "get": _operation("getOpenapi", "This document.", "Document", (), [])
            },
        },
        "components": {
            "securitySchemes": {
                "apiKey": {
                    "type": "http",
                    "scheme": "bearer",
                    "description": "An API key of a tenant.",
                }
            },
            "headers": _HEADERS,
            "schemas": _schemas(),
        },
    }  # fmt: skip


_HEADERS: Final[_Json] = {
    "RequestId": {
        "description": "The request's id, for logs.",
        "required": True,
        "schema": {"type": "string", "minLength": 1},
    },
    "RetryAfter": {
        "description": "Seconds.",
        "required": True,
        "schema": {"type": "string", "pattern": "^[0-9]+$"},
    },
    "Allow": {"required": True, "schema": {"type": "string"}},
    "WwwAuthenticate": {"required": True, "schema": {"type": "string"}},
}
_OWN_HEADERS: Final = {
    401: ("WWW-Authenticate", "WwwAuthenticate"),
    405: ("Allow", "Allow"),
    429: ("Retry-After", "RetryAfter"),
}


def _headers(status: int = 200) -> _Json:
    headers = {"X-Request-Id": {"$ref": "#/components/headers/RequestId"}}
    if status in _OWN_HEADERS:
        header, name = _OWN_HEADERS[status]
        headers[header] = {"$ref": f"#/components/headers/{name}"}
    return headers


def _ref(name: str) -> _Json:
    return {"$ref": f"#/components/schemas/{name}"}


def _json_of(name: str) -> _Json:
    return {"application/json": {"schema": _ref(name)}}


def _failures(*codes: int) -> _Json:
    return {
        str(code): {
            "description": _WHY[code],
            "headers": _headers(code),
            "content": _json_of("Error"),
        }
        for code in codes
    }


def _operation(
    ident: str,
    what: str,
    schema: str,
    codes: tuple[int, ...],
    security: list[_Json],
    **more: Any,
) -> _Json:
    ok = {"description": what, "headers": _headers(), "content": _json_of(schema)}
    return {
        "operationId": ident,
        "summary": what,
        "responses": {"200": ok, **_failures(*sorted({400, 405, *codes}))},
        "security": security,
        **more,
    }


def _completion(kind: str, schema: str, security: list[_Json]) -> _Json:
    made = _operation(
        f"{kind}Completion",
        "A chat." if kind == "chat" else "A text, or token ids, to go on with.",
        "Completion",
        (401, 403, 404, 408, 413, 415, 422, 429, 502, 503, 504),
        security,
        parameters=[
            {
                "name": "X-Kvplane-Session",
                "in": "header",
                "required": False,
                "description": "The conversation's name, 1 to 512 bytes of UTF-8.",
                "schema": {"type": "string", "maxLength": MAX_BYTES},
            }
        ],
        requestBody={"required": True, "content": _json_of(schema)},
    )
    made["responses"]["200"]["content"]["text/event-stream"] = {
        "schema": {"description": "Events, each a chunk; the last is [DONE]."}
    }
    return made


def _readiness() -> _Json:
    made = _operation("getReadyz", "It can serve.", "Status", (), [])
    made["responses"]["503"] = {
        "description": "It stops, or does not know the workers yet.",
        "headers": _headers(),
        "content": _json_of("Status"),
    }
    return made


def _metrics(security: list[_Json]) -> _Json:
    what = "Prometheus metrics, for operators."
    made = _operation("getMetrics", what, "Status", (401, 403, 503), security)
    made["responses"]["200"]["content"] = {"text/plain": {"schema": {"type": "string"}}}
    return made


def _in_path(name: str, longest: int) -> _Json:
    return {
        "name": name,
        "in": "path",
        "required": True,
        "description": f"1 to {longest} bytes of UTF-8, percent-encoded.",
        "schema": {"type": "string", "minLength": 1, "maxLength": longest},
    }


def _optional(*types: _Json) -> _Json:
    return {"anyOf": [*types, {"type": "null"}]}


_COUNT: Final = _optional({"type": "integer", "minimum": 1, "maximum": MAX_CHOICES})
_WHOLE: Final = {"type": "integer", "minimum": -(1 << 63), "maximum": (1 << 64) - 1}
_NAME: Final = _optional({"type": "string", "maxLength": MAX_BYTES}, _WHOLE)


def _request(required: str, schema: _Json) -> _Json:
    names = {name: _NAME for name in BODY_FIELDS if name != "conversation"}
    return {
        "type": "object",
        "required": ["model", required],
        "properties": {
            "model": {"type": "string", "minLength": 1, "maxLength": MAX_MODEL_BYTES},
            required: schema,
            "stream": _optional({"type": "boolean"}),
            "stream_options": _optional({"type": "object"}),
            "n": _COUNT,
            "best_of": _COUNT,
            "cache_salt": _optional({"type": "string", "minLength": 1}),
            "tools": _optional({"type": "array", "maxItems": MAX_TOOLS}),
            **{name: {"maxItems": MAX_WORDS} for name in WORDS},
            **names,
            "conversation": _optional(
                {"type": "string", "maxLength": MAX_BYTES},
                _WHOLE,
                {"type": "object", "properties": {"id": _NAME}},
            ),
            "metadata": {"properties": dict.fromkeys(METADATA_FIELDS, _NAME)},
        },
        "additionalProperties": True,
    }


def _schemas() -> _Json:
    text = {"type": "string"}
    number = {"type": "integer"}
    token = {"type": "integer", "minimum": 0, "maximum": (1 << 32) - 1}
    model = {
        "id": text,
        "object": {"const": "model"},
        "created": number,
        "owned_by": text,
        "root": text,
        "max_model_len": {"type": ["integer", "null"]},
    }
    deleted = {
        "id": text,
        "object": {"const": "session.deleted"},
        "deleted": {"const": True},
        "session_id": text,
    }
    error = {
        "message": {"type": "string", "minLength": 1},
        "type": text,
        "param": {"type": ["string", "null"]},
        "code": {"type": ["string", "integer", "null"]},
    }
    message = _object({"role": text}, ["role"])
    messages = {"type": "array", "minItems": 1, "maxItems": MAX_MESSAGES, "items": message}
    prompt = {
        "anyOf": [
            text,
            {"type": "array", "minItems": 1, "items": token},
            {"type": "array", "minItems": 1, "maxItems": MAX_PROMPTS, "items": text},
            {
                "type": "array",
                "minItems": 1,
                "maxItems": MAX_PROMPTS,
                "items": {"type": "array", "minItems": 1, "items": token},
            },
        ]
    }
    return {
        "ChatRequest": _request("messages", messages),
        "CompletionRequest": _request("prompt", prompt),
        "Completion": {
            "type": "object",
            "required": ["choices"],
            "properties": {"choices": {"type": "array"}},
            "not": {"required": ["kv_transfer_params"]},
        },
        "Model": _object(model),
        "Models": _object(
            {"object": {"const": "list"}, "data": {"type": "array", "items": _ref("Model")}}
        ),
        "SessionDeleted": _object(deleted),
        "Status": _object({"status": text, "workers": number}, ["status"]),
        "Document": {"type": "object", "required": ["openapi", "paths"]},
        "Error": _object({"error": _object(error, ["message"])}),
    }


def _object(properties: _Json, required: list[str] | None = None) -> _Json:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties) if required is None else required,
    }
