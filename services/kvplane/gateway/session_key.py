"""Which conversation a request belongs to.

The first of these that is there names it:

| where  | name |
|--------|------|
| header | `x-kvplane-session`, `x-session-id`, `x-conversation-id`, `session-id`, `session_id`, `conversation-id`, `conversation_id`, `x-litellm-session-id` |
| body   | `session_id`, `conversation_id`, `conversation` (text, or an object with `id`), `litellm_session_id` |
| body   | `metadata.session_id`, `metadata.conversation_id`, `metadata.thread_id` |
| body   | the same inside `extra_body` |

A name is 1 to 512 bytes of any text, or a whole number, in the tenant's own space. Without
a name the history finds the conversation, see `kvplane.gateway.history`.

Not taken: `user` and `safety_identifier` (a person has many conversations at a time),
`prompt_cache_key` (meant for everything that shares a prompt's beginning: parallel
conversations under one name would take each other's KV away), and `x-request-id` (one
request).
"""  # noqa: E501

from collections.abc import Mapping
from typing import Any, Final

from kvplane.kernel.errors import InvalidField

HEADERS: Final = (
    "x-kvplane-session",
    "x-session-id",
    "x-conversation-id",
    "session-id",
    "session_id",
    "conversation-id",
    "conversation_id",
    "x-litellm-session-id",
)
BODY_FIELDS: Final = ("session_id", "conversation_id", "conversation", "litellm_session_id")
METADATA_FIELDS: Final = ("session_id", "conversation_id", "thread_id")
MAX_BYTES: Final = 512


def session_name(headers: Mapping[str, str], body: Mapping[str, Any]) -> str:
    """Return the conversation's name, "" when the request has none.

    Raises InvalidField naming the header or the body field.
    """
    for header in HEADERS:
        value = headers.get(header)
        if value:
            return _checked(header, value)
    extra = body.get("extra_body")
    for where, fields in (("", body), ("extra_body.", extra)):
        if isinstance(fields, Mapping):
            name = _from_fields(where, fields)
            if name:
                return name
    return ""


def _from_fields(where: str, fields: Mapping[str, Any]) -> str:
    for field in BODY_FIELDS:
        value = fields.get(field)
        if field == "conversation" and isinstance(value, Mapping):
            field, value = "conversation.id", value.get("id")  # noqa: PLW2901
        name = _name(where + field, value)
        if name:
            return name
    metadata = fields.get("metadata")
    if isinstance(metadata, Mapping):
        for field in METADATA_FIELDS:
            name = _name(f"{where}metadata.{field}", metadata.get(field))
            if name:
                return name
    return ""


def _name(field: str, value: Any) -> str:
    if value is None or value == "":
        return ""
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise InvalidField(field, "must be a text")
    return _checked(field, str(value))


def _checked(field: str, value: str) -> str:
    try:
        raw = value.encode()
    except UnicodeEncodeError as error:
        # The server's parser turns such bytes into surrogates. Two names must not become one.
        raise InvalidField(field, "must be UTF-8") from error
    if len(raw) > MAX_BYTES:
        raise InvalidField(field, f"must be at most {MAX_BYTES} bytes long")
    return value
