"""Conversations through the gateways, each reply compared with a run without reuse."""

import asyncio
import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
from demo import text
from e2e.waiting import eventually
from kvplane.api.session.v1 import session_pb2 as session
from kvplane.kernel.errors import NotFound

from faults.plane import MODEL, Plane

_WORDS = " ".join(text.read(name) for name in text.NAMES).split()
_TURNS = 6
# Reuse begins again within so many seconds: a grace, reconnections, and two turns.
_BACK = 40
_numbers = itertools.count()


@dataclass(frozen=True)
class Said:
    """One turn that was answered, and is right."""

    speaker: int
    began: float
    seconds: float
    cached_tokens: int


@dataclass
class Talk:
    """Several people who talk without a pause, each in one conversation after another."""

    plane: Plane
    # Seconds that an answer may take.
    bound: float
    # Seconds after which a client turns to another gateway; None: it does not.
    patience: float | None = None
    said: list[Said] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    over: bool = False

    async def speak(self, http: httpx.AsyncClient, speaker: int) -> None:
        """Talk until it is over."""
        while not self.over:
            name = f"conversation-{next(_numbers)}"
            self.names.append(name)
            messages: list[dict[str, Any]] = []
            for turn in range(_TURNS):
                if self.over:
                    return
                content = _words(len(self.names) * 97 + turn * 31, 30 if turn else 150)
                messages.append({"role": "user", "content": content})
                reply = await self.turn(http, speaker, name, messages)
                messages.append({"role": "assistant", "content": reply})

    async def turn(
        self, http: httpx.AsyncClient, speaker: int, name: str, messages: list[dict[str, Any]]
    ) -> str:
        """Send a conversation that ends with the user; return the answer, which is right."""
        if name not in self.names:
            self.names.append(name)
        loop = asyncio.get_running_loop()
        body = {"model": MODEL, "messages": messages, "max_tokens": 16, "temperature": 0}
        began = loop.time()
        try:
            async with asyncio.timeout(self.bound):
                answer = await self._post(http, speaker, name, body)
        except TimeoutError:
            raise AssertionError(f"no answer to {name} within {self.bound:g} s") from None
        seconds = loop.time() - began
        assert answer.status_code == 200, answer.text
        got = answer.json()
        right = await http.post(f"{self.plane.oracle.url}/v1/chat/completions", json=body)
        wanted: str = right.json()["choices"][0]["message"]["content"]
        assert got["choices"][0]["message"]["content"] == wanted, f"wrong text in {name}"
        cached = got["usage"]["prompt_tokens_details"]["cached_tokens"]
        self.said.append(Said(speaker, began, seconds, cached))
        return wanted

    async def _post(
        self, http: httpx.AsyncClient, speaker: int, name: str, body: dict[str, Any]
    ) -> httpx.Response:
        for gateway in itertools.count(speaker):
            url = f"{self.plane.gateway(gateway)}/v1/chat/completions"
            try:
                return await http.post(
                    url, json=body, headers={"x-session-id": name}, timeout=self.patience
                )
            except httpx.TransportError:
                if self.patience is None:
                    raise
                await asyncio.sleep(0.05)
        raise AssertionError

    async def reuse(self, seconds: float, speakers: int) -> None:
        """Wait until everybody has read in a turn that begins from now on."""
        since = asyncio.get_running_loop().time()

        async def all_read() -> bool:
            reading = {s.speaker for s in self.said if s.began >= since and s.cached_tokens}
            return len(reading) == speakers

        try:
            await eventually(all_read, seconds)
        except AssertionError:
            turns = [s for s in self.said if s.began >= since]
            raise AssertionError(f"not everybody reads within {seconds:g} s: {turns}") from None

    async def end(self) -> None:
        """End all sessions. One that no service has heard of is none."""
        async with self.plane.client() as client:
            for name in self.names:
                try:
                    await client.sessions.EndSession(session.EndSessionRequest(name=name))
                except NotFound:
                    continue


@dataclass
class Running:
    """A talk that is going on."""

    talk: Talk
    speakers: int

    async def reuse_is_back(self) -> None:
        """Wait until everybody reads again."""
        await self.talk.reuse(_BACK, self.speakers)


@asynccontextmanager
async def talking(
    plane: Plane,
    *,
    bound: float,
    patience: float | None = None,
    speakers: int = 3,
    held: float = 8,
) -> AsyncIterator[Running]:
    """Keep conversations running around a fault.

    They reuse before it begins. Afterwards the sessions end, and nothing stays held for
    longer than `held` seconds: the registry tries again after 5 when it could not free.
    """
    talk = Talk(plane, bound, patience)
    async with httpx.AsyncClient(timeout=60) as http, asyncio.TaskGroup() as group:
        for speaker in range(speakers):
            group.create_task(talk.speak(http, speaker))
        await talk.reuse(_BACK, speakers)
        yield Running(talk, speakers)
        talk.over = True
    await talk.end()
    await plane.nothing_held(held)


def _words(start: int, count: int) -> str:
    return " ".join(_WORDS[(start + i) % len(_WORDS)] for i in range(count))
