"""A control plane of one page, served over real gRPC in a thread: enough for an agent.

It keeps what the agent says and does what a test tells it: hang, refuse, end epochs.
"""

import asyncio
import threading
from concurrent.futures import Future
from typing import Any

import grpc
from google.protobuf.duration_pb2 import Duration
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status
from kvplane.api.lease.v1 import lease_pb2 as lease
from kvplane.api.lease.v1 import lease_pb2_grpc
from kvplane.api.routing.v1 import routing_pb2 as routing
from kvplane.api.routing.v1 import routing_pb2_grpc
from kvplane.kernel.clock import SystemClock
from kvplane.kernel.errors import KvplaneError, NotFound, StaleEpoch, StaleFencingToken
from kvplane.kernel.ids import derived

HELD, LEASED = lease.OWNERSHIP_STATE_HELD, lease.OWNERSHIP_STATE_LEASED


def seconds(value: float) -> Duration:
    return Duration(seconds=int(value), nanos=int(value % 1 * 1e9))


class Plane(lease_pb2_grpc.LeaseServiceServicer, routing_pb2_grpc.WorkerServiceServicer):
    """What a test sees and sets. All of it is touched by the server's loop only."""

    def __init__(self, *, ttl: float = 10.0, tick: float = 0.2) -> None:
        self.ttl, self.tick = ttl, tick
        self.clock = SystemClock()
        self.owned: dict[tuple[str, str], lease.Ownership] = {}
        self.leases: dict[str, lease.Lease] = {}
        self.released: dict[str, int] = {}
        self.workers: dict[str, routing.Worker] = {}
        self.instances: dict[str, str] = {}
        self.epochs: dict[str, int] = {}
        self.beats: dict[str, routing.Load] = {}
        self.acks: list[lease.CommandAck] = []
        self.hellos: list[lease.Hello] = []
        self.reports: list[lease.Report] = []
        self.withdrawn: list[str] = []
        self.calls: dict[str, int] = {}
        self.hang: set[str] = set()  # names of calls that never answer
        self.fail: dict[str, KvplaneError] = {}
        self.renewals: lease.RenewResult | None = None  # an answer for all of them
        self._streams: dict[str, asyncio.Queue[lease.ConnectResponse]] = {}
        self._tokens = 0

    async def _called(self, name: str, context: Any) -> None:
        self.calls[name] = self.calls.get(name, 0) + 1
        while name in self.hang:
            await self.clock.sleep(0.01)
        if name in self.fail:
            await refuse(context, self.fail[name])

    # -- workers ------------------------------------------------------------------

    async def RegisterWorker(self, request: Any, context: Any) -> routing.RegisterWorkerResponse:
        await self._called("RegisterWorker", context)
        ident = request.worker.worker_id
        known = self.instances.get(ident) == request.instance_id
        if not known or ident not in self.workers:
            self.epochs[ident] = self.epochs.get(ident, 0) + 1
        self.instances[ident] = request.instance_id
        worker = routing.Worker()
        worker.CopyFrom(request.worker)
        worker.epoch = self.epochs[ident]
        self.workers[ident] = worker
        return routing.RegisterWorkerResponse(worker=worker, heartbeat_interval=seconds(0.2))

    async def Heartbeat(self, request: Any, context: Any) -> routing.HeartbeatResponse:
        await self._called("Heartbeat", context)
        response = routing.HeartbeatResponse()
        for beat in request.beats:
            known = beat.worker_id in self.workers
            self.beats[beat.worker_id] = beat.load
            response.results.add(worker_id=beat.worker_id, known=known)
        return response

    async def DeregisterWorker(self, request: Any, context: Any) -> Any:
        await self._called("DeregisterWorker", context)
        self.workers.pop(request.worker_id, None)
        return routing.DeregisterWorkerResponse()

    # -- ownership ----------------------------------------------------------------

    async def Connect(self, requests: Any, context: Any) -> Any:
        await self._called("Connect", context)
        hello = (await anext(aiter(requests))).hello
        if hello.epoch != self.epochs.get(hello.worker_id):
            await refuse(context, StaleEpoch(hello.worker_id, hello.epoch))
        self.hellos.append(hello)
        named = {(h.engine_id, h.request_id) for h in hello.held}
        for key, owned in self.owned.items():
            if owned.worker_id == hello.worker_id and key not in named:
                owned.state = lease.OWNERSHIP_STATE_EXPIRED
        out = self._streams[hello.worker_id] = asyncio.Queue()
        reader = asyncio.create_task(self._read(hello, requests, out))
        try:
            await self._called("Welcome", context)
            yield lease.ConnectResponse(
                welcome=lease.Welcome(anchor=self.clock.now_us(), tick_interval=seconds(self.tick))
            )
            while not reader.done():
                try:
                    async with asyncio.timeout(self.tick):
                        message = await out.get()
                except TimeoutError:
                    message = lease.ConnectResponse(tick=lease.Tick(anchor=self.clock.now_us()))
                if "Tick" not in self.hang:
                    yield message
        finally:
            reader.cancel()

    async def _read(self, hello: Any, requests: Any, out: Any) -> None:
        async for message in requests:
            kind = message.WhichOneof("message")
            if kind == "report":
                self.reports.append(message.report)
                for owned in message.report.ownerships:
                    self._own(owned)
                sequence = message.report.sequence
            elif kind == "withdraw":
                for handle in message.withdraw.handles:
                    self.withdrawn.append(handle.request_id)
                    owned = self.owned.get((handle.engine_id, handle.request_id))
                    if owned is not None:
                        owned.state = lease.OWNERSHIP_STATE_CONSUMED
                sequence = message.withdraw.sequence
            else:
                self.acks.append(message.command_ack)
                continue
            out.put_nowait(
                lease.ConnectResponse(acknowledged=lease.Acknowledged(sequence=sequence))
            )

    def _own(self, reported: lease.Ownership) -> None:
        key = (reported.params.remote_engine_id, reported.params.remote_request_id)
        if key in self.owned:
            self.owned[key].hold.CopyFrom(reported.hold)
            return
        owned = lease.Ownership()
        owned.CopyFrom(reported)
        owned.ownership_id, owned.state = derived("own", *key), HELD
        self.owned[key] = owned

    def order(self, worker_id: str, command: lease.Command) -> None:
        """Send a command down a worker's stream."""
        self._streams[worker_id].put_nowait(lease.ConnectResponse(command=command))

    # -- leases -------------------------------------------------------------------

    def grant(self, owned: lease.Ownership, holder: lease.Holder, *, read: bool) -> lease.Lease:
        self._tokens += 1
        granted = lease.Lease(
            lease_id=f"lease-{self._tokens}",
            fencing_token=self._tokens,
            ownership_id=owned.ownership_id,
            tenant_id=owned.tenant_id,
            session_id=owned.session_id,
            holder=holder,
            state=lease.LEASE_STATE_READING if read else lease.LEASE_STATE_GRANTED,
            ttl=seconds(self.ttl),
        )
        owned.state = LEASED
        self.leases[granted.lease_id] = granted
        return granted

    def best(self, session_id: str) -> lease.Ownership | None:
        found = [
            o
            for o in self.owned.values()
            if o.session_id == session_id and not o.for_decode and o.state == HELD
        ]
        return max(found, key=lambda o: o.turn) if found else None

    async def GrantLease(self, request: Any, context: Any) -> lease.GrantLeaseResponse:
        await self._called("GrantLease", context)
        key = (request.handle.engine_id, request.handle.request_id)
        end = self.clock.monotonic() + request.wait.nanos / 1e9 + request.wait.seconds
        while key not in self.owned and self.clock.monotonic() < end:
            await self.clock.sleep(0.005)
        owned = self.owned.get(key)
        if owned is None or owned.state != HELD:
            reason = (
                lease.REFUSAL_REASON_ALREADY_LEASED
                if owned is not None and owned.state == LEASED
                else lease.REFUSAL_REASON_NOT_HELD
            )
            return lease.GrantLeaseResponse(refusal_reason=reason)
        granted = self.grant(owned, request.holder, read=request.begin_read)
        return lease.GrantLeaseResponse(lease=granted, ownership=owned)

    async def BeginRead(self, request: Any, context: Any) -> lease.BeginReadResponse:
        await self._called("BeginRead", context)
        found = self.leases.get(request.lease_id)
        if found is None:
            await refuse(context, NotFound("lease", request.lease_id))
        if found.fencing_token != request.fencing_token:
            await refuse(context, StaleFencingToken(request.lease_id))
        found.state = lease.LEASE_STATE_READING
        owned = next(o for o in self.owned.values() if o.ownership_id == found.ownership_id)
        return lease.BeginReadResponse(lease=found, ownership=owned)

    async def RenewLeases(self, request: Any, context: Any) -> lease.RenewLeasesResponse:
        await self._called("RenewLeases", context)
        response = lease.RenewLeasesResponse()
        for ref in request.leases:
            result = response.results.add(
                lease_id=ref.lease_id, renewed=True, ttl=seconds(self.ttl)
            )
            if self.renewals is not None:
                result.CopyFrom(self.renewals)
                result.lease_id = ref.lease_id
        return response

    async def ReleaseLeases(self, request: Any, context: Any) -> lease.ReleaseLeasesResponse:
        await self._called("ReleaseLeases", context)
        response = lease.ReleaseLeasesResponse()
        for release in request.releases:
            self.released[release.lease_id] = release.outcome
            found = self.leases.get(release.lease_id)
            unused = release.outcome == lease.READ_OUTCOME_UNUSED
            for owned in self.owned.values():
                if found is not None and owned.ownership_id == found.ownership_id:
                    owned.state = HELD if unused else lease.OWNERSHIP_STATE_CONSUMED
            response.results.add(lease_id=release.lease_id)
        return response


