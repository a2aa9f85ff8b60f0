"""Domain values into responses. See `decode` for the other direction."""

from collections.abc import Sequence
from typing import cast

from google.protobuf.duration_pb2 import Duration

from kvplane.api.lease.v1 import lease_pb2 as pb
from kvplane.lease.domain import LeaseConfig
from kvplane.lease.holds import Usage
from kvplane.lease.store import Command, Granted, Renewal, Reported
from kvplane.lease.streams import Acknowledged, Event, Tick, Welcome
from kvplane.lease.values import Lease, LeaseState, Ownership, OwnershipState, Payload, micros

_NO_PAYLOAD = Payload()


def duration(micros_left: int) -> Duration:
    """Return a duration, zero for a negative one."""
    seconds, rest = divmod(max(micros_left, 0), 1_000_000)
    return Duration(seconds=seconds, nanos=rest * 1000)


def ownership_state(state: OwnershipState | None) -> "pb.OwnershipState":
    """Return a state, UNSPECIFIED for None. The numbers are the proto's."""
    return cast("pb.OwnershipState", int(state or 0))


def lease_state(state: LeaseState | None) -> "pb.LeaseState":
    """Return a state, UNSPECIFIED for None. The numbers are the proto's."""
    return cast("pb.LeaseState", int(state or 0))


def ownership(own: Ownership, now_us: int, payload: Payload = _NO_PAYLOAD) -> pb.Ownership:
    """Return an ownership with what is left of its hold."""
    message = pb.Ownership(
        ownership_id=own.ownership_id,
        tenant_id=own.tenant_id,
        session_id=own.session_id,
        turn=own.turn,
        worker_id=own.worker_id,
        epoch=own.epoch,
        num_tokens=own.num_tokens,
        block_size=own.block_size,
        digests=payload.digests,
        compatibility=own.compatibility,
        cuttable=own.cuttable,
        hold=duration(own.hold_deadline_us - now_us if own.live else 0),
        state=ownership_state(own.state),
        lease_id=own.lease_id,
        for_decode=own.for_decode,
    )
    if payload.params:
        message.params.ParseFromString(payload.params)
    return message


def lease(item: Lease, now_us: int) -> pb.Lease:
    """Return a lease with what is left of it."""
    runs = item.live or item.draining
    return pb.Lease(
        lease_id=item.lease_id,
        fencing_token=item.fencing_token,
        ownership_id=item.ownership_id,
        tenant_id=item.tenant_id,
        session_id=item.session_id,
        holder=pb.Holder(worker_id=item.holder_worker_id, epoch=item.holder_epoch),
        state=lease_state(item.state),
        ttl=duration(item.deadline_us - now_us if runs else 0),
        draining=item.draining,
    )


def reported(answer: Reported) -> pb.ReportOwnershipResponse:
    """Return the answer to a report."""
    return pb.ReportOwnershipResponse(
        ownerships=[ownership(own, answer.now_us) for own in answer.ownerships],
        anchor=answer.now_us,
    )


def granted(answer: Granted) -> pb.GrantLeaseResponse:
    """Return the answer to a request for a lease."""
    message = pb.GrantLeaseResponse()
    if answer.refusal is not None:
        message.refusal_reason = cast("pb.RefusalReason", int(answer.refusal))
    if answer.lease is not None:
        message.lease.CopyFrom(lease(answer.lease, answer.now_us))
    if answer.ownership is not None:
        message.ownership.CopyFrom(ownership(answer.ownership, answer.now_us, answer.payload))
    return message


def renewals(items: Sequence[Renewal]) -> pb.RenewLeasesResponse:
    """Return the answers to renewals."""
    return pb.RenewLeasesResponse(
        results=[
            pb.RenewResult(
                lease_id=item.lease_id,
                renewed=item.renewed,
                state=lease_state(item.state),
                ttl=duration(item.ttl_us) if item.renewed else None,
                draining=item.draining,
            )
            for item in items
        ]
    )


def releases(ids: Sequence[str], states: Sequence[LeaseState | None]) -> pb.ReleaseLeasesResponse:
    """Return the answers to releases."""
    return pb.ReleaseLeasesResponse(
        results=[
            pb.ReleaseResult(lease_id=ident, state=lease_state(state))
            for ident, state in zip(ids, states, strict=True)
        ]
    )


def usage(answer: Usage) -> pb.GetUsageResponse:
    """Return what a tenant holds and has held."""
    return pb.GetUsageResponse(
        held_tokens=answer.held.tokens,
        held_blocks=answer.held.blocks,
        live_leases=answer.live_leases,
        held_token_seconds=answer.held_token_seconds,
    )


def event(item: Event, config: LeaseConfig) -> pb.ConnectResponse:
    """Return what goes down a stream."""
    match item:
        case Welcome(anchor):
            interval = duration(micros(config.tick_interval_s))
            welcome = pb.Welcome(anchor=anchor, tick_interval=interval)
            return pb.ConnectResponse(welcome=welcome)
        case Tick(anchor):
            return pb.ConnectResponse(tick=pb.Tick(anchor=anchor))
        case Acknowledged(sequence):
            return pb.ConnectResponse(acknowledged=pb.Acknowledged(sequence=sequence))
        case Command():
            return pb.ConnectResponse(command=_command(item))


def _command(item: Command) -> pb.Command:
    message = pb.Command(
        command_id=item.command_id,
        handle=pb.OwnedHandle(engine_id=item.handle.engine_id, request_id=item.handle.request_id),
    )
    if item.hold_us is None:
        message.free_now.SetInParent()
    else:
        message.hold_longer.hold.CopyFrom(duration(item.hold_us))
    return message
