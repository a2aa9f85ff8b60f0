"""The engine's HTTP face."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from typing import Any

from aiohttp import web

from kvplane.engine import answers, debug, openai, tokenizer
from kvplane.engine.config import ENGINE_VERSION
from kvplane.engine.core import Engine
from kvplane.engine.matching import EngineDead
from kvplane.engine.reading import RemoteLoadFailed
from kvplane.engine.stats import exposition
from kvplane.engine.text import pieces
from kvplane.kernel.errors import InvalidField, NotFound

_MAX_BODY = 64 << 20
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Face:
    """The routes of one engine. `died` is called when the engine has to end."""

    def __init__(self, engine: Engine, died: Callable[[], None]) -> None:
        self._engine = engine
        self._died = died
        self._created = engine.clock.now_us() // 1_000_000

    def app(self) -> web.Application:
        """Return the application. Run it with handler_cancellation, to see clients leave."""
        app = web.Application(client_max_size=_MAX_BODY, middlewares=[self._errors])
        app.router.add_post("/v1/chat/completions", self._chat)
        app.router.add_post("/v1/completions", self._completions)
        app.router.add_post("/tokenize", self._tokenize)
        app.router.add_post("/detokenize", self._detokenize)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/health", self._health)
        app.router.add_get("/version", self._version)
        app.router.add_get("/metrics", self._metrics)
        if self._engine.config.debug:
            debug.add_routes(app, self._engine)
        return app

    @web.middleware
    async def _errors(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            return await handler(request)
        except (InvalidField, NotFound, RemoteLoadFailed, EngineDead) as error:
            body, code = self._error(error)
            return web.json_response(body, status=code)

    def _error(self, error: Exception) -> tuple[answers.Json, int]:
        if isinstance(error, InvalidField):
            field = error.metadata["field"]
            return answers.error(error.message, "BadRequestError", 400, field), 400
        if isinstance(error, NotFound):
            message = f"The model `{error.metadata['id']}` does not exist."
            return answers.error(message, "NotFoundError", 404, "model"), 404
        if isinstance(error, EngineDead):
            self._died()
        return answers.error("Internal server error", "InternalServerError", 500), 500

    async def _chat(self, http: web.Request) -> web.StreamResponse:
        return await self._answer(http, chat=True)

    async def _completions(self, http: web.Request) -> web.StreamResponse:
        return await self._answer(http, chat=False)

    async def _answer(self, http: web.Request, *, chat: bool) -> web.StreamResponse:
        call = openai.parse(
            await _body(http),
            chat=chat,
            base_id=http.headers.get("X-Request-Id", ""),
            config=self._engine.config,
        )
        created = self._engine.clock.now_us() // 1_000_000
        if call.stream:
            try:
                return await self._stream(http, call, created)
            except ConnectionError as error:  # the client has left
                raise asyncio.CancelledError from error
        async with aclosing(pieces(self._engine, call)) as parts:
            made = [piece async for piece in parts]
        return web.json_response(answers.whole(call, created, made, made[-1].params))

    async def _stream(
        self, http: web.Request, call: openai.Call, created: int
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await response.prepare(http)
        count = 0
        try:
            async with aclosing(pieces(self._engine, call)) as parts:
                async for piece in parts:
                    events = answers.opening(call, created) if count == 0 else []
                    count += 1
                    events += answers.chunks(
                        call,
                        created,
                        piece,
                        count,
                        with_params=self._engine.config.stream_kv_params,
                    )
                    await response.write(_events(events))
            await response.write(_events(answers.closing(call, created, count)))
        except (RemoteLoadFailed, EngineDead) as error:
            # The status has gone out: vLLM says it in the stream.
            await response.write(_events([self._error(error)[0]]))
        await response.write(b"data: [DONE]\n\n")
        await response.write_eof()
        return response

    async def _tokenize(self, http: web.Request) -> web.Response:
        body = await _body(http)
        ids = openai.tokens_of(body, self._engine.config)
        return web.json_response(
            {
                "count": len(ids),
                "max_model_len": self._engine.config.max_model_len,
                "tokens": ids,
                "token_strs": tokenizer.token_strings(ids)
                if body.get("return_token_strs")
                else None,
            }
        )

    async def _detokenize(self, http: web.Request) -> web.Response:
        body = await _body(http)
        ids = openai.token_ids("tokens", body.get("tokens") if isinstance(body, dict) else None)
        return web.json_response({"prompt": tokenizer.decode(ids)})

    async def _models(self, http: web.Request) -> web.Response:
        config = self._engine.config
        model = {
            "id": config.model,
            "object": "model",
            "created": self._created,
            "owned_by": "kvplane",
            "root": config.model,
            "parent": None,
            "max_model_len": config.max_model_len,
        }
        return web.json_response({"object": "list", "data": [model]})

    async def _health(self, http: web.Request) -> web.Response:
        return web.Response(status=503 if self._engine.dead else 200)

    async def _version(self, http: web.Request) -> web.Response:
        return web.json_response({"version": ENGINE_VERSION})

    async def _metrics(self, http: web.Request) -> web.Response:
        engine = self._engine
        text = exposition(
            engine.stats,
            engine.config.model,
            held=len(engine.blocks.pins),
            used=engine.blocks.pool.in_use,
            total=engine.config.num_blocks,
            parked=engine.reader.parked_blocks,
        )
        return web.Response(text=text, headers={"Content-Type": "text/plain; version=0.0.4"})


async def _body(http: web.Request) -> Any:
    try:
        return json.loads(await http.read())
    except ValueError as error:
        raise InvalidField("body", f"is not JSON: {error}") from error


def _events(chunks: list[answers.Json]) -> bytes:
    return "".join(
        f"data: {json.dumps(chunk, ensure_ascii=False, separators=(',', ':'))}\n\n"
        for chunk in chunks
    ).encode("utf-8", "replace")
