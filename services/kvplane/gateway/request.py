"""A client's request: checked, and made into what the engines get."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import orjson

from kvplane.gateway import history
from kvplane.gateway.history import History
from kvplane.gateway.jsonedit import with_members
from kvplane.gateway.session_key import session_name
from kvplane.kernel.errors import InvalidField

CHAT: Final = "/v1/chat/completions"
COMPLETIONS: Final = "/v1/completions"

# Limits and repetitions: a prefill makes exactly one token of one choice. A stop text
# would end it without its blocks being held.
_NOT_FOR_PREFILL: Final = (
    "stream_options", "max_completion_tokens", "min_tokens", "best_of", "stop", "echo",
)  # fmt: skip
_CHARACTERS_PER_TOKEN: Final = 4

# Fields that tell an engine whose memory to read, and where an engine looks for them.
_STEERING: Final = frozenset({"kv_transfer_params", "ec_transfer_params"})
_HOLDERS: Final = ("extra_body", "vllm_xargs", "extra_args")
# The gateway's own to say: the order among tenants, and the name in the engine's logs
# and handles.
_OURS: Final = ("priority", "request_id")
# They name code or files that an engine would load.
_LOADS: Final = ("logits_processors", "mm_processor_kwargs")

WORDS: Final = ("stop", "stop_token_ids", "bad_words")

MAX_MODEL_BYTES: Final = 512
# Far more than people need, far fewer than would hurt.
MAX_MESSAGES: Final = 10_000
MAX_TOOLS: Final = 1_000
MAX_PROMPTS: Final = 1_000
MAX_CHOICES: Final = 128
MAX_WORDS: Final = 1_000
MAX_DEPTH: Final = 100


@dataclass(slots=True)
class ClientRequest:
    """One completion that a client asks for."""

    path: str
    raw: bytes
    # Parsed, without the fields that no client may send; never changed.
    body: Mapping[str, Any]
    # `raw` holds a field that no client may send.
    stripped: bool
    model: str
    stream: bool
    session: str
    history: History | None
    # Of the tenant's own space in the engines' prefix caches; "" for none.
    cache_salt: str

    @property
    def is_chat(self) -> bool:
        """It is a chat, not a text completion."""
        return self.path == CHAT

    @property
    def one_prompt(self) -> bool:
        """It is one prompt, whose KV can be handed over.

        The others go to a decode as they are: several prompts share no handle, and
        logprobs of a prompt need it computed where they are made.
        """
        body = self.body
        if body.get("prompt_logprobs") is not None or body.get("use_beam_search"):
            return False
        if self.is_chat:
            return True
        if body.get("echo") or body.get("prompt_embeds") is not None:
            return False
        prompt = body.get("prompt")
        return isinstance(prompt, str) or is_ids(prompt)

    @property
    def choices(self) -> int:
        """How many choices it asks for."""
        n = self.body.get("n")
        return n if isinstance(n, int) and n > 0 else 1

    @property
    def wants_usage(self) -> bool:
        """The client itself asked for usage in the stream."""
        options = self.body.get("stream_options")
        return isinstance(options, Mapping) and bool(options.get("include_usage"))

    @property
    def prompt_tokens_estimate(self) -> int:
        """A guess from the body's size."""
        return len(self.raw) // _CHARACTERS_PER_TOKEN

    def prefill_body(self, params: Mapping[str, Any], *, token_ids: bool) -> bytes:
        """Return the body of the prefill leg.

        `token_ids` asks for the prompt's ids. Raises InvalidField("body").
        """
        body = {key: value for key, value in self.body.items() if key not in _NOT_FOR_PREFILL}
        body["stream"] = False
        body["max_tokens"] = 1
        if "n" in body:
            body["n"] = 1
        if token_ids:
            body["return_token_ids"] = True
        # Never the client's own, which might be another tenant's.
        body.pop("cache_salt", None)
        if self.cache_salt:
            body["cache_salt"] = self.cache_salt
        body["kv_transfer_params"] = params
        return _dump(body)

    def decode_body(
        self, params: Mapping[str, Any] | None, *, usage: bool, token_ids: bool
    ) -> bytes:
        """Return the body of the decode leg: the client's bytes, and what we ask for beside.

        `usage` asks for usage in a stream, `token_ids` for the ids of prompt and reply.
        Raises InvalidField("body").
        """
        add: dict[str, Any] = {}
        if params is not None:
            add["kv_transfer_params"] = params
        if usage:
            options = self.body.get("stream_options")
            add["stream_options"] = {**(options or {}), "include_usage": True}
        if token_ids:
            add["return_token_ids"] = True
        if self.cache_salt:
            add["cache_salt"] = self.cache_salt
        anew = self.stripped or "cache_salt" in self.body
        if not anew and not add.keys() & self.body.keys():
            return with_members(self.raw, self.body, add)
        # Not orjson: it would turn integers beyond 64 bits into floats.
        try:
            exact = json.loads(self.raw)
            _strip(exact)
            exact.pop("cache_salt", None)
            return json.dumps({**exact, **add}, separators=(",", ":")).encode()
        except RecursionError as error:
            raise InvalidField("body", "is nested too deep") from error

    def with_reply(self, message: Mapping[str, Any], text: str) -> bytes:
        """Return the digest of the history that ends with this reply, b"" for none."""
        if self.history is None:
            return b""
        if self.is_chat:
            return history.after_message(self.history.digest, message)
        prompt = self.body["prompt"]
        if isinstance(prompt, str):
            return history.after_text(self.model, prompt + text)
        return self.history.digest if self.history.candidates else b""


