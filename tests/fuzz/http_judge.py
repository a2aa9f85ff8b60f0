"""What an answer of the gateway must be, whatever was asked."""

import json
import re
from collections.abc import Iterator
from typing import Any, Final
from urllib.parse import unquote_to_bytes

from fuzz.exchange import Heard
from fuzz.findings import INSIDE, Counts, Finding, Kind
from fuzz.front import Front

# Keys of an engine's own answers.
_OF_ENGINES: Final = (
    "kv_transfer_params",
    "ec_transfer_params",
    "remote_",
    "do_remote_",
    "cache_salt",
)
_SHOWN: Final = 1500
_MUCH: Final = 60_000
_TYPE: Final = re.compile(r'"type": ?"\w+"')
_ERROR: Final = frozenset({"message", "type", "param", "code"})


def judge(
    front: Front,
    counts: Counts,
    *,
    whose: str,
    asked: bytes,
    heard: Heard,
    head_only: bool = False,
    whole: bool = True,
) -> None:
    """Look at an answer. Raises Finding.

    `asked` is all that the client sent; `whole`: it was a request to its end, so that there
    must be an answer.
    """
    counts.inputs["http"] += 1
    counts.codes[str(heard.status)] += 1

    def found(kind: Kind, what: str) -> None:
        raise Finding(kind, f"{what}\n{whose}: {asked[:_SHOWN]!r}\n-> {heard.raw[:_SHOWN]!r}")

    if heard.late:
        found("internal_errors", "no answer in time")
    if not heard.status:
        # Who sends much that nobody reads may lose the answer to TCP.
        lost = heard.reset and len(asked) > _MUCH
        if whole and not lost:
            found("internal_errors", "no answer at all")
        return
    if heard.status == 500:
        found("internal_errors", "500")
    _check_inside(front, asked, heard, found)
    if whose != "ours":
        shown = front.markers.shown(heard.raw, asked + b"\0" + unquote_to_bytes(asked))
        if shown:
            found("leaks", f"secrets: {shown}")
    if heard.status >= 400 and not head_only:
        _check_error(heard, found)


def _check_inside(front: Front, asked: bytes, heard: Heard, found: Any) -> None:
    for word in front.inside:
        if word in heard.raw and word not in asked:
            found("leaks", f"of the inside: {word!r}")
    # The type of an engine's own error is a name such as BadRequestError.
    text = _TYPE.sub("", heard.raw.decode("utf-8", "replace"))
    inside = INSIDE.search(text)
    if inside is not None and inside[0].lower().encode() not in asked.lower():
        found("internal_errors", f"of the inside: {inside[0]!r}")
    if "json" not in heard.headers.get(
        "content-type", ""
    ) and "event-stream" not in heard.headers.get("content-type", ""):
        return
    if b'"openapi"' in heard.body:  # the document may name what must not be sent
        return
    for key in keys(heard.body):
        if key.startswith(_OF_ENGINES):
            found("leaks", f"an engine's own: {key!r}")


def _check_error(heard: Heard, found: Any) -> None:
    if "application/json" not in heard.headers.get("content-type", ""):
        found("internal_errors", f"an error that is no JSON: {heard.headers}")
    try:
        said = json.loads(heard.body)
    except ValueError:
        found("internal_errors", "an error that is no JSON")
        return
    if set(said) == {"status"} and heard.status == 503:  # /readyz
        return
    error = said.get("error") if isinstance(said, dict) else None
    if not isinstance(error, dict) or not error.keys() >= _ERROR or not error["message"]:
        found("internal_errors", "not an error as OpenAI's")
    if not heard.headers.get("x-request-id"):
        found("internal_errors", "an error without a request id")


def keys(body: bytes) -> Iterator[str]:
    """Yield all keys of objects in a JSON answer or in the events of a stream."""
    texts = [body]
    if body.lstrip().startswith(b"data:"):
        texts = [line[5:] for line in body.splitlines() if line.startswith(b"data:")]
    for text in texts:
        try:
            yield from _keys(json.loads(text))
        except ValueError:
            continue


def _keys(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield key
            yield from _keys(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _keys(inner)
