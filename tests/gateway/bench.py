"""Engines and a control plane that do what a test tells them, and remember what came."""

import asyncio
import contextlib
import json

import aiohttp
from aiohttp import web
from kvplane.api.lease.v1 import lease_pb2 as lease
from kvplane.api.routing.v1 import routing_pb2 as routing
from kvplane.api.session.v1 import session_pb2 as session
from kvplane.api.tenant.v1 import tenant_pb2 as tenant
from kvplane.client import kv_params
from kvplane.gateway.config import GatewayConfig
from kvplane.gateway.main import build
from kvplane.kernel.context import caller
from kvplane.kernel.errors import NotFound, NoWorker, Unauthenticated

MODEL = "tiny"
USAGE = {
    "prompt_tokens": 100,
    "completion_tokens": 5,
    "total_tokens": 105,
    "prompt_tokens_details": {"cached_tokens": 80},
}
PROMPT_IDS = list(range(100))
OUTPUT_IDS = [900, 901, 902, 903, 904]


def sse(*chunks, done=True):
    events = [
        b"data: " + json.dumps(chunk, ensure_ascii=False).encode() + b"\n\n" for chunk in chunks
    ]
    return [*events, b"data: [DONE]\n\n"] if done else events


def chunk(content=None, finish=None, **more):
    delta = {} if content is None else {"content": content}
    return {
        "id": "chatcmpl-1",
        "object": "chat.completion.chunk",
        "created": 1,
        "model": MODEL,
        "choices": [{"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}],
        **more,
    }


class Engine:
    """One engine's HTTP face."""

    def __init__(self, worker_id, port_base=5600):
        self.worker_id = worker_id
        self.kv_host, self.kv_port = "127.0.0.1", port_base
        self.requests = []
        self.headers = []
        self.paths = []
        self.aborted = asyncio.Event()
        self.arrived = asyncio.Event()
        # async (request, body) -> response; replaces what follows.
        self.behave = None
        self.text = "Hello there"
        self.pieces = None
        self.block_ids = [[1, 2, 3, 4, 5, 6, 7]]
        self.tokens = PROMPT_IDS
        # async () -> response; replaces /tokenize.
        self.tokenizer = None
        self.stream_params = True
        self._runner = None

    @property
    def url(self):
        return f"http://127.0.0.1:{self.port}"

    @property
    def bodies(self):
        return self.requests

    async def start(self, port=0):
        app = web.Application(client_max_size=64 << 20)
        for path in ("/v1/chat/completions", "/v1/completions"):
            app.router.add_post(path, self._complete)
        app.router.add_post("/tokenize", self._tokenize)
        app.router.add_get("/health", self._ok)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/version", self._version)
        app.router.add_get("/metrics", self._metrics)
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", port)
        await site.start()
        self.port = self._runner.addresses[0][1]
        return self

    async def stop(self):
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    def handle(self, *, prefill):
        return {
            "do_remote_prefill": prefill,
            "do_remote_decode": not prefill,
            "remote_block_ids": self.block_ids,
            "remote_engine_id": f"engine-{self.worker_id}",
            "remote_request_id": f"{self.worker_id}-{len(self.requests)}",
            "remote_host": self.kv_host,
            "remote_port": self.kv_port,
            "tp_size": 1,
            "remote_num_tokens": 100 if prefill else 104,
            "remote_blocks_expiry_time": None if prefill else 1234.5,
            "new_key_of_tomorrow": [1, {"x": 2}],
        }

    async def _complete(self, request):
        body = json.loads(await request.read())
        self.requests.append(body)
        self.headers.append(request.headers.copy())
        self.paths.append(request.path)
        self.arrived.set()
        try:
            if self.behave is not None:
                response = await self.behave(request, body)
                if response is not None:
                    return response
            return await self.answer(request, body)
        except (asyncio.CancelledError, ConnectionResetError):
            self.aborted.set()
            raise

    async def answer(self, request, body):
        params = body.get("kv_transfer_params")
        if params and params.get("do_remote_decode"):
            return web.json_response(self.whole(request, body, self.handle(prefill=True)))
        handle = self.handle(prefill=False) if params else None
        if not body.get("stream"):
            return web.json_response(self.whole(request, body, handle))
        return await self.stream(request, self.events(body, handle))

    def whole(self, request, body, handle):
        choice = {"index": 0, "finish_reason": "stop", "logprobs": None}
        if request.path.endswith("chat/completions"):
            choice["message"] = {"role": "assistant", "content": self.text}
        else:
            choice["text"] = self.text
        answer = {"id": "x", "object": "o", "model": MODEL, "choices": [choice], "usage": USAGE}
        if body.get("return_token_ids"):
            answer["prompt_token_ids"] = self.tokens
            choice["token_ids"] = OUTPUT_IDS
        if handle is not None:
            answer["kv_transfer_params"] = handle
        return answer

    def events(self, body, handle):
        pieces = self.pieces or self.text.split(" ")
        chunks = [chunk(piece) for piece in pieces]
        last = chunk(finish="stop")
        if handle is not None and self.stream_params:
            last["kv_transfer_params"] = handle
        if body.get("return_token_ids"):
            chunks[0]["prompt_token_ids"] = self.tokens
            last["choices"][0]["token_ids"] = OUTPUT_IDS
        chunks.append(last)
        if (body.get("stream_options") or {}).get("include_usage"):
            chunks.append({"id": "x", "object": "c", "model": MODEL, "choices": [], "usage": USAGE})
        return sse(*chunks)

    async def stream(self, request, parts, gap=None):
        """Send parts one network write each; a gap is a coroutine function between them."""
        response = await self.stream_open(request)
        for part in parts:
            await response.write(part)
            if gap is not None:
                await gap()
        await response.write_eof()
        return response

    async def stream_open(self, request):
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await response.prepare(request)
        return response

    async def _tokenize(self, request):
        self.tokenized = json.loads(await request.read())
        if self.tokenizer is not None:
            return await self.tokenizer()
        return web.json_response({"count": len(self.tokens), "tokens": self.tokens})

    async def _ok(self, _request):
        return web.Response()

    async def _models(self, _request):
        return web.json_response({"data": [{"id": MODEL, "max_model_len": 8192}]})

    async def _version(self, _request):
        return web.json_response({"version": "0.32.0"})

    async def _metrics(self, _request):
        # As Prometheus clients write it.
        return web.Response(text=f"process_start_time_seconds {1.79e9 + self.kv_port:.12e}\n")


class Control:
    """All services in one object, as the gateway sees them."""

    def __init__(self):
        self.workers = {}
        self.prefills, self.decodes = [], []
        self.routes, self.completes = [], []
        self.grants, self.revoked, self.released = [], [], []
        self.revokers = []
        self.reports, self.renewed, self.begun = [], [], []
        self.owned, self.listed = [], []
        self.ended = []
        self.sessions = {}
        self.histories = {}
        self.turns = {}
        self.lease_next = False
        self.held = None
        self.keys = {"kvp_a": "tenant-a", "kvp_b": "tenant-b"}
        self.resolved = 0
        # Awaited before an answer, by RPC.
        self.before = {}
        self.registered = []

    def add(self, engine, role, *, managed=True, state=routing.WORKER_STATE_READY):
        self.workers[engine.worker_id] = routing.Worker(
            worker_id=engine.worker_id,
            epoch=1,
            role=role,
            url=engine.url,
            kv_host=engine.kv_host,
            kv_port=engine.kv_port,
            engine_id=f"engine-{engine.worker_id}" if managed else "",
            compatibility=routing.Compatibility(model=MODEL, block_size=16),
            bidirectional=True,
            managed=managed,
            max_model_len=8192,
            state=state,
            served_models=[MODEL],
        )
        if role != routing.WORKER_ROLE_DECODE:
            self.prefills.append(engine.worker_id)
        if role != routing.WORKER_ROLE_PREFILL:
            self.decodes.append(engine.worker_id)

    def lose(self, worker_id):
        self.workers[worker_id].state = routing.WORKER_STATE_LOST

    async def _before(self, name, request):
        if name in self.before:
            await self.before[name](request)

    def _target(self, worker_id):
        worker = self.workers[worker_id]
        return routing.Target(
            worker_id=worker_id,
            epoch=worker.epoch,
            url=worker.url,
            managed=worker.managed,
            headers={"X-data-parallel-rank": "0"},
        )

    def _session(self, key):
        if key.name:
            return self.sessions.setdefault(key.name, f"session-{len(self.sessions)}")
        for digest in key.history:
            if digest in self.histories:
                return self.histories[digest]
        return self.sessions.setdefault(object(), f"session-{len(self.sessions)}")

    async def Route(self, request):
        self.routes.append((caller().tenant_id, request))
        await self._before("Route", request)
        free = [
            [
                w
                for w in ids
                if w not in request.exclude_worker_ids
                and self.workers[w].state == routing.WORKER_STATE_READY
                and request.model in self.workers[w].served_models
            ]
            for ids in (self.prefills, self.decodes)
        ]
        prefills, decodes = free
        if not prefills and not decodes:
            raise NoWorker("no live worker")
        decode = (decodes or prefills)[0]
        ident = self._session(request.session)
        if request.request_id not in self.turns:
            self.turns[request.request_id] = (
                sum(1 for s, _ in self.turns.values() if s == ident) + 1
            )
            self.turns[request.request_id] = (ident, self.turns[request.request_id])
        turn = self.turns[request.request_id][1]
        tag = {"tenant": caller().tenant_id, "session": ident, "turn": turn}
        answer = routing.RouteResponse(
            session_id=ident,
            turn=turn,
            decode=self._target(decode),
            decision=routing.DECISION_RECOMPUTE,
            reason=routing.DECISION_REASON_NOTHING_HELD,
            decode_params=kv_params.from_dict({"kvplane": tag}),
        )
        others = [w for w in prefills if w != decode]
        if others and decodes:
            answer.prefill.CopyFrom(self._target(others[0]))
            if self.lease_next and not request.force_recompute:
                answer.decision = routing.DECISION_REUSE
                answer.reason = routing.DECISION_REASON_OWNER_HOLDS
                answer.held_tokens = 90
                answer.lease.CopyFrom(
                    lease.Lease(
                        lease_id=f"lease-{len(self.routes)}",
                        fencing_token=7,
                        holder=lease.Holder(worker_id=others[0], epoch=1),
                    )
                )
                answer.lease.ttl.FromSeconds(10)
                tag = {**tag, "lease_id": answer.lease.lease_id, "fencing_token": 7}
            answer.prefill_params.CopyFrom(
                kv_params.from_dict(
                    {"do_remote_decode": True, "do_remote_prefill": False, "kvplane": tag}
                )
            )
        return answer

    async def Complete(self, request):
        await self._before("Complete", request)
        self.completes.append(request.turn)
        if request.turn.outcome == session.TURN_OUTCOME_OK and request.turn.history_digest:
            self.histories[request.turn.history_digest] = request.turn.session_id
        return routing.CompleteResponse()

    async def ListWorkers(self, request):
        await self._before("ListWorkers", request)
        return routing.ListWorkersResponse(workers=list(self.workers.values()))

    async def RegisterWorker(self, request):
        self.registered.append(request)
        worker = routing.Worker()
        worker.CopyFrom(request.worker)
        worker.epoch, worker.state = 1, routing.WORKER_STATE_READY
        self.workers[worker.worker_id] = worker
        if worker.role != routing.WORKER_ROLE_DECODE:
            self.prefills.append(worker.worker_id)
        if worker.role != routing.WORKER_ROLE_PREFILL:
            self.decodes.append(worker.worker_id)
        return routing.RegisterWorkerResponse(worker=worker)

    async def GetWorker(self, request):
        if request.worker_id not in self.workers:
            raise NotFound("worker", request.worker_id)
        return routing.GetWorkerResponse(worker=self.workers[request.worker_id])

    async def Heartbeat(self, request):
        return routing.HeartbeatResponse(
            results=[
                routing.BeatResult(worker_id=b.worker_id, known=b.worker_id in self.workers)
                for b in request.beats
            ]
        )

    async def EndSession(self, request):
        await self._before("EndSession", request)
        self.ended.append((caller().tenant_id, request.name))
        return session.EndSessionResponse(session=session.Session(session_id="session-9"))

    async def GrantLease(self, request):
        self.grants.append(request)
        await self._before("GrantLease", request)
        answer = lease.GrantLeaseResponse()
        answer.lease.lease_id = f"granted-{len(self.grants)}"
        answer.lease.fencing_token = 1
        answer.lease.holder.CopyFrom(request.holder)
        answer.lease.ttl.FromSeconds(10)
        for report in reversed(self.reports):
            for own in report.ownerships:
                if own.params.remote_request_id == request.handle.request_id:
                    answer.ownership.CopyFrom(own)
                    return answer
        return answer

    async def ListOwnerships(self, request):
        self.listed.append(request)
        return lease.ListOwnershipsResponse(ownerships=self.owned)

    async def RevokeLease(self, request):
        self.revoked.append(request.lease_id)
        self.revokers.append(caller())
        return lease.RevokeLeaseResponse()

    async def ReleaseLeases(self, request):
        self.released.extend((r.lease_id, r.outcome) for r in request.releases)
        return lease.ReleaseLeasesResponse()

    async def RenewLeases(self, request):
        self.renewed.append(request)
        await self._before("RenewLeases", request)
        result = lease.RenewResult(lease_id=request.leases[0].lease_id, renewed=True)
        result.ttl.FromSeconds(10)
        return lease.RenewLeasesResponse(results=[result])

    async def BeginRead(self, request):
        self.begun.append(request)
        await self._before("BeginRead", request)
        answer = lease.BeginReadResponse(ownership=self.held)
        answer.lease.lease_id = request.lease_id
        answer.lease.ttl.FromSeconds(10)
        return answer

    async def ReportOwnership(self, request):
        self.reports.append(request)
        await self._before("ReportOwnership", request)
        return lease.ReportOwnershipResponse(ownerships=request.ownerships, anchor=77)

    async def ResolveApiKey(self, request):
        self.resolved += 1
        await self._before("ResolveApiKey", request)
        if request.secret not in self.keys:
            raise Unauthenticated("nobody's key")
        return tenant.ResolveApiKeyResponse(tenant_id=self.keys[request.secret])


class Bench:
    """A gateway in front of engines, and a client."""

    def __init__(self):
        self.control = Control()
        self.engines = {}
        self.gateway = None
        self.http = None
        self.url = ""

    async def engine(self, worker_id, role, *, managed=True, register=True):
        engine = Engine(worker_id, 5600 + len(self.engines))
        await engine.start()
        self.engines[worker_id] = engine
        if register:
            self.control.add(engine, role, managed=managed)
        return engine

    async def pair(self, **kwargs):
        prefill = await self.engine("prefill-0", routing.WORKER_ROLE_PREFILL, **kwargs)
        decode = await self.engine("decode-0", routing.WORKER_ROLE_DECODE, **kwargs)
        return prefill, decode

    async def start(self, **config):
        config.setdefault("refresh_interval_s", 0.05)
        # What goes on in the background is not waited for, once a test has seen what it wants.
        config.setdefault("drain_s", 0.5)
        control = self.control
        self.gateway = build(
            control, control, control, control, GatewayConfig(**config), tenants=control
        )
        port = await self.gateway.start("127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{port}"
        self.http = aiohttp.ClientSession(self.url)
        return self

    async def stop(self):
        if self.http is not None:
            await self.http.close()
        if self.gateway is not None:
            await self.gateway.stop()
        for engine in self.engines.values():
            await engine.stop()

    async def chat(self, messages=None, *, headers=None, **body):
        messages = messages or [{"role": "user", "content": "hi"}]
        body = {"model": MODEL, "messages": messages, **body}
        async with self.http.post("/v1/chat/completions", json=body, headers=headers) as response:
            return response.status, await response.read(), response.headers

    async def stream(self, **body):
        status, raw, _ = await self.chat(stream=True, **body)
        assert status == 200, raw
        return raw

    async def metric(self, name):
        async with self.http.get("/metrics") as response:
            text = await response.text()
        return sum(
            float(line.rpartition(" ")[2])
            for line in text.splitlines()
            if line.startswith(name) and not line.startswith("#")
        )


async def eventually(condition, seconds=2.0):
    """Wait until `condition()` holds."""
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110 - what is waited for tells nobody
            await asyncio.sleep(0.005)


def data_of(raw):
    """Return the JSON of a stream's events."""
    blocks = [block for block in raw.decode().split("\n\n") if block.startswith("data: ")]
    return [json.loads(block[6:]) for block in blocks if block != "data: [DONE]"]


@contextlib.asynccontextmanager
async def dropped(url, body, read=None, path="/v1/chat/completions"):
    """Open a raw connection, send a request; leaving the block drops the client."""
    host, port = url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    raw = json.dumps(body).encode()
    writer.write(
        f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(raw)}\r\n\r\n".encode()
        + raw
    )
    await writer.drain()
    try:
        yield reader
    finally:
        writer.transport.abort()
