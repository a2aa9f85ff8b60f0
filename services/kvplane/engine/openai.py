"""OpenAI request bodies as vLLM takes them, checked and made into token ids."""

import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvplane.engine import template, tokenizer
from kvplane.engine.config import EngineConfig
from kvplane.engine.core import Request
from kvplane.kernel.errors import InvalidField, NotFound

Body = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Call:
    """A request for text: the engine's part, and how the answer is to look."""

    request: Request
    response_id: str
    chat: bool
    model: str
    n: int
    stop: tuple[str, ...]
    stream: bool
    include_usage: bool
    continuous_usage: bool
    return_token_ids: bool
    logprobs: bool


def parse(body: Any, *, chat: bool, base_id: str, config: EngineConfig) -> Call:
    """Check a body of /v1/chat/completions or /v1/completions.

    InvalidField names the field; NotFound is an unknown model.
    """
    if not isinstance(body, Mapping):
        raise InvalidField("body", "must be a JSON object")
    model = _model(body, config)
    params = _params(body)
    prompt = _chat_prompt(body, params) if chat else _text_prompt(body, params)
    if not prompt:
        raise InvalidField("messages" if chat else "prompt", "must not be empty")
    options = _optional(body, "stream_options", Mapping, "an object") or {}
    response_id = f"{'chatcmpl' if chat else 'cmpl'}-{base_id or secrets.token_hex(16)}"
    request = Request(
        request_id=f"{response_id}-{secrets.token_hex(4)}",
        prompt=prompt,
        max_tokens=_max_tokens(body, len(prompt), chat, config),
        stop_token_ids=frozenset(token_ids("stop_token_ids", body.get("stop_token_ids") or ())),
        params=dict(params) if params is not None else None,
        cache_salt=_optional(body, "cache_salt", str, "a string") or "",
    )
    return Call(
        request=request,
        response_id=response_id,
        chat=chat,
        model=model,
        n=_whole(body, "n", 1, 128) or 1,
        stop=_stop(body),
        stream=bool(body.get("stream")),
        include_usage=bool(options.get("include_usage")),
        continuous_usage=bool(options.get("continuous_usage_stats")),
        return_token_ids=bool(body.get("return_token_ids")),
        logprobs=body.get("logprobs") not in (None, False),
    )


def tokens_of(body: Any, config: EngineConfig) -> list[int]:
    """Return the tokens for a body of /tokenize: a prompt, or a conversation."""
    if not isinstance(body, Mapping):
        raise InvalidField("body", "must be a JSON object")
    _model(body, config)
    return _chat_prompt(body, None) if "messages" in body else _text_prompt(body, None)


def _model(body: Body, config: EngineConfig) -> str:
    model = _optional(body, "model", str, "a string") or config.model
    if model != config.model:
        raise NotFound("model", model)
    return model


def _chat_prompt(body: Body, params: Body | None) -> list[int]:
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise InvalidField("messages", "must be a list with at least one message")
    given = (params or {}).get("prompt_token_ids")
    if given is not None:
        return token_ids("kv_transfer_params.prompt_token_ids", given)
    tools = _optional(body, "tools", list, "a list")
    continued = bool(body.get("continue_final_message", False))
    text = template.render(
        messages,
        tools,
        add_generation_prompt=bool(body.get("add_generation_prompt", not continued)),
        continue_final_message=continued,
    )
    return tokenizer.encode(text)


def _text_prompt(body: Body, params: Body | None) -> list[int]:
    prompt = body.get("prompt")
    given = (params or {}).get("prompt_token_ids")
    if given is not None:
        return token_ids("kv_transfer_params.prompt_token_ids", given)
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    if isinstance(prompt, str):
        return tokenizer.encode(prompt)
    if isinstance(prompt, list) and not any(isinstance(item, str | list) for item in prompt):
        return token_ids("prompt", prompt)
    raise InvalidField("prompt", "must be one text or one list of token ids")


def _params(body: Body) -> Body | None:
    params: Body | None = _optional(body, "kv_transfer_params", Mapping, "an object")
    if params is None:
        return None
    name = "kv_transfer_params"
    for field in ("remote_port", "remote_num_tokens"):
        _whole(params, field, 0, 1 << 40, f"{name}.{field}")
    expiry = params.get("remote_blocks_expiry_time")
    if expiry is not None and not isinstance(expiry, int | float):
        raise InvalidField(f"{name}.remote_blocks_expiry_time", "must be a number")
    for group in _optional(params, "remote_block_ids", list, "a list of lists") or ():
        if not isinstance(group, list) or not all(isinstance(block, int) for block in group):
            raise InvalidField(f"{name}.remote_block_ids", "must be a list of lists of numbers")
    ours = _optional(params, "kvplane", Mapping, "an object") or {}
    for field in ("turn", "fencing_token"):
        _whole(ours, field, 0, 1 << 62, f"{name}.kvplane.{field}")
    return params


def _max_tokens(body: Body, prompt: int, chat: bool, config: EngineConfig) -> int:
    limit = min(config.max_model_len, config.num_blocks * config.block_size) - prompt
    if limit < 1:
        raise InvalidField(
            "messages" if chat else "prompt",
            f"has {prompt} tokens; the engine takes {prompt + limit} with the answer",
        )
    for name in ("max_completion_tokens", "max_tokens") if chat else ("max_tokens",):
        asked = _whole(body, name, 1, 1 << 31)
        if asked is not None:
            if asked > limit:
                raise InvalidField(name, f"is {asked}; after {prompt} prompt tokens {limit} fit")
            return asked
    return min(config.default_max_tokens, limit)


def _stop(body: Body) -> tuple[str, ...]:
    stop = body.get("stop")
    stops = [stop] if isinstance(stop, str) else stop or []
    if not isinstance(stops, list) or not all(isinstance(s, str) and s for s in stops):
        raise InvalidField("stop", "must be a text or a list of texts, none of them empty")
    return tuple(stops)


def token_ids(field: str, value: Any) -> list[int]:
    """Check a list of token ids. InvalidField names `field`."""
    if not isinstance(value, list | tuple):
        raise InvalidField(field, "must be a list of token ids")
    for token in value:
        if isinstance(token, bool) or not isinstance(token, int):
            raise InvalidField(field, "must be a list of token ids")
        if not 0 <= token < tokenizer.VOCAB_SIZE:
            raise InvalidField(field, f"{token} is not from 0 to {tokenizer.VOCAB_SIZE - 1}")
    return list(value)


def _whole(body: Body, field: str, low: int, high: int, name: str = "") -> int | None:
    value = body.get(field)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise InvalidField(name or field, f"must be a whole number from {low} to {high}")
    return value


def _optional(body: Body, field: str, kind: type, name: str) -> Any:
    value = body.get(field)
    if value is not None and not isinstance(value, kind):
        raise InvalidField(field, f"must be {name}")
    return value
