"""Route and lease renewals over the wire, against what gRPC itself can do here.

    python bench/control_plane.py [--rounds 4] [--calls 300] [--only sqlite|postgresql]

One `kvplane dev` for each database; the client is this process. Ceilings: a grpc.aio
unary echo of bytes, and one bidirectional stream of renewals that are parsed and answered
without a database, in a third process. All run under uvloop.

    first turns    Route opens a session and its first turn
    reuse turns    the turn was completed, its decode has reported what it holds (not
                   timed), and Route takes a lease on it
    renewals       RenewLeases for 64 leases a call

Every round takes all in turn; ratios are of the same round, shown is their median. "cpu us"
is the server process's CPU time for each: it suffers less from a busy machine than rates do.
"""

import argparse
import asyncio
import contextlib
import os
import pathlib
import sys
import tempfile
from collections.abc import Awaitable
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, Final

import grpc
import psutil
import uvloop
from _bench import (
    BLOCK,
    CLOCK,
    MODEL,
    Row,
    cpu_s,
    free_port,
    kvplane,
    postgresql,
    program,
    register,
    report,
    spread,
)
from google.protobuf.duration_pb2 import Duration
from kvplane.api.lease.v1 import lease_pb2, lease_pb2_grpc
from kvplane.api.routing.v1 import routing_pb2, routing_pb2_grpc
from kvplane.api.session.v1 import session_pb2
from kvplane.kernel.compat import compatibility_key

CALLERS: Final = 64
RENEWERS: Final = 16
BATCH: Final = 64
TOKENS: Final = 2048
TIMEOUT: Final = 30.0
METADATA: Final = (("x-kvplane-tenant", "default"), ("x-request-id", "bench"))
COMPATIBILITY: Final = compatibility_key(
    model=MODEL, revision="1", block_size=BLOCK, kv_layout="HND", kv_dtype="bfloat16",
    engine_version="1",
)  # fmt: skip
HOLDER: Final = lease_pb2.Holder(worker_id="p", epoch=1, compatibility=COMPATIBILITY)
AIMS: Final = {"sqlite": 0.75, "postgresql": 0.5}
RENEWALS_AIM: Final = 60_000


async def serve_ceiling(port: int) -> None:
    """Be the echo."""

    async def unary(request: bytes, _context: Any) -> bytes:
        return request

    async def renew(requests: Any, _context: Any) -> Any:
        async for request in requests:
            yield lease_pb2.RenewLeasesResponse(
                results=[
                    lease_pb2.RenewResult(lease_id=ref.lease_id, renewed=True, ttl=request.ttl)
                    for ref in request.leases
                ]
            )

    server = grpc.aio.server()
    handlers = {
        "Unary": grpc.unary_unary_rpc_method_handler(unary),
        "Renew": grpc.stream_stream_rpc_method_handler(
            renew,
            lease_pb2.RenewLeasesRequest.FromString,
            lease_pb2.RenewLeasesResponse.SerializeToString,
        ),
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("bench.Echo", handlers),))
    server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    await server.wait_for_termination()


@dataclass
class Series:
    """Rates and CPU times of the rounds."""

    rates: list[float] = field(default_factory=list)
    cpu_us: list[float] = field(default_factory=list)

    async def add(self, process: psutil.Process, units: int, work: Awaitable[Any]) -> list[Any]:
        """Time some work that the process serves."""
        before = cpu_s(process)
        seconds, answers = await work
        self.rates.append(units / seconds)
        self.cpu_us.append((cpu_s(process) - before) / units * 1e6)
        return list(answers)


class Ceiling:
    """The client of the echo."""

    def __init__(self, channel: grpc.aio.Channel, process: psutil.Process) -> None:
        self._process = process
        self._unary = channel.unary_unary("/bench.Echo/Unary")
        self._renew = channel.stream_stream(
            "/bench.Echo/Renew",
            lease_pb2.RenewLeasesRequest.SerializeToString,
            lease_pb2.RenewLeasesResponse.FromString,
        )
        self.unary, self.stream = Series(), Series()

    async def start(self) -> None:
        """Wait for it."""
        await self._unary(b"", wait_for_ready=True, timeout=60)

    async def round(self, calls: int) -> None:
        """Measure once."""
        body = _route_request("some-round-000", "session-of-a-round").SerializeToString()

        async def echo(_number: int) -> None:
            await self._unary(body, timeout=TIMEOUT, metadata=METADATA)

        await self.unary.add(self._process, calls * 3, spread(calls * 3, CALLERS, echo))
        await self.stream.add(self._process, calls * BATCH, self._stream(calls))

    async def _stream(self, messages: int) -> tuple[float, list[Any]]:
        refs = [lease_pb2.LeaseRef(lease_id=f"lease-{n:032}", fencing_token=1) for n in range(64)]
        request = lease_pb2.RenewLeasesRequest(holder=HOLDER, leases=refs, ttl=Duration(seconds=60))
        call = self._renew(timeout=60)

        async def write() -> None:
            for _ in range(messages):
                await call.write(request)
            await call.done_writing()

        start = perf_counter()
        writing = asyncio.create_task(write())
        answers = [answer async for answer in call]
        await writing
        assert len(answers) == messages
        return perf_counter() - start, []


