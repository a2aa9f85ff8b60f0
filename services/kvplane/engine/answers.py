"""The JSON of answers, as vLLM writes it."""

from collections.abc import Sequence
from typing import Any

from kvplane.engine.openai import Call
from kvplane.engine.reuse import Params
from kvplane.engine.text import Piece
from kvplane.engine.tokenizer import decode

Json = dict[str, Any]


def usage(call: Call, generated: int) -> Json:
    """Return the token counts; a decode reports its prefill's cache hits, as vLLM does."""
    request = call.request
    cached = request.cached_tokens
    params = request.params or {}
    if params.get("do_remote_prefill") and isinstance(
        params.get("remote_prefill_cached_tokens"), int
    ):
        cached = params["remote_prefill_cached_tokens"]
    return {
        "prompt_tokens": len(request.prompt),
        "total_tokens": len(request.prompt) + generated * call.n,
        "completion_tokens": generated * call.n,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def whole(call: Call, created: int, parts: Sequence[Piece], params: Params | None) -> Json:
    """Return a complete answer. At temperature 0 its n choices are equal."""
    tokens = [piece.token for piece in parts]
    text = "".join(piece.text for piece in parts)
    choice: Json = {
        "logprobs": _logprobs(call, tokens),
        "finish_reason": parts[-1].finish_reason,
        "stop_reason": parts[-1].stop_reason,
        "token_ids": tokens if call.return_token_ids else None,
    }
    prompt = call.request.prompt if call.return_token_ids else None
    answer: Json = {
        "id": call.response_id,
        "object": "chat.completion" if call.chat else "text_completion",
        "created": created,
        "model": call.model,
    }
    if call.chat:
        message: Json = {"role": "assistant", "content": text, "refusal": None, "tool_calls": []}
        answer["choices"] = [{"index": i, "message": message, **choice} for i in range(call.n)]
        answer["prompt_token_ids"] = prompt
    else:
        answer["choices"] = [
            {"index": i, "text": text, **choice, "prompt_token_ids": prompt} for i in range(call.n)
        ]
    answer["usage"] = usage(call, len(tokens))
    answer["kv_transfer_params"] = params
    return answer


def opening(call: Call, created: int) -> list[Json]:
    """Return the chunks of a chat stream that come before any text."""
    if not call.chat:
        return []
    chunks = []
    for index in range(call.n):
        chunk = _chunk(call, created)
        chunk["choices"] = [
            {
                "index": index,
                "delta": {"role": "assistant", "content": ""},
                "logprobs": None,
                "finish_reason": None,
            }
        ]
        if call.return_token_ids:
            chunk["prompt_token_ids"] = call.request.prompt
        if call.continuous_usage:
            chunk["usage"] = usage(call, 0)
        chunks.append(chunk)
    return chunks


def chunks(call: Call, created: int, piece: Piece, count: int, *, with_params: bool) -> list[Json]:
    """Return the chunks for one piece, the `count`-th of the answer."""
    made = []
    for index in range(call.n):
        chunk = _chunk(call, created)
        choice: Json = {"index": index}
        if call.chat:
            choice["delta"] = {"content": piece.text}
        else:
            choice["text"] = piece.text
        choice["logprobs"] = _logprobs(call, [piece.token])
        choice["finish_reason"] = piece.finish_reason
        choice["stop_reason"] = piece.stop_reason
        if call.return_token_ids:
            choice["token_ids"] = [piece.token]
            if not call.chat and count == 1:
                choice["prompt_token_ids"] = call.request.prompt
        chunk["choices"] = [choice]
        if call.continuous_usage:
            chunk["usage"] = usage(call, count)
        if with_params and piece.params is not None and index == call.n - 1:
            chunk["kv_transfer_params"] = piece.params
        made.append(chunk)
    return made


def closing(call: Call, created: int, generated: int) -> list[Json]:
    """Return the usage chunk, if one was asked for."""
    if not call.include_usage:
        return []
    return [{**_chunk(call, created), "choices": [], "usage": usage(call, generated)}]


def error(message: str, kind: str, code: int, param: str | None = None) -> Json:
    """Return an error body as vLLM writes it."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def _chunk(call: Call, created: int) -> Json:
    return {
        "id": call.response_id,
        "object": "chat.completion.chunk" if call.chat else "text_completion",
        "created": created,
        "model": call.model,
    }


def _logprobs(call: Call, tokens: Sequence[int]) -> Json | None:
    """Return certainty for each token: the toy model knows no other."""
    if not call.logprobs:
        return None
    texts = [decode((token,)) for token in tokens]
    if call.chat:
        return {
            "content": [
                {"token": text, "logprob": 0.0, "bytes": list(text.encode()), "top_logprobs": []}
                for text in texts
            ]
        }
    offsets, at = [], 0
    for text in texts:
        offsets.append(at)
        at += len(text)
    return {
        "text_offset": offsets,
        "token_logprobs": [0.0] * len(texts),
        "tokens": texts,
        "top_logprobs": [{text: 0.0} for text in texts],
    }
