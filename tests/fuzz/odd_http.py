"""Requests that clients make when they are odd or hostile, as bytes."""

import gzip
import json
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar
from urllib.parse import quote

from hypothesis import strategies as st
from kvplane.gateway.session_key import BODY_FIELDS, HEADERS

from fuzz.front import MODEL, Front

T = TypeVar("T")

_METHODS: Final = (b"POST", b"GET", b"DELETE", b"PUT", b"PATCH", b"OPTIONS", b"HEAD", b"TRACE",
                   b"CONNECT", b"post", b"PROPFIND", b"A" * 300, b"", b"P\0ST")  # fmt: skip
_PATHS: Final = (
    b"/v1/chat/completions", b"/v1/completions", b"/v1/models", b"/v1/models/tiny",
    b"/v1/models/%00", b"/v1/models/..%2f..", b"/v1/sessions/$OURS", b"/v1/sessions/$THEIRS",
    b"/v1/sessions/%ff", b"/v1/sessions/%E2%82", b"/v1/sessions/", b"/v1/sessions/%2e%2e/models",
    b"/v1/sessions/a/b//c", b"/v1/sessions/" + b"x" * 600, b"/health", b"/healthz", b"/readyz",
    b"/metrics", b"/openapi.json", b"/", b"//", b"/v1", b"/v1/../v1/models", b"/v1/embeddings",
    b"*", b"http://127.0.0.1:1/v1/models", b"/v1/chat/completions/", b"/v1/models?x=1&x=%00",
    b"/v1/chat/completions?model=tiny", b"/%", b"/v1/models/\xff", b"/v1/models/a b", b"/x" * 3000,
    b"/debug/state", b"/v1/models;x", b"/v1/models#x", b"/tokenize", b"/docs",
)  # fmt: skip
_STEERING: Final = (
    "kv_transfer_params", "ec_transfer_params", "cache_salt", "extra_body", "vllm_xargs",
    "request_id", "prompt_embeds", "lora_path", "mm_processor_kwargs", "priority",
    "data_parallel_rank",
)  # fmt: skip
_KNOWN: Final = (
    "model", "messages", "prompt", "stream", "stream_options", "max_tokens", "n", "best_of", "stop",
    "logprobs", "top_logprobs", "tools", "tool_choice", "response_format", "temperature", "seed",
    "echo", "user", "metadata", "logit_bias", "min_tokens", "prompt_logprobs",
    "max_completion_tokens",
    "use_beam_search", "conversation", "suffix", "ignore_eos", "stop_token_ids",
    "truncate_prompt_tokens",
    "add_generation_prompt", "continue_final_message", "return_token_ids",
)  # fmt: skip
_HANDLE: Final = {
    "do_remote_prefill": True, "remote_block_ids": [[1, 2, 3]], "remote_engine_id": "e",
    "remote_request_id": "r", "remote_host": "127.0.0.1", "remote_port": 1, "tp_size": 1,
    "remote_num_tokens": 48,
}  # fmt: skip
_VALUES: Final[tuple[Any, ...]] = (
    None, True, False, 0, 1, -1, 2, 10**30, -(10**30), 1e308, 0.5, "", "x", "\0", "é" * 300,
    "x" * 600, "\ud800", [], [[]], {}, {"a": 1}, [None], [1, 2, 3], [1 << 40], ["a", "b"],
    [{"role": "user", "content": "hi"}], [{"role": "user"}], [{"role": 5, "content": "x"}],
    [{"role": "user", "content": [{"type": "text", "text": "hi"}]}],
    [{"role": "tool", "content": None, "tool_call_id": "x"}], {"include_usage": True},
    {"include_usage": "x"}, [{"role": "user", "content": "hi " * 500}], "tiny", MODEL + "\0",
    {"id": "x" * 600}, {"type": "json_object"}, {"type": "json_schema"}, "auto", _HANDLE,
    [{"type": "function", "function": {"name": "f", "parameters": {}}}], {"1": 5}, {"x": "y"},
)  # fmt: skip
# Placed into a JSON text, where a value was.
_LITERALS: Final = (
    b"NaN", b"-Infinity", b"1e999", b"1" * 400, b"0123", b"\"\\ud800\"", b"\"\xff\"", b"[" * 900,
    b"[" * 300 + b"]" * 300, b'{"a":' * 300 + b"1" + b"}" * 300, b"'x'", b"/*x*/1", b"", b"tru",
    b"-", b"\"\\u0000\"", b"1.0", b"\"a\nb\"", b'{"model":"x","model":"tiny"}',
    b"[" + b"1," * 5000 + b"1]",
)  # fmt: skip
_HEADER_LINES: Final = (
    b"X-Request-Id: " + b"x" * 65, b"X-Request-Id: a b", b"X-Request-Id: \xff", b"Host: evil:1",
    b"X-Forwarded-For: 127.0.0.1", b"X-data-parallel-rank: 7", b"X-Kvplane-Tenant: $TENANT",
    b"X-Kvplane-Actor: x", b"Expect: 100-continue", b"Expect: x", b"Upgrade: h2c",
    b"Upgrade: websocket",
    b"Cookie: " + b"x" * 5000, b"X-Big: " + b"x" * 20_000, b"Accept: text/html",
    b"Accept-Encoding: gzip",
    b"Range: bytes=0-1", b"traceparent: 00-x", b"Bad Header: x", b" folded: x", b"NoColon", b": x",
    b"X-A: \0", b"X-A: a\rb", b"Content-Length: 5", b"Content-Length: -1",
    b"Transfer-Encoding: chunked",
    b"Transfer-Encoding: gzip", b"Content-Type: text/plain", b"Content-Type: \xff",
    b"Content-Type: application/json; charset=utf-16",
    b"Content-Type: multipart/form-data; boundary=x",
    b"Connection: keep-alive", b"Connection: upgrade", b"Authorization: Bearer kvp_x",
    b"X-Kvplane-Worker: x", b"baggage: a=b", b"Content-Encoding: identity", b"Te: trailers",
)  # fmt: skip
_KEYS: Final = ("theirs", "theirs", "theirs", "theirs", "ours", "none", "wrong", "odd")
_NOT_UTF8: Final = b"caf\xe9"