def parse(path: str, raw: bytes, headers: Mapping[str, str]) -> ClientRequest:
    """Check a request. Raises InvalidField naming the field; "body" for what is no JSON object."""
    try:
        body = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise InvalidField("body", f"is not JSON: {error}") from error
    if not isinstance(body, dict):
        raise InvalidField("body", "must be a JSON object")
    _check_depth(raw, body)
    stripped = _strip(body)
    model = body.get("model")
    if not isinstance(model, str) or not model:
        raise InvalidField("model", "must be the name of a model")
    if len(model.encode()) > MAX_MODEL_BYTES:
        raise InvalidField("model", f"must be at most {MAX_MODEL_BYTES} bytes long")
    _check_fields(body)
    past = _messages(model, body) if path == CHAT else _prompt(model, body)
    return ClientRequest(
        path=path,
        raw=raw,
        body=body,
        stripped=stripped,
        model=model,
        stream=bool(body.get("stream")),
        session=session_name(headers, body),
        history=past,
        cache_salt="",
    )


def tenant_salt(secret: str, salt: str | None) -> str:
    """Return the cache_salt that engines get, "" for none.

    `secret` is the tenant's own ("" where there are no tenants), `salt` the client's: no
    tenant can name another's space.
    """
    if not secret and salt is None:
        return ""
    digest = hashlib.blake2b(digest_size=16)
    for part in (secret, salt or ""):
        raw = part.encode()
        digest.update(len(raw).to_bytes(8, "little"))
        digest.update(raw)
    return digest.hexdigest()