class Plane:
    """The client of one `kvplane dev`."""

    def __init__(self, name: str, channel: grpc.aio.Channel, process: psutil.Process) -> None:
        self.name = name
        self._channel = channel
        self._process = process
        self._routing = routing_pb2_grpc.RoutingServiceStub(channel)
        self._leases = lease_pb2_grpc.LeaseServiceStub(channel)
        self._held: list[list[lease_pb2.LeaseRef]] = []
        self._anchor = 0
        self._round = 0
        self.first, self.reuse, self.renewals = Series(), Series(), Series()
        # Answers without a session or a lease, since a bounded wait was over.
        self.unexpected = 0

    async def start(self) -> None:
        """Register the workers; take the leases that will be renewed."""
        await register(self._channel)
        request = lease_pb2.ReportOwnershipRequest(worker_id="d", epoch=1)
        self._anchor = (await self._call(self._leases.ReportOwnership, request)).anchor
        owned = await self._report([("", 0)] * (RENEWERS * BATCH), "held")

        async def grant(number: int) -> lease_pb2.GrantLeaseResponse:
            request = lease_pb2.GrantLeaseRequest(
                request_id=f"grant-{number}", holder=HOLDER, ownership_id=owned[number],
                ttl=Duration(seconds=60), begin_read=True,
            )  # fmt: skip
            return await self._call(self._leases.GrantLease, request)

        _, grants = await spread(len(owned), CALLERS, grant)
        refs = [
            lease_pb2.LeaseRef(lease_id=one.lease.lease_id, fencing_token=one.lease.fencing_token)
            for one in grants
        ]
        self._held = [refs[start : start + BATCH] for start in range(0, len(refs), BATCH)]

    async def round(self, calls: int) -> None:
        """Measure all three once."""
        self._round += 1
        first = await self.first.add(self._process, calls, self._routes(calls, 1))
        self._expect(first, routing_pb2.DECISION_REASON_FIRST_TURN)
        await spread(calls, CALLERS, lambda number: self._complete(first[number]))
        await self._report([(one.session_id, 1) for one in first], f"round{self._round}")
        reuse = await self.reuse.add(self._process, calls, self._routes(calls, 2))
        self._expect(reuse, routing_pb2.DECISION_REASON_OWNER_HOLDS)
        await self._give_back([one.lease for one in reuse if one.HasField("lease")])
        batches = calls // 2
        renewed = await self.renewals.add(
            self._process, batches * BATCH, spread(batches, RENEWERS, self._renew)
        )
        assert all(result.renewed for answer in renewed for result in answer.results)

    async def _call(self, method: Any, request: Any) -> Any:
        for _ in range(20):
            try:
                return await method(request, timeout=TIMEOUT, metadata=METADATA)
            except grpc.aio.AioRpcError as error:  # slow, on a busy machine: as clients do
                if error.code() is not grpc.StatusCode.UNAVAILABLE:
                    raise
                self.unexpected += 1
        raise TimeoutError("the control plane keeps being unavailable")

    def _routes(self, calls: int, turn: int) -> Awaitable[Any]:
        async def route(number: int) -> routing_pb2.RouteResponse:
            session = f"session-{self._round}-{number}"
            request = _route_request(f"{session}-{turn}", session)
            return await self._call(self._routing.Route, request)

        return spread(calls, CALLERS, route)

    async def _complete(self, answer: routing_pb2.RouteResponse) -> None:
        turn = session_pb2.CompleteTurnRequest(
            session_id=answer.session_id, turn=answer.turn, outcome=session_pb2.TURN_OUTCOME_OK,
            prompt_tokens=TOKENS, completion_tokens=1, prefill_worker_id="p",
            decode_worker_id="d",
        )  # fmt: skip
        if answer.session_id:
            await self._call(self._routing.Complete, routing_pb2.CompleteRequest(turn=turn))

    async def _report(self, turns: list[tuple[str, int]], tag: str) -> list[str]:
        """Let the decode hold a turn of each session; return the ownerships."""
        owned: list[str] = []
        for start in range(0, len(turns), BATCH):
            ownerships = [
                lease_pb2.Ownership(
                    tenant_id="default", session_id=session_id, turn=turn, num_tokens=TOKENS,
                    block_size=BLOCK, digests=bytes(TOKENS), compatibility=COMPATIBILITY,
                    cuttable=True, hold=Duration(seconds=3600),
                    params=lease_pb2.KvTransferParams(
                        remote_engine_id="engine-d", remote_request_id=f"{tag}-{start + number}",
                        remote_host="127.0.0.1", remote_port=5600, tp_size=1,
                        remote_num_tokens=TOKENS,
                        remote_block_ids=[lease_pb2.BlockGroup(ids=range(TOKENS // BLOCK))],
                    ),
                )
                for number, (session_id, turn) in enumerate(turns[start : start + BATCH])
            ]  # fmt: skip
            request = lease_pb2.ReportOwnershipRequest(
                worker_id="d", epoch=1, ownerships=ownerships,
                time_anchor=lease_pb2.TimeAnchor(
                    anchor=self._anchor, elapsed=Duration(seconds=1)
                ),
            )  # fmt: skip
            answer = await self._call(self._leases.ReportOwnership, request)
            self._anchor = answer.anchor
            owned += [one.ownership_id for one in answer.ownerships]
        return owned

    async def _renew(self, number: int) -> lease_pb2.RenewLeasesResponse:
        leases = self._held[number % RENEWERS]
        request = lease_pb2.RenewLeasesRequest(
            holder=HOLDER, leases=leases, ttl=Duration(seconds=60)
        )
        return await self._call(self._leases.RenewLeases, request)

    async def _give_back(self, leases: list[lease_pb2.Lease]) -> None:
        releases = [
            lease_pb2.LeaseRelease(
                lease_id=one.lease_id,
                fencing_token=one.fencing_token,
                outcome=lease_pb2.READ_OUTCOME_UNUSED,
            )
            for one in leases
        ]
        for start in range(0, len(releases), BATCH):
            request = lease_pb2.ReleaseLeasesRequest(
                holder=HOLDER, releases=releases[start : start + BATCH]
            )
            await self._call(self._leases.ReleaseLeases, request)

    def _expect(self, answers: list[Any], reason: int) -> None:
        self.unexpected += sum(answer.reason != reason for answer in answers)


def _route_request(request_id: str, session: str) -> routing_pb2.RouteRequest:
    return routing_pb2.RouteRequest(
        request_id=request_id, session=session_pb2.SessionKey(name=session), model=MODEL
    )


async def measure(rounds: int, calls: int, databases: list[str]) -> list[Row]:
    """Start everything and go round."""
    async with contextlib.AsyncExitStack() as stack:
        # All processes before the first channel: gRPC does not like forks.
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="kvplane-bench-"))
        started: list[tuple[str, int, psutil.Process]] = []
        for name in databases:
            url = f"sqlite:///{folder}/kvplane.db"
            if name == "postgresql":
                # Not below a folder that is closed to the server's user.
                url = stack.enter_context(postgresql(tempfile.mkdtemp(prefix="kvplane-postgres-")))
            port = free_port()
            log = pathlib.Path(folder, f"{name}.log")
            process = stack.enter_context(
                kvplane(
                    log, "dev", "--port", str(port), "--gateway-port", str(free_port()),
                    "--database", url, KVPLANE_GRPC_STATUS_PORT="0",
                )
            )  # fmt: skip
            started.append((name, port, process))
        ceiling_port = free_port()
        process = stack.enter_context(program(__file__, "--serve-ceiling", str(ceiling_port)))

        def connect(port: int) -> grpc.aio.Channel:
            channel = grpc.aio.insecure_channel(f"127.0.0.1:{port}")
            stack.push_async_callback(channel.close)
            return channel

        ceiling = Ceiling(connect(ceiling_port), process)
        await ceiling.start()
        planes = [Plane(name, connect(port), process) for name, port, process in started]
        for plane in planes:
            await plane.start()
        await CLOCK.sleep(1)
        for number in range(rounds):
            measured: list[Ceiling | Plane] = [ceiling, *planes]
            for one in measured if number % 2 == 0 else measured[::-1]:
                await one.round(calls)
        return rows(ceiling, planes)


def rows(ceiling: Ceiling, planes: list[Plane]) -> list[Row]:
    """Return the table."""
    echo = Row("unary echo", "calls/s", ceiling.unary.rates, ceiling.unary.cpu_us)
    stream = Row("renewal stream", "leases/s", ceiling.stream.rates, ceiling.stream.cpu_us)
    made = [echo]
    for plane in planes:
        note = f"{plane.unexpected} late" if plane.unexpected else ""
        for kind, series in (("first turns", plane.first), ("reuse turns", plane.reuse)):
            made.append(
                Row(
                    f"Route, {kind}, {plane.name}", "calls/s", series.rates, series.cpu_us,
                    ceiling=echo, aim=AIMS[plane.name], note=note,
                )
            )  # fmt: skip
    made.append(stream)
    for plane in planes:
        series = plane.renewals
        made.append(
            Row(
                f"renewals, {plane.name}", "leases/s", series.rates, series.cpu_us,
                ceiling=stream, aim=RENEWALS_AIM,
            )
        )  # fmt: skip
    return made


def main() -> int:
    """Run it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--calls", type=int, default=300, help="Route calls of a kind, each round")
    parser.add_argument("--only", choices=list(AIMS), help="one database")
    parser.add_argument("--serve-ceiling", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve_ceiling:
        with contextlib.suppress(KeyboardInterrupt):
            uvloop.run(serve_ceiling(options.serve_ceiling))
        return 0
    databases = [options.only] if options.only else list(AIMS)
    before = os.getloadavg()
    table = uvloop.run(measure(options.rounds, options.calls, databases))
    title = f"kvplane control plane, {CALLERS} callers, {options.rounds} rounds"
    report("control_plane", title, table, before)
    return 0


if __name__ == "__main__":
    sys.exit(main())
