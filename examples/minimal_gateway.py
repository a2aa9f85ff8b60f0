"""A gateway in under 100 lines: what it takes to use kvplane from a server of your own.

    python examples/minimal_gateway.py 127.0.0.1:7700 8080

A turn is Route, a prefill, a decode, Complete. See kvplane.gateway for all the rest.
"""

import asyncio
import json
import sys
import uuid

import aiohttp
from aiohttp import web
from kvplane.client import KvplaneClient, kv_params, routing, session

PATH = "/v1/chat/completions"


class MinimalGateway:
    """Chat completions over a prefill and a decode, with KV reuse for named sessions."""

    def __init__(self, kvplane: KvplaneClient, http: aiohttp.ClientSession) -> None:
        self.kvplane, self.http = kvplane, http

    async def chat(self, client: web.Request) -> web.StreamResponse:
        """Answer POST /v1/chat/completions."""
        body = await client.json()
        body.pop("kv_transfer_params", None)  # never a client's to choose
        request_id = f"req-{uuid.uuid4().hex}"
        plan = await self.kvplane.routing.Route(
            routing.RouteRequest(
                request_id=request_id,
                session=session.SessionKey(name=client.headers.get("X-Session-Id", request_id)),
                model=body["model"],
            )
        )
        turn = session.CompleteTurnRequest(
            session_id=plan.session_id,
            turn=plan.turn,
            outcome=session.TURN_OUTCOME_FAILED,
            prefill_worker_id=plan.prefill.worker_id,
            decode_worker_id=plan.decode.worker_id,
        )
        try:
            handle = await self.prefill(plan, body, request_id)
            params = {**handle, **kv_params.to_dict(plan.decode_params)}
            answer = await self.decode(plan.decode, {**body, "kv_transfer_params": params}, client)
            if answer.status == 200:
                turn.outcome = session.TURN_OUTCOME_OK
        finally:  # before the answer's end: the client's next turn may come at once
            await self.kvplane.routing.Complete(routing.CompleteRequest(turn=turn))
        await answer.write_eof()
        return answer

    async def prefill(self, plan: routing.RouteResponse, body: dict, request_id: str) -> dict:
        """Compute or read the prompt's KV; return the handle for the decode."""
        if not plan.HasField("prefill"):
            return {}
        dropped = ("stream_options", "max_completion_tokens", "min_tokens", "stop")
        one_token = {key: value for key, value in body.items() if key not in dropped}
        one_token |= {"stream": False, "max_tokens": 1, "n": 1}
        one_token["kv_transfer_params"] = kv_params.to_dict(plan.prefill_params)
        headers = {"X-Request-Id": request_id, **plan.prefill.headers}
        async with self.http.post(plan.prefill.url + PATH, json=one_token, headers=headers) as r:
            r.raise_for_status()
            return (await r.json()).get("kv_transfer_params") or {}

    async def decode(
        self, to: routing.Target, body: dict, client: web.Request
    ) -> web.StreamResponse:
        """Forward the decode's answer, line by line, without its handle."""
        async with self.http.post(to.url + PATH, json=body, headers=dict(to.headers)) as r:
            answer = web.StreamResponse(status=r.status, headers={"Content-Type": r.content_type})
            await answer.prepare(client)
            async for line in r.content:
                if b'"kv_transfer_params"' in line:
                    head = b"data: " if line.startswith(b"data: ") else b""
                    value = json.loads(line[len(head) :])
                    del value["kv_transfer_params"]
                    line = head + json.dumps(value).encode() + b"\n"  # noqa: PLW2901
                await answer.write(line)
            return answer


async def main(control_plane: str, port: int) -> None:
    """Serve until the process ends."""
    http = aiohttp.ClientSession(read_bufsize=1 << 22)  # a line of an answer may be long
    async with KvplaneClient(control_plane) as kvplane, http:
        app = web.Application(client_max_size=1 << 25)
        app.router.add_post(PATH, MinimalGateway(kvplane, http).chat)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", port).start()
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2])))