async def refuse(context: Any, error: KvplaneError) -> None:
    """End the call as the services do."""
    code = getattr(grpc.StatusCode, error.code)
    info = error_details_pb2.ErrorInfo(
        reason=error.reason, domain="kvplane", metadata=error.metadata
    )
    status = status_pb2.Status(code=code.value[0], message=error.message)
    status.details.add().Pack(info)
    await context.abort_with_status(rpc_status.to_status(status))


class PlaneThread:
    """A plane on a port, in a thread of its own; it may die and come back."""

    def __init__(self, plane: Plane) -> None:
        self.plane = plane
        self.port = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event | None = None
        self._thread: threading.Thread | None = None

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def start(self) -> "PlaneThread":
        up: Future[int] = Future()
        self._thread = threading.Thread(
            target=lambda: asyncio.run(self._main(up)), daemon=True, name="plane"
        )
        self._thread.start()
        self.port = up.result(10)
        return self

    def stop(self) -> None:
        assert self._loop is not None
        assert self._stop is not None
        assert self._thread is not None
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(10)

    async def _main(self, up: "Future[int]") -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
        lease_pb2_grpc.add_LeaseServiceServicer_to_server(self.plane, server)
        routing_pb2_grpc.add_WorkerServiceServicer_to_server(self.plane, server)
        port = server.add_insecure_port(f"127.0.0.1:{self.port}")
        await server.start()
        up.set_result(port)
        await self._stop.wait()
        await server.stop(None)

    def do(self, call: Any, *args: Any, **kwargs: Any) -> Any:
        """Call something of the plane in its own loop, and return what it returns."""
        assert self._loop is not None
        done: Future[Any] = Future()

        def run() -> None:
            try:
                done.set_result(call(*args, **kwargs))
            except BaseException as error:  # noqa: BLE001
                done.set_exception(error)

        self._loop.call_soon_threadsafe(run)
        return done.result(10)
