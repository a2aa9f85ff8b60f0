"""Checks of request fields. Each error names the field and the fix."""

import re

from kvplane.kernel.errors import InvalidField

TENANT_ID_BYTES = 64

_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/-]*\Z")
_IN_HEADER = re.compile(r"[\x20-\x7e]*\Z")
_TENANT_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*\Z")


def identifier(field: str, value: str, max_length: int = 128) -> str:
    """Letters, digits and ``. _ : / -``, beginning with a letter or digit."""
    text(field, value, max_length)
    if not _ID.match(value):
        raise InvalidField(field, "use letters, digits and . _ : / - only, a letter or digit first")
    return value


def tenant_id(field: str, value: str) -> str:
    """1 to 64 of letters, digits and ``. _ -``, beginning with a letter or digit."""
    text(field, value, TENANT_ID_BYTES)
    if not _TENANT_ID.match(value):
        raise InvalidField(field, "use letters, digits and . _ - only, a letter or digit first")
    return value


def text(field: str, value: str, max_length: int) -> str:
    """Any text of 1 to `max_length` UTF-8 bytes."""
    if not value:
        raise InvalidField(field, "must be set")
    if len(value.encode("utf-8", "surrogatepass")) > max_length:
        raise InvalidField(field, f"must be at most {max_length} bytes long")
    return value


def plain(field: str, value: str, max_length: int) -> str:
    """Text of 1 to `max_length` UTF-8 bytes without NUL, which PostgreSQL's text cannot hold."""
    text(field, value, max_length)
    if "\0" in value:
        raise InvalidField(field, "must not contain NUL characters")
    return value


def header(field: str, value: str) -> str:
    """What is to be sent in a header, without the space around it: files end with a newline."""
    value = value.strip()
    if not _IN_HEADER.match(value):
        raise InvalidField(field, "must be printable ASCII: is it whole, and nothing else with it?")
    return value


def between(field: str, value: float, low: float, high: float) -> None:
    """A number in a closed range."""
    if not low <= value <= high:
        raise InvalidField(field, f"must be from {low} to {high}, not {value}")


def at_most_items(field: str, count: int, limit: int) -> None:
    """A list that is not too long."""
    if count > limit:
        raise InvalidField(field, f"at most {limit} items, not {count}")


def page_size(value: int, default: int = 100, limit: int = 1000) -> int:
    """A page size; 0 means the default."""
    between("page_size", value, 0, limit)
    return value or default
