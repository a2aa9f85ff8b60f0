"""A client of the gateway's OpenAI API."""

import asyncio
import json
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from fleet.oracle import Oracle, text_of


class Wrong(AssertionError):
    """An answer is not the one of a run without reuse."""


@dataclass
class Reply:
    """What a client got."""

    texts: list[str]
    # Empty where the client did not ask for them.
    ids: list[list[int]]
    headers: dict[str, str]
    usage: dict[str, Any]

    @property
    def reused(self) -> int:
        """Prompt tokens that the prefill read."""
        return int(self.headers["x-kvplane-reused-tokens"])

    @property
    def decision(self) -> str:
        """What Route said: `reuse` or `recompute`, and why."""
        return self.headers["x-kvplane-decision"]

    @property
    def reason(self) -> str:
        """Why."""
        return self.decision.partition("reason=")[2]

    @property
    def session_id(self) -> str:
        """The session in the control plane."""
        return self.headers.get("x-kvplane-session-id", "")


@dataclass
class Client:
    """One tenant's client. Each answer is compared with the oracle's."""

    http: aiohttp.ClientSession
    key: str
    gateways: list[str]
    oracles: dict[str, Oracle] = field(default_factory=dict)

    def expected(self, body: dict[str, Any]) -> list[int]:
        """Return the tokens of a run without reuse."""
        return self.oracles.setdefault(body["model"], Oracle(body["model"])).answer(body)

    def headers(self, session: str | None) -> dict[str, str]:
        """Return a request's headers."""
        named = {"x-session-id": session} if session is not None else {}
        return {"authorization": f"Bearer {self.key}", **named}

    async def ask(
        self,
        body: dict[str, Any],
        session: str | None = None,
        *,
        gateway: int = 0,
        request_id: str = "",
    ) -> Reply:
        """Send a request and prove its answer."""
        headers = self.headers(session)
        if request_id:
            headers["x-request-id"] = request_id
        path = "chat/completions" if "messages" in body else "completions"
        url = f"{self.gateways[gateway]}/v1/{path}"
        async with self.http.post(url, json=body, headers=headers) as answer:
            raw = await answer.read()
            assert answer.status == 200, raw
            found = {name.lower(): value for name, value in answer.headers.items()}
        assert b"kv_transfer_params" not in raw.replace(b'"kv_transfer_params":null', b"")
        reply = _streamed(raw, found) if body.get("stream") else _whole(json.loads(raw), found)
        self._prove(body, reply)
        return reply

    def _prove(self, body: dict[str, Any], reply: Reply) -> None:
        wanted = self.expected(body)
        if len(reply.texts) != body.get("n", 1):
            raise Wrong(f"{len(reply.texts)} choices")
        for text in reply.texts:
            if text != text_of(wanted):
                raise Wrong(f"{reply.headers}: {text!r} is not {text_of(wanted)!r}")
        if bool(reply.ids) != bool(body.get("return_token_ids")):
            raise Wrong("token ids that were not asked for, or none that were")
        for ids in reply.ids:
            if ids != wanted:
                raise Wrong(f"{reply.headers}: {ids} are not {wanted}")

    async def leave(
        self,
        body: dict[str, Any],
        session: str | None = None,
        *,
        when: asyncio.Event | None = None,
        after: float = 0.0,
        gateway: int = 0,
    ) -> bool:
        """Send a request and drop the connection; False when the answer was quicker."""
        path = "chat/completions" if "messages" in body else "completions"
        url = f"{self.gateways[gateway]}/v1/{path}"

        async def send() -> None:
            async with self.http.post(url, json=body, headers=self.headers(session)) as answer:
                await answer.read()

        sending = asyncio.create_task(send())
        waiting = asyncio.create_task(when.wait() if when is not None else asyncio.sleep(after))
        await asyncio.wait({sending, waiting}, return_when=asyncio.FIRST_COMPLETED)
        left = not sending.done()
        for task in (sending, waiting):
            task.cancel()
        await asyncio.gather(sending, waiting, return_exceptions=True)
        return left


def _whole(body: dict[str, Any], headers: dict[str, str]) -> Reply:
    choices = sorted(body["choices"], key=lambda choice: choice["index"])
    texts = [
        choice["message"]["content"] if "message" in choice else choice["text"]
        for choice in choices
    ]
    ids = [choice["token_ids"] for choice in choices if choice.get("token_ids") is not None]
    return Reply(texts, ids, headers, body["usage"])


def _streamed(raw: bytes, headers: dict[str, str]) -> Reply:
    texts: dict[int, str] = {}
    ids: dict[int, list[int]] = {}
    usage: dict[str, Any] = {}
    events = [line[6:] for line in raw.decode().splitlines() if line.startswith("data: ")]
    assert events[-1] == "[DONE]", raw
    for event in map(json.loads, events[:-1]):
        assert "error" not in event, event
        usage = event.get("usage") or usage
        for choice in event["choices"]:
            index = choice["index"]
            text = choice["delta"].get("content") if "delta" in choice else choice["text"]
            texts[index] = texts.get(index, "") + (text or "")
            if choice.get("token_ids") is not None:
                ids.setdefault(index, []).extend(choice["token_ids"])
    return Reply([texts[i] for i in sorted(texts)], [ids[i] for i in sorted(ids)], headers, usage)
