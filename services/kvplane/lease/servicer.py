"""LeaseService: proto in, proto out, a few lines an RPC."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

from kvplane.api.lease.v1 import lease_pb2 as pb
from kvplane.api.lease.v1 import lease_pb2_grpc
from kvplane.kernel.context import caller
from kvplane.kernel.errors import InvalidField, KvplaneError
from kvplane.kernel.validate import identifier, plain
from kvplane.lease import codec, decode
from kvplane.lease.domain import LeaseConfig
from kvplane.lease.keeper import Keeper
from kvplane.lease.service import LeaseService
from kvplane.lease.streams import Acknowledged, Stream, Streams
from kvplane.lease.values import Lease, Ownership


class LeaseServicer(lease_pb2_grpc.LeaseServiceServicer):
    """The RPCs of LeaseService; also called directly, without a context. See the proto."""

    def __init__(
        self, service: LeaseService, streams: Streams, keeper: Keeper, config: LeaseConfig
    ) -> None:
        self._service, self._streams, self._config = service, streams, config
        self._keeper = keeper

    async def ReportOwnership(
        self, request: pb.ReportOwnershipRequest, context: Any = None
    ) -> pb.ReportOwnershipResponse:
        """Store what a worker holds. A report of nothing only fetches an anchor."""
        worker_id, epoch = decode.worker("", request.worker_id, request.epoch)
        sent_by_us = 0
        if request.ownerships or request.time_anchor.anchor:
            sent_by_us = decode.sent_by("", request.time_anchor)
        items = decode.reported("", worker_id, epoch, request.ownerships)
        return codec.reported(await self._service.report(worker_id, epoch, sent_by_us, items))

    async def WithdrawOwnership(
        self, request: pb.WithdrawOwnershipRequest, context: Any = None
    ) -> pb.WithdrawOwnershipResponse:
        """Take note of freed blocks."""
        worker_id, epoch = decode.worker("", request.worker_id, request.epoch)
        handles = decode.handles("handles", request.handles)
        states = await self._service.withdraw(worker_id, epoch, handles)
        return pb.WithdrawOwnershipResponse(
            states=[codec.ownership_state(state) for state in states]
        )

    async def GetOwnership(
        self, request: pb.GetOwnershipRequest, context: Any = None
    ) -> pb.GetOwnershipResponse:
        """Return one ownership of the caller's tenant."""
        ident = plain("ownership_id", request.ownership_id, 128)
        own, payload, now_us = await self._service.get_ownership(caller().tenant_id, ident)
        return pb.GetOwnershipResponse(ownership=codec.ownership(own, now_us, payload))

    async def ListOwnerships(
        self, request: pb.ListOwnershipsRequest, context: Any = None
    ) -> pb.ListOwnershipsResponse:
        """Return a page of the caller's tenant's ownerships."""
        session_id, worker_id = decode.filters(request.session_id, request.worker_id)
        states = decode.ownership_states(request.states)
        page = decode.page(request.page_size, request.page_token)
        listed = await self._service.list_ownerships(
            caller().tenant_id, session_id, worker_id, states, page
        )
        return pb.ListOwnershipsResponse(
            ownerships=[
                codec.ownership(row, listed.now_us)
                for row in listed.rows
                if isinstance(row, Ownership)
            ],
            next_page_token=decode.page_token(listed.next_after),
        )

    async def GrantLease(
        self, request: pb.GrantLeaseRequest, context: Any = None
    ) -> pb.GrantLeaseResponse:
        """Give a lease, or say why not."""
        order, wait_us = decode.grant_order(request, caller().tenant_id)
        return codec.granted(await self._service.grant(order, wait_us))

    async def BeginRead(
        self, request: pb.BeginReadRequest, context: Any = None
    ) -> pb.BeginReadResponse:
        """Check a lease before its read."""
        ref = decode.lease_ref("", request.lease_id, request.fencing_token)
        holder = decode.holder(request.holder, compatibility=True)
        ttl_us = decode.micros_of("ttl", request.ttl)
        lease, own, payload, now_us = await self._service.begin_read(ref, holder, ttl_us)
        return pb.BeginReadResponse(
            lease=codec.lease(lease, now_us), ownership=codec.ownership(own, now_us, payload)
        )

    async def RenewLeases(
        self, request: pb.RenewLeasesRequest, context: Any = None
    ) -> pb.RenewLeasesResponse:
        """Extend leases, item by item."""
        holder = decode.holder(request.holder)
        refs = decode.lease_refs(request.leases, len(request.leases))
        ttl_us = decode.micros_of("ttl", request.ttl)
        return codec.renewals(await self._service.renew(holder, refs, ttl_us))

    async def ReleaseLeases(
        self, request: pb.ReleaseLeasesRequest, context: Any = None
    ) -> pb.ReleaseLeasesResponse:
        """End leases at their holder's word."""
        holder = decode.holder(request.holder)
        refs = decode.releases(request.releases)
        states = await self._service.release(holder, refs)
        return codec.releases([ref.lease_id for ref in refs], states)

    async def RevokeLease(
        self, request: pb.RevokeLeaseRequest, context: Any = None
    ) -> pb.RevokeLeaseResponse:
        """Take a lease of the caller's tenant away."""
        ident = plain("lease_id", request.lease_id, 128)
        lease, now_us = await self._service.revoke(caller().tenant_id, ident)
        return pb.RevokeLeaseResponse(lease=codec.lease(lease, now_us))

    async def GetLease(
        self, request: pb.GetLeaseRequest, context: Any = None
    ) -> pb.GetLeaseResponse:
        """Return one lease of the caller's tenant."""
        ident = plain("lease_id", request.lease_id, 128)
        lease, now_us = await self._service.get_lease(caller().tenant_id, ident)
        return pb.GetLeaseResponse(lease=codec.lease(lease, now_us))

    async def ListLeases(
        self, request: pb.ListLeasesRequest, context: Any = None
    ) -> pb.ListLeasesResponse:
        """Return a page of the caller's tenant's leases."""
        session_id, worker_id = decode.filters(request.session_id, request.worker_id)
        states = decode.lease_states(request.states)
        page = decode.page(request.page_size, request.page_token)
        listed = await self._service.list_leases(
            caller().tenant_id, session_id, worker_id, states, page
        )
        return pb.ListLeasesResponse(
            leases=[
                codec.lease(row, listed.now_us) for row in listed.rows if isinstance(row, Lease)
            ],
            next_page_token=decode.page_token(listed.next_after),
        )

    async def ExtendHold(
        self, request: pb.ExtendHoldRequest, context: Any = None
    ) -> pb.ExtendHoldResponse:
        """Ask the owners of the caller's session to hold longer."""
        session_id = plain("session_id", request.session_id, 128)
        hold_us = decode.micros_of("hold", request.hold)
        if not hold_us:
            raise InvalidField("hold", "must be more than 0")
        asked = await self._service.extend_hold(caller().tenant_id, session_id, hold_us)
        return pb.ExtendHoldResponse(asked=asked)

    async def FreeSession(
        self, request: pb.FreeSessionRequest, context: Any = None
    ) -> pb.FreeSessionResponse:
        """Free all that the caller's session holds."""
        session_id = plain("session_id", request.session_id, 128)
        freed, draining = await self._service.free_session(caller().tenant_id, session_id)
        return pb.FreeSessionResponse(freed=freed, draining=draining)

    async def EndWorkerEpoch(
        self, request: pb.EndWorkerEpochRequest, context: Any = None
    ) -> pb.EndWorkerEpochResponse:
        """Void a worker's older epochs."""
        worker_id = identifier("worker_id", request.worker_id)
        epoch = decode.epoch("current_epoch", request.current_epoch)
        owned, held = await self._service.end_epoch(worker_id, epoch)
        return pb.EndWorkerEpochResponse(ownerships_lost=owned, leases_lost=held)

    async def GetUsage(
        self, request: pb.GetUsageRequest, context: Any = None
    ) -> pb.GetUsageResponse:
        """Say what the caller's tenant holds and has held."""
        return codec.usage(await self._keeper.usage(caller().tenant_id))

    async def Connect(
        self, requests: AsyncIterator[pb.ConnectRequest], context: Any = None
    ) -> AsyncIterator[pb.ConnectResponse]:
        """Talk with a worker until either side ends, or the worker begins anew elsewhere."""
        incoming = aiter(requests)
        first = await anext(incoming, None)
        if first is None or first.WhichOneof("message") != "hello":
            raise InvalidField("hello", "must be the first message of the stream")
        worker_id, epoch = decode.worker("hello.", first.hello.worker_id, first.hello.epoch)
        held = decode.handles("hello.held", first.hello.held, decode.MAX_INVENTORY)
        number = decode.stream_number("hello.number", first.hello.number)
        limit = decode.hold_limit("hello.hold_limit_blocks", first.hello.hold_limit_blocks)
        stream = await self._streams.open(worker_id, epoch, number, held, limit)
        listening = asyncio.create_task(self._listen(incoming, stream))
        try:
            async for event in stream.events():
                yield codec.event(event, self._config)
        finally:
            self._streams.close(stream)
            listening.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await listening

    async def _listen(self, incoming: AsyncIterator[pb.ConnectRequest], stream: Stream) -> None:
        """Take what the worker says, in its order; whatever goes wrong ends the stream."""
        try:
            async for message in incoming:
                await self._take(message, stream)
            stream.finish()
        except KvplaneError as error:
            stream.finish(error)
        except Exception as error:  # noqa: BLE001 - a lost connection, or a fault of ours
            stream.finish(error)

    async def _take(self, message: pb.ConnectRequest, stream: Stream) -> None:
        worker_id, epoch = stream.worker_id, stream.epoch
        match message.WhichOneof("message"):
            case "report":
                report = message.report
                sent_by_us = decode.sent_by("report.", report.time_anchor)
                items = decode.reported("report.", worker_id, epoch, report.ownerships)
                try:
                    await self._service.report(
                        worker_id, epoch, sent_by_us, items, stream.stream_id
                    )
                except InvalidField as error:
                    raise error.within("report.") from error
                stream.put(Acknowledged(report.sequence))
            case "withdraw":
                handles = decode.handles("withdraw.handles", message.withdraw.handles)
                await self._service.withdraw(worker_id, epoch, handles)
                stream.put(Acknowledged(message.withdraw.sequence))
            case "command_ack":
                ack = message.command_ack
                hold_us = decode.micros_of("command_ack.hold", ack.hold)
                sent_by_us = decode.sent_by("command_ack.", ack.time_anchor) if hold_us else 0
                await self._service.acknowledge(
                    worker_id,
                    epoch,
                    plain("command_ack.command_id", ack.command_id, 128),
                    done=ack.done,
                    sent_by_us=sent_by_us,
                    hold_us=hold_us,
                )
            case _:
                raise InvalidField("message", "must be report, withdraw or command_ack")
