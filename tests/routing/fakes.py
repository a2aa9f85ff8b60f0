"""A lease service and a session registry just good enough for Route, that can be broken."""

import asyncio
import itertools
from collections.abc import Callable
from dataclasses import dataclass

from kvplane.api.lease.v1 import lease_pb2
from kvplane.api.routing.v1 import routing_pb2
from kvplane.api.session.v1 import session_pb2
from kvplane.kernel.context import caller
from kvplane.kernel.errors import NotFound, Unavailable


def worker_message(worker_id: str, **fields) -> routing_pb2.Worker:
    """A bidirectional, managed decode worker of model `m`, unless `fields` say otherwise."""
    compatibility = {
        "model": "m",
        "revision": "r1",
        "block_size": 16,
        "kv_layout": "NHD",
        "kv_dtype": "float32",
        "engine_version": "1",
        **fields.pop("compatibility", {}),
    }
    values = {
        "role": routing_pb2.WORKER_ROLE_DECODE,
        "url": "http://127.0.0.1:8100",
        "kv_host": "127.0.0.1",
        "kv_port": 5600,
        "engine_id": f"engine-{worker_id}",
        "bidirectional": True,
        "managed": True,
        "max_model_len": 4096,
        **fields,
    }
    return routing_pb2.Worker(
        worker_id=worker_id,
        compatibility=routing_pb2.Compatibility(**compatibility),
        **values,
    )


PREFILL = {"role": routing_pb2.WORKER_ROLE_PREFILL}
BOTH = {"role": routing_pb2.WORKER_ROLE_BOTH}


def beat(worker_id: str, epoch: int = 1, **load) -> routing_pb2.WorkerBeat:
    return routing_pb2.WorkerBeat(worker_id=worker_id, epoch=epoch, load=routing_pb2.Load(**load))


class Breakable:
    """Every call can be made to fail, or never to return."""

    def __init__(self) -> None:
        self.error: Exception | None = None
        self.hangs = False
        self.resume = asyncio.Event()

    async def _answer(self) -> None:
        if self.hangs:
            await self.resume.wait()
        if self.error is not None:
            raise self.error

    def go_away(self) -> None:
        self.error = Unavailable("gone")


@dataclass
class Held:
    owner: str
    epoch: int
    tokens: int
    refusal: int = 0
    side_channel: tuple[str, int] = ("127.0.0.1", 5600)
    # Empty: its own, as `worker_message` has it.
    engine_id: str = ""


class FakeLeases(Breakable):
    """Grants what `hold` put there, once; remembers everything that was asked."""

    def __init__(self) -> None:
        super().__init__()
        self.held: dict[str, Held] = {}
        self.grants: list[lease_pb2.GrantLeaseRequest] = []
        self.releases: list[tuple[str, int]] = []
        self.ended: list[tuple[str, int]] = []
        self.live: dict[str, str] = {}
        self.before_grant: Callable[[], None] = lambda: None
        self._numbers = itertools.count(1)

    def hold(self, session_id: str, owner: str, epoch: int = 1, tokens: int = 300) -> None:
        self.held[session_id] = Held(owner, epoch, tokens)

    def refuse(self, session_id: str, reason: int) -> None:
        self.held[session_id] = Held("", 0, 0, reason)

    async def GrantLease(self, request, /):
        self.grants.append(request)
        self.before_grant()
        await self._answer()
        held = self.held.get(request.session_id)
        if held is None:
            return lease_pb2.GrantLeaseResponse(refusal_reason=lease_pb2.REFUSAL_REASON_NOT_HELD)
        if held.refusal:
            return lease_pb2.GrantLeaseResponse(refusal_reason=held.refusal)
        if request.session_id in self.live.values():
            return lease_pb2.GrantLeaseResponse(
                refusal_reason=lease_pb2.REFUSAL_REASON_ALREADY_LEASED
            )
        number = next(self._numbers)
        lease = lease_pb2.Lease(
            lease_id=f"lease-{number}",
            fencing_token=number,
            ownership_id=f"own-{request.session_id}",
            tenant_id=caller().tenant_id,
            session_id=request.session_id,
            holder=request.holder,
            state=lease_pb2.LEASE_STATE_GRANTED,
        )
        lease.ttl.FromSeconds(10)
        self.live[lease.lease_id] = request.session_id
        owned = lease_pb2.Ownership(worker_id=held.owner, epoch=held.epoch, num_tokens=held.tokens)
        owned.params.remote_engine_id = held.engine_id or f"engine-{held.owner}"
        owned.params.remote_host, owned.params.remote_port = held.side_channel
        return lease_pb2.GrantLeaseResponse(lease=lease, ownership=owned)

    async def ReleaseLeases(self, request, /):
        await self._answer()
        for item in request.releases:
            self.releases.append((item.lease_id, item.outcome))
            self.live.pop(item.lease_id, None)
        return lease_pb2.ReleaseLeasesResponse()

    async def EndWorkerEpoch(self, request, /):
        await self._answer()
        self.ended.append((request.worker_id, request.current_epoch))
        return lease_pb2.EndWorkerEpochResponse()


class FakeSessions(Breakable):
    """Sessions by tenant and name; turns by request id."""

    def __init__(self) -> None:
        super().__init__()
        self.begun: list[session_pb2.BeginTurnRequest] = []
        self.completed: list[session_pb2.CompleteTurnRequest] = []
        # The soft limit that everybody is beyond.
        self.over_quota = ""
        self._turns: dict[tuple[str, str], session_pb2.BeginTurnResponse] = {}
        self._sessions: dict[tuple[str, str], session_pb2.Session] = {}
        self._well: dict[str, bool] = {}

    async def BeginTurn(self, request, /):
        self.begun.append(request)
        await self._answer()
        if self.over_quota:
            return session_pb2.BeginTurnResponse(over_quota=self.over_quota)
        tenant = caller().tenant_id
        known = self._turns.get((tenant, request.request_id))
        if known is not None:
            return known
        ident = f"session-{tenant}-{request.key.name}"
        session = self._sessions.setdefault(
            (tenant, request.key.name), session_pb2.Session(session_id=ident)
        )
        session.turns += 1
        answer = session_pb2.BeginTurnResponse(
            session=session,
            turn=session.turns,
            previous_completed=self._well.get(ident, False),
        )
        self._turns[tenant, request.request_id] = answer
        return answer

    async def CompleteTurn(self, request, /):
        await self._answer()
        self.completed.append(request)
        if request.request_id:
            return session_pb2.CompleteTurnResponse()
        for (tenant, _), session in self._sessions.items():
            if session.session_id == request.session_id and tenant == caller().tenant_id:
                session.last_decode_worker_id = request.decode_worker_id
                self._well[session.session_id] = True
                return session_pb2.CompleteTurnResponse(session=session)
        raise NotFound("session", request.session_id)
