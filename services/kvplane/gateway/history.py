"""A conversation's history as a chain of digests, so that its next turn finds it.

An OpenAI client sends the whole history again. The digest after each assistant message
is a candidate; what is stored at the end of a turn is the digest after its reply. Equal
digests only find a session: tokens decide what is read.

Two messages are equal when they say the same: a missing content is a null one is an
empty one, a list of text parts is their text, spaces around a text do not count, tool
calls are compared by name and by the value of their arguments, whatever their ids and
the spelling of the JSON. Reasoning is left out, since clients do not send it back.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import orjson

DIGEST_SIZE: Final = 16
MAX_CANDIDATES: Final = 64
# Characters of a /v1/completions prompt, or tokens, in one link of its chain.
TEXT_LINK: Final = 256
TOKEN_LINK: Final = 64

_SAFE_INTEGER: Final = 2**53


@dataclass(frozen=True, slots=True)
class History:
    """What a request says of its conversation so far."""

    # Digests to look for, longest history first.
    candidates: list[bytes]
    # After all of the request's messages.
    digest: bytes


def of_messages(model: str, messages: Sequence[Any]) -> History:
    """Return the history of a chat request."""
    digest = _seed(b"chat", model)
    candidates: list[bytes] = []
    for message in messages:
        digest = after_message(digest, message)
        if isinstance(message, dict) and message.get("role") == "assistant":
            candidates.append(digest)
    candidates.reverse()
    return History(candidates[:MAX_CANDIDATES], digest)


def after_message(digest: bytes, message: Any) -> bytes:
    """Return the digest of a history that goes on with `message`."""
    return _link(digest, _dump(_canonical(message)))


def of_text(model: str, text: str) -> History:
    """Return the history of a completion request; `digest` ends at a whole link."""
    return _of_links(b"text", model, _text_links(text))


def after_text(model: str, text: str) -> bytes:
    """Return what to store for a prompt and its completion; empty when too short."""
    history = of_text(model, text)
    return history.digest if history.candidates else b""


def of_tokens(model: str, tokens: Sequence[int]) -> History:
    """Return the history of a completion request whose prompt is token ids."""
    links = [
        orjson.dumps(tokens[start : start + TOKEN_LINK])
        for start in range(0, len(tokens) - TOKEN_LINK + 1, TOKEN_LINK)
    ]
    return _of_links(b"tokens", model, links)


def _text_links(text: str) -> list[bytes]:
    return [
        text[start : start + TEXT_LINK].encode("utf-8", "surrogatepass")
        for start in range(0, len(text) - TEXT_LINK + 1, TEXT_LINK)
    ]


def _of_links(kind: bytes, model: str, links: list[bytes]) -> History:
    digest = _seed(kind, model)
    digests = [digest := _link(digest, link) for link in links]
    return History(digests[: -MAX_CANDIDATES - 1 : -1], digest)


def _seed(kind: bytes, model: str) -> bytes:
    return _link(kind.ljust(DIGEST_SIZE), model.encode("utf-8", "surrogatepass"))


def _link(previous: bytes, raw: bytes) -> bytes:
    # `previous` has always the same length, so nothing can be moved between the two.
    return hashlib.blake2b(previous + raw, digest_size=DIGEST_SIZE).digest()


def _canonical(message: Any) -> Any:
    if not isinstance(message, dict):
        return message
    content, calls = message.get("content"), message.get("tool_calls")
    function = message.get("function_call")
    return [
        message.get("role"),
        content.strip() if isinstance(content, str) else _content(content),
        [_call(call) for call in calls] if isinstance(calls, list) else [],
        _function(function) if function else None,
        message.get("name") or None,
    ]


def _content(content: Any) -> Any:
    """Return a text, or the list of parts when some are not text."""
    if not isinstance(content, list):
        return content if content is not None else ""
    parts: list[Any] = []
    text = ""
    for part in content:
        if isinstance(part, str):
            text += part
        elif isinstance(part, dict) and isinstance(part.get("text"), str):
            text += part["text"]
        else:
            parts += [text.strip(), part]
            text = ""
    return [*parts, text.strip()] if parts else text.strip()


def _call(call: Any) -> Any:
    return _function(call.get("function")) if isinstance(call, dict) else call


def _function(function: Any) -> Any:
    if not isinstance(function, dict):
        return function
    return [function.get("name"), _arguments(function.get("arguments"))]


def _arguments(arguments: Any) -> Any:
    if isinstance(arguments, str):
        try:
            return _plain(orjson.loads(arguments), 0) if arguments.strip() else {}
        except (orjson.JSONDecodeError, _TooDeep):
            return arguments.strip()
    try:
        return _plain(arguments, 0) if arguments is not None else {}
    except _TooDeep:
        return arguments


class _TooDeep(Exception):
    pass


def _plain(value: Any, depth: int) -> Any:
    """Return the value with 1.0 as 1, as JavaScript would write it."""
    if depth > 100:
        raise _TooDeep
    if isinstance(value, dict):
        return {key: _plain(item, depth + 1) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item, depth + 1) for item in value]
    if isinstance(value, float) and value.is_integer() and abs(value) < _SAFE_INTEGER:
        return int(value)
    return value


def _dump(value: Any) -> bytes:
    try:
        return orjson.dumps(value, option=orjson.OPT_SORT_KEYS | orjson.OPT_NON_STR_KEYS)
    except (TypeError, ValueError):  # nested too deep: no history to find it by, no error
        return repr(type(value)).encode()