@dataclass
class Sent:
    """A request in bytes, and what it is, for the judge."""

    raw: bytes
    whose: str
    path: bytes
    # Closes its side of the connection after it.
    close: bool = False
    notes: list[str] = field(default_factory=list)


class Oddities:
    """Draws requests."""

    def __init__(self, draw: Callable[[st.SearchStrategy[Any]], Any], front: Front) -> None:
        self._draw, self._front = draw, front

    def _below(self, count: int) -> int:
        return int(self._draw(st.integers(0, count - 1)))

    def _one_of(self, choices: Sequence[T]) -> T:
        return choices[self._below(len(choices))]

    def request(self) -> Sent:
        """Return a request."""
        path = self._path()
        usual = b"POST" if b"completions" in path else b"GET"
        if path.startswith(b"/v1/sessions"):
            usual = b"DELETE"
        method = self._one_of(_METHODS) if self._below(8) == 7 else usual
        body = self._body(path) if usual == b"POST" or self._below(8) == 7 else b""
        whose, authorization = self._authorization()
        lines = [b"Host: gateway", b"Connection: close", *authorization]
        body, more = self._packed(body)
        lines += more
        if self._below(20) != 19:
            lines.append(b"Content-Type: application/json")
        for _ in range(self._one_of((0, 0, 0, 1, 1, 2, 5))):
            lines.append(self._filled(self._one_of(_HEADER_LINES)))
        if self._below(4) == 3:
            lines.append(self._session_header())
        if self._below(60) == 59:
            lines += [b"X-Many-%d: x" % number for number in range(300)]
        version = self._one_of(
            (b"HTTP/1.1",) * 20 + (b"HTTP/1.0", b"HTTP/2.0", b"HTTP/9", b"", b"x")
        )
        raw = b"\r\n".join([b" ".join((method, path, version)), *lines, b"", body])
        close = False
        if self._below(20) == 19:
            raw, close = raw[: self._below(len(raw) + 1)], True
        return Sent(raw, whose, path, close)

    def _path(self) -> bytes:
        path = _PATHS[self._below(2)] if self._below(3) else self._one_of(_PATHS)
        return self._filled(path)

    def _filled(self, text: bytes) -> bytes:
        front = self._front
        return (
            text.replace(b"$OURS", quote(front.sessions["ours"][0], safe="").encode())
            .replace(b"$THEIRS", quote(front.sessions["theirs"][0], safe="").encode())
            .replace(b"$TENANT", front.tenants["ours"].encode())
        )

    def _authorization(self) -> tuple[str, list[bytes]]:
        whose = self._one_of(_KEYS)
        if whose in self._front.keys:
            return whose, [b"Authorization: Bearer " + self._front.keys[whose].encode()]
        if whose == "none":
            return whose, []
        if whose == "wrong":
            return whose, [b"Authorization: Bearer kvp_" + b"x" * 43]
        return "wrong", [b"Authorization: " + self._one_of(
            (b"", b"Bearer", b"Basic eDp4", b"Bearer \xff", b"Bearer " + b"x" * 6000,
            b"bearer kvp_\xc3\xa9")
        )]  # fmt: skip

    def _session_header(self) -> bytes:
        name = self._one_of(tuple(HEADERS)).encode()
        values = (
            b"x",
            b"$OURS",
            b"$THEIRS",
            b"",
            b"x" * 513,
            _NOT_UTF8,
            b"a b",
            b"%00",
            "é".encode() * 300,
        )
        return name + b": " + self._filled(self._one_of(values))

    # -- bodies -------------------------------------------------------------------

    def _body(self, path: bytes) -> bytes:
        chat = b"chat" in path
        body: dict[str, Any] = {"model": MODEL, "max_tokens": 4}
        if chat:
            body["messages"] = [{"role": "user", "content": "hello"}]
        else:
            body["prompt"] = "once upon a time"
        for _ in range(self._one_of((0, 1, 1, 2, 3))):
            name = self._one_of((*_KNOWN, *_STEERING, *BODY_FIELDS))
            body[name] = self._value()
        if self._below(10) == 9:
            del body[self._one_of(list(body))]
        text = json.dumps(body, ensure_ascii=True).encode()
        kind = self._below(12)
        if kind == 8:
            text = self._with_literal(text)
        elif kind == 9:
            text = text[: self._below(len(text))]
        elif kind == 10:
            text = text[:-1] + b"," + text[1:]  # every key twice
        elif kind == 11:
            text = self._one_of(
                (b"", b"[]", b"null", b"\xef\xbb\xbf" + text, text + b"x",
                text.decode().encode("utf-16"),
                 b"[" * 100_000, b"\0" * 100, b" " * 1000 + text, b"x" * 1_100_000,
                 bytes(self._draw(_RAW)))
            )  # fmt: skip
        return text

    def _value(self) -> Any:
        if self._below(6) == 5:
            return self._one_of(
                (self._front.sessions["ours"][0], self._front.sessions["theirs"][0])
            )
        if self._below(8) == 7:
            return self._draw(_JSON)
        return self._one_of(_VALUES)

    def _with_literal(self, text: bytes) -> bytes:
        commas = [at for at, byte in enumerate(text) if byte == 0x3A]
        at = self._one_of(commas or [0])
        return text[: at + 1] + self._one_of(_LITERALS) + b"," + text[text.find(b'"', at + 1) :]

    def _packed(self, body: bytes) -> tuple[bytes, list[bytes]]:
        kind = self._below(16)
        length = b"Content-Length: %d" % len(body)
        if kind < 10:
            return body, [length]
        if kind == 10:
            cut = max(1, len(body) // 2)
            chunks = b"".join(
                b"%x\r\n%s\r\n" % (len(part), part) for part in (body[:cut], body[cut:]) if part
            )
            return chunks + b"0\r\n\r\n", [b"Transfer-Encoding: chunked"]
        if kind == 11:
            return self._one_of((b"zz\r\n", b"5\r\nab", b"-1\r\n", b"ffffffffffffffff\r\n", b"")), [
                b"Transfer-Encoding: chunked"
            ]
        if kind == 12:
            packed = self._one_of((gzip.compress(body), zlib.compress(body), body))
            coding = self._one_of((b"gzip", b"deflate", b"br", b"zstd", b"x, gzip", b""))
            return packed, [b"Content-Length: %d" % len(packed), b"Content-Encoding: " + coding]
        if kind == 13:
            bomb = gzip.compress(bytes(3_000_000))
            return bomb, [b"Content-Length: %d" % len(bomb), b"Content-Encoding: gzip"]
        if kind == 14:
            return body, [b"Content-Length: %d" % (len(body) // 2)]
        return body, [length, length]


_RAW: Final = st.binary(max_size=40)
_JSON: Final = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner,
    max_size=3),
    max_leaves=6,
)  # fmt: skip
