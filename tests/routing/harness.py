"""Replicas of routing over one database, and short names for what tests do with them."""

import json
from dataclasses import dataclass, field

from kvplane.api.lease.v1 import lease_pb2
from kvplane.api.routing.v1 import routing_pb2 as pb
from kvplane.api.session.v1 import session_pb2
from kvplane.db.database import Database
from kvplane.kernel.clock import Clock
from kvplane.routing.domain import RoutingConfig
from kvplane.routing.main import RoutingPart, build
from routing.fakes import PREFILL, FakeLeases, FakeSessions, beat, worker_message
from sqlalchemy import text


@dataclass
class Plane:
    """Replicas of routing over one database."""

    url: str
    clock: Clock
    leases: FakeLeases = field(default_factory=FakeLeases)
    sessions: FakeSessions = field(default_factory=FakeSessions)
    databases: list[Database] = field(default_factory=list)

    def replica(self, config: RoutingConfig | None = None) -> RoutingPart:
        database = Database(self.url, self.clock)
        self.databases.append(database)
        return build(database, self.clock, self.leases, self.sessions, config)

    async def execute(self, statement: str, **parameters: object) -> list[tuple]:
        def operation(tx):
            result = tx.connection.execute(text(statement), parameters)
            return [tuple(row) for row in result] if result.returns_rows else []

        return await self.databases[0].run(operation)


@dataclass
class One:
    """One replica, and short names for what tests do with it."""

    plane: Plane
    part: RoutingPart

    @property
    def leases(self) -> FakeLeases:
        return self.plane.leases

    @property
    def sessions(self) -> FakeSessions:
        return self.plane.sessions

    async def register(self, worker_id: str, *, instance: str = "i1", **fields) -> pb.Worker:
        request = pb.RegisterWorkerRequest(
            worker=worker_message(worker_id, **fields), instance_id=instance
        )
        return (await self.part.worker_servicer.RegisterWorker(request)).worker

    async def beat(self, *beats: pb.WorkerBeat) -> list[pb.BeatResult]:
        request = pb.HeartbeatRequest(beats=beats)
        return list((await self.part.worker_servicer.Heartbeat(request)).results)

    async def load(self, worker_id: str, running: int, epoch: int = 1) -> None:
        assert (await self.beat(beat(worker_id, epoch, running=running)))[0].known

    async def get(self, worker_id: str) -> pb.Worker:
        request = pb.GetWorkerRequest(worker_id=worker_id)
        return (await self.part.worker_servicer.GetWorker(request)).worker

    async def drain(self, worker_id: str, *, undo: bool = False) -> pb.Worker:
        request = pb.DrainWorkerRequest(worker_id=worker_id, undo=undo)
        return (await self.part.worker_servicer.DrainWorker(request)).worker

    async def deregister(self, worker_id: str, epoch: int = 1) -> None:
        request = pb.DeregisterWorkerRequest(worker_id=worker_id, epoch=epoch)
        await self.part.worker_servicer.DeregisterWorker(request)

    async def route(
        self, request_id: str, session: str = "s", *, model: str = "m", **fields
    ) -> pb.RouteResponse:
        key = session_pb2.SessionKey(name=session)
        request = pb.RouteRequest(request_id=request_id, session=key, model=model, **fields)
        return await self.part.routing_servicer.Route(request)

    async def complete(self, answer: pb.RouteResponse, **fields) -> None:
        turn = session_pb2.CompleteTurnRequest(
            session_id=answer.session_id,
            turn=answer.turn,
            outcome=session_pb2.TURN_OUTCOME_OK,
            prefill_worker_id=answer.prefill.worker_id,
            decode_worker_id=answer.decode.worker_id,
            **fields,
        )
        await self.part.routing_servicer.Complete(pb.CompleteRequest(turn=turn))

    async def turn(self, request_id: str, session: str = "s", **fields) -> pb.RouteResponse:
        """Route and complete; the decode worker then holds the session's blocks."""
        answer = await self.route(request_id, session, **fields)
        await self.complete(answer)
        if answer.decode.worker_id:
            self.leases.hold(answer.session_id, answer.decode.worker_id, answer.decode.epoch)
        return answer


REUSE, RECOMPUTE = pb.DECISION_REUSE, pb.DECISION_RECOMPUTE


def tag(params: lease_pb2.KvTransferParams) -> dict:
    extra = json.loads(params.extra_json)
    assert list(extra) == ["kvplane"]
    return extra["kvplane"]


async def pair(one: One, **prefill) -> None:
    await one.register("p", **{**PREFILL, **prefill})
    await one.register("d")


def reason(answer: pb.RouteResponse) -> str:
    return pb.DecisionReason.Name(answer.reason).removeprefix("DECISION_REASON_")
