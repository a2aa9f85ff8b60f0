"""RoutingService and WorkerService: check, call, answer. Infrastructure calls the latter."""

from typing import Any

from google.protobuf.duration_pb2 import Duration

from kvplane.api.routing.v1 import routing_pb2, routing_pb2_grpc
from kvplane.kernel import validate
from kvplane.kernel.context import Role, caller
from kvplane.kernel.errors import InvalidField
from kvplane.routing import codec
from kvplane.routing.registry import Registry
from kvplane.routing.service import Router


class RoutingServicer(routing_pb2_grpc.RoutingServiceServicer):
    """RoutingService of kvplane.api.routing.v1, for the caller's tenant."""

    def __init__(self, router: Router) -> None:
        self._router = router

    async def Route(
        self, request: routing_pb2.RouteRequest, context: Any = None
    ) -> routing_pb2.RouteResponse:
        """Decide where a turn goes. Raises InvalidField, NoWorker, Unavailable."""
        codec.check_route(request)
        return await self._router.route(caller().tenant_id, request)

    async def Complete(
        self, request: routing_pb2.CompleteRequest, context: Any = None
    ) -> routing_pb2.CompleteResponse:
        """Note how a turn went. Raises InvalidField, NotFound, Unavailable."""
        if not request.HasField("turn"):
            raise InvalidField("turn", "must be set")
        if codec.check_complete(request.turn):
            await self._router.complete(caller().tenant_id, request.turn)
        return routing_pb2.CompleteResponse()


class WorkerServicer(routing_pb2_grpc.WorkerServiceServicer):
    """WorkerService of kvplane.api.routing.v1."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry

    async def RegisterWorker(
        self, request: routing_pb2.RegisterWorkerRequest, context: Any = None
    ) -> routing_pb2.RegisterWorkerResponse:
        """Begin a worker's epoch. Raises InvalidField, AlreadyExists, Unavailable."""
        if not request.HasField("worker"):
            raise InvalidField("worker", "must be set")
        by_itself = Role.SERVICE not in caller().roles
        profile = codec.profile(request.worker, by_itself=by_itself)
        seen = codec.seen_epoch(request.worker)
        worker = await self._registry.register(profile, codec.instance_id(request), seen)
        interval = Duration()
        interval.FromMicroseconds(round(self._registry.heartbeat_interval_s * 1e6))
        return routing_pb2.RegisterWorkerResponse(
            worker=codec.worker_message(worker, 0), heartbeat_interval=interval
        )

    async def Heartbeat(
        self, request: routing_pb2.HeartbeatRequest, context: Any = None
    ) -> routing_pb2.HeartbeatResponse:
        """Note signs of life, item by item. Raises InvalidField, Unavailable."""
        beats = codec.beats(request)
        answers = await self._registry.beat(beats) if beats else []
        return routing_pb2.HeartbeatResponse(
            results=[
                routing_pb2.BeatResult(
                    worker_id=beat.worker_id,
                    known=answer.known,
                    state=codec.state_message(answer.state),
                )
                for beat, answer in zip(beats, answers, strict=True)
            ]
        )

    async def DrainWorker(
        self, request: routing_pb2.DrainWorkerRequest, context: Any = None
    ) -> routing_pb2.DrainWorkerResponse:
        """Take a worker out of service or back. Raises NotFound, IllegalTransition."""
        seen = await self._registry.drain(codec.worker_id(request.worker_id), undo=request.undo)
        return routing_pb2.DrainWorkerResponse(
            worker=codec.worker_message(seen.worker, seen.silent_us)
        )

    async def DeregisterWorker(
        self, request: routing_pb2.DeregisterWorkerRequest, context: Any = None
    ) -> routing_pb2.DeregisterWorkerResponse:
        """End a worker's epoch. Raises NotFound, StaleEpoch."""
        ident, epoch = codec.worker_id(request.worker_id), codec.epoch(request.epoch)
        await self._registry.deregister(ident, epoch)
        return routing_pb2.DeregisterWorkerResponse()

    async def GetWorker(
        self, request: routing_pb2.GetWorkerRequest, context: Any = None
    ) -> routing_pb2.GetWorkerResponse:
        """Show one. Raises NotFound."""
        seen = await self._registry.get(codec.worker_id(request.worker_id))
        return routing_pb2.GetWorkerResponse(
            worker=codec.worker_message(seen.worker, seen.silent_us)
        )

    async def ListWorkers(
        self, request: routing_pb2.ListWorkersRequest, context: Any = None
    ) -> routing_pb2.ListWorkersResponse:
        """Show a page, by worker id. Raises InvalidField."""
        size = validate.page_size(request.page_size)
        start = codec.page_start(request.page_token)
        found = await self._registry.page(codec.worker_filter(request), start, size + 1)
        shown = found[:size]
        return routing_pb2.ListWorkersResponse(
            workers=[codec.worker_message(seen.worker, seen.silent_us) for seen in shown],
            next_page_token=codec.page_token(shown[-1].worker.worker_id)
            if len(found) > size
            else "",
        )