def _check_fields(body: Mapping[str, Any]) -> None:
    """Check what the gateway itself goes by, and what would cost an engine too much."""
    if not isinstance(body.get("stream"), bool | None):
        raise InvalidField("stream", "must be true or false")
    if not isinstance(body.get("stream_options"), dict | None):
        raise InvalidField("stream_options", "must be an object")
    salt = body.get("cache_salt")
    if salt is not None and (not isinstance(salt, str) or not salt):
        raise InvalidField("cache_salt", "must be a text that is not empty")
    for name in ("n", "best_of"):
        count = body.get(name)
        if count is not None and (type(count) is not int or not 1 <= count <= MAX_CHOICES):
            raise InvalidField(name, f"must be a number from 1 to {MAX_CHOICES}")
    tools = body.get("tools")
    if tools is not None and (not isinstance(tools, list) or len(tools) > MAX_TOOLS):
        raise InvalidField("tools", f"must be a list of at most {MAX_TOOLS} tools")
    for name in WORDS:  # an engine looks for each of them after every token
        words = body.get(name)
        if isinstance(words, list) and len(words) > MAX_WORDS:
            raise InvalidField(name, f"must be at most {MAX_WORDS}")
    for name in _LOADS:
        if body.get(name) is not None:
            raise InvalidField(name, "is not taken from clients: leave it out")


def _check_depth(raw: bytes, body: dict[str, Any]) -> None:
    if raw.count(b"{") + raw.count(b"[") <= MAX_DEPTH:
        return
    level: list[Any] = [body]
    for _ in range(MAX_DEPTH):
        inner: list[Any] = []
        for holder in level:
            items = holder.values() if isinstance(holder, dict) else holder
            inner += [item for item in items if isinstance(item, dict | list)]
        if not inner:
            return
        level = inner
    raise InvalidField("body", f"is nested more than {MAX_DEPTH} deep")


def _messages(model: str, body: Mapping[str, Any]) -> History:
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise InvalidField("messages", "must be a list of messages")
    if len(messages) > MAX_MESSAGES:
        raise InvalidField("messages", f"must be at most {MAX_MESSAGES} messages")
    for number, message in enumerate(messages):
        if not isinstance(message, dict):
            raise InvalidField(f"messages[{number}]", "must be an object")
        if not isinstance(message.get("role"), str):
            raise InvalidField(f"messages[{number}].role", "must be a text")
    return history.of_messages(model, messages)


def _prompt(model: str, body: Mapping[str, Any]) -> History | None:
    prompt: Any = body.get("prompt")
    if prompt is None and body.get("prompt_embeds") is None:
        raise InvalidField("prompt", "must be set")
    if isinstance(prompt, str):
        return history.of_text(model, prompt)
    if is_ids(prompt):
        return history.of_tokens(model, prompt)
    if prompt is not None and not _is_prompts(prompt):
        problem = f"must be a text, token ids, or a list of at most {MAX_PROMPTS} of them"
        raise InvalidField("prompt", problem)
    return None


def _is_prompts(prompts: Any) -> bool:
    if not isinstance(prompts, list) or not 1 <= len(prompts) <= MAX_PROMPTS:
        return False
    return all(isinstance(one, str) for one in prompts) or all(is_ids(one) for one in prompts)


def is_ids(prompt: Any) -> bool:
    """Tell whether it is a list of token ids, of one at least."""
    if not isinstance(prompt, list) or not prompt:
        return False
    return all(type(token) is int and 0 <= token < 1 << 32 for token in prompt)


def _strip(body: dict[str, Any]) -> bool:
    """Take out what is not a client's to say; return whether the rest must be written anew.

    It must be as soon as there is a place where steering could be, found or not: of a
    name that comes twice another parser may see the other.
    """
    found = any(name in body for name in (*_HOLDERS, *_STEERING, *_OURS, *_LOADS))
    if found:
        for name in (*_STEERING, *_OURS):
            body.pop(name, None)
        for name in _HOLDERS:
            _strip_holder(body.get(name))
    return found


def _strip_holder(holder: Any) -> None:
    """Take steering out at any depth."""
    if isinstance(holder, dict):
        for name in _STEERING & holder.keys():
            del holder[name]
    if isinstance(holder, dict | list):
        for inner in holder.values() if isinstance(holder, dict) else holder:
            _strip_holder(inner)


def _dump(body: Mapping[str, Any]) -> bytes:
    try:
        return orjson.dumps(body)
    except TypeError as error:
        raise InvalidField("body", "is nested too deep") from error
