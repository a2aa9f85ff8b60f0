"""A whole control plane in this process, called over real gRPC and HTTP."""

import shutil
import sqlite3
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import grpc
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2
from kvplane.cli.compose import Assembly
from kvplane.client.channels import MAX_MESSAGE_BYTES
from kvplane.client.quotas import QuotaBook
from kvplane.db.database import Database
from kvplane.gateway import main as gateway_main
from kvplane.gateway.config import GatewayConfig
from kvplane.kernel.clock import FakeClock
from kvplane.runtime.auth import TrustedNetwork
from kvplane.runtime.metrics import RpcMetrics
from kvplane.runtime.process import GrpcProcess
from kvplane.runtime.settings import load
from prometheus_client import CollectorRegistry
from wire.methods import METHODS, Method

Auth = Literal["none", "api_key"]

DETAILS = "grpc-status-details-bin"
OPTIONS = (("grpc.max_send_message_length", MAX_MESSAGE_BYTES),)


@dataclass(frozen=True)
class Refusal:
    """An error as a client in any language gets it."""

    code: str
    message: str
    domain: str
    reason: str
    metadata: dict[str, str]
    violations: list[tuple[str, str]]


@dataclass
class Plane:
    """The services on one port, the gateway on another, all over one SQLite file.

    The clock stands still: nothing happens by itself, and what is stored changes only
    through calls.
    """

    # The database, where it is a file.
    file: Path
    channel: grpc.aio.Channel
    gateway_url: str
    clock: FakeClock

    def dump(self) -> dict[str, list[tuple[Any, ...]]]:
        """Every row of every table but the audit's, where what is refused is written down too."""
        with closing(sqlite3.connect(self.file)) as connection:
            names = connection.execute(
                "SELECT name FROM sqlite_master WHERE type = 'table' AND name <> 'audit_events'"
            )
            return {
                name: sorted(connection.execute(f'SELECT * FROM "{name}"'), key=repr)
                for (name,) in names.fetchall()
            }

    async def call(
        self, name: str, request: Message | bytes, *, tenant: str = "default", **options: Any
    ) -> Any:
        """Call ``Service/Method``; of a stream of answers, return the first."""
        method = METHODS[name]
        metadata = (("x-kvplane-tenant", tenant), *options.pop("metadata", ()))
        options = {"timeout": 20, "metadata": metadata, **options}
        if method.descriptor.client_streaming:
            return await self._first(self.stub(method)(iter([request]), **options))
        if method.descriptor.server_streaming:
            return await self._first(self.stub(method)(request, **options))
        return await self.stub(method)(request, **options)

    async def _first(self, answers: Any) -> Any:
        try:
            return await anext(aiter(answers), None)
        finally:
            answers.cancel()

    def stub(self, method: Method) -> Any:
        """The bare call. A request in bytes goes out as it is."""
        kind = {
            (False, False): self.channel.unary_unary,
            (False, True): self.channel.unary_stream,
            (True, True): self.channel.stream_stream,
        }[method.descriptor.client_streaming, method.descriptor.server_streaming]
        return kind(method.path, _to_bytes, method.response.FromString)

    async def refusal(self, name: str, request: Message | bytes, **options: Any) -> Refusal:
        """Call and return the error that must come."""
        try:
            answer = await self.call(name, request, **options)
        except grpc.aio.AioRpcError as error:
            return refusal_of(error)
        raise AssertionError(f"{name} took it: {answer}")


def _to_bytes(request: Message | bytes) -> bytes:
    return request if isinstance(request, bytes) else request.SerializeToString()


async def refused(stream: Any) -> Refusal:
    """Read a stream to its end, which must be an error."""
    try:
        while await stream.read() is not grpc.aio.EOF:
            pass
    except grpc.aio.AioRpcError as error:
        return refusal_of(error)
    raise AssertionError("the stream ended well")


def refusal_of(error: grpc.aio.AioRpcError) -> Refusal:
    """Read an error's details."""
    status = status_pb2.Status()
    for key, value in error.trailing_metadata() or ():
        if key == DETAILS:
            status.MergeFromString(value)
    info = error_details_pb2.ErrorInfo()
    bad = error_details_pb2.BadRequest()
    for detail in status.details:
        if detail.Is(info.DESCRIPTOR):
            detail.Unpack(info)
        elif detail.Is(bad.DESCRIPTOR):
            detail.Unpack(bad)
    return Refusal(
        code=error.code().name,
        message=error.details() or "",
        domain=info.domain,
        reason=info.reason,
        metadata=dict(info.metadata),
        violations=[(v.field, v.description) for v in bad.field_violations],
    )


@asynccontextmanager
async def running(
    template: Path, folder: Path, *, gateway_auth: Auth = "none"
) -> AsyncIterator[Plane]:
    """Start everything over a copy of a migrated SQLite file."""
    file = folder / "plane.db"
    shutil.copy(template, file)
    async with running_on(f"sqlite:///{file}", file, gateway_auth=gateway_auth) as plane:
        yield plane


@asynccontextmanager
async def running_on(
    url: str, file: Path = Path(), *, gateway_auth: Auth = "none"
) -> AsyncIterator[Plane]:
    """Start everything as `kvplane dev` does, on free ports."""
    settings = load(
        database={"url": url},
        grpc={"port": 0, "status_port": 0, "drain_s": 0},
    )
    clock = FakeClock()
    made = Assembly(settings, clock, Database(settings.database.url, clock))
    tenants = made.tenant()
    quotas = QuotaBook(tenants, clock)
    leases = made.lease(quotas)
    sessions = made.session(leases, quotas)
    made.audit()
    routing, workers = made.routing(leases, sessions)
    # As Assembly.process does, but for metrics of its own: there may be several here.
    process = GrpcProcess(
        settings,
        clock,
        made.database,
        TrustedNetwork(),
        made.servicers,
        made.parts,
        0,
        RpcMetrics(CollectorRegistry()),
    )
    config = GatewayConfig(
        auth=gateway_auth,
        max_body_bytes=100_000,
        drain_s=0,
        refresh_interval_s=0.05,
        connect_timeout_s=0.5,
    )
    gateway = gateway_main.build(routing, workers, sessions, leases, config, tenants=tenants)
    await process.start()
    port = await gateway.start("127.0.0.1", 0)
    channel = grpc.aio.insecure_channel(f"127.0.0.1:{process.port}", options=OPTIONS)
    yield Plane(file, channel, f"http://127.0.0.1:{port}", clock)
    await channel.close()
    await gateway.stop()
    await process.drain()
