"""The other services as the router and the registry need them: bounded, and never fatal."""

import asyncio
import contextlib
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any

import structlog
from google.protobuf.duration_pb2 import Duration

from kvplane.api.lease.v1 import lease_pb2
from kvplane.api.session.v1 import session_pb2
from kvplane.client.api import LeaseApi, SessionApi
from kvplane.kernel.errors import InvalidField, KvplaneError, StaleEpoch, Unavailable
from kvplane.routing.domain import Worker
from kvplane.routing.policy import Reason, Turn

_log = structlog.get_logger(__name__)

# Our caller cannot mend these; it is told what it can do instead.
_AWAY = {"UNAVAILABLE", "INTERNAL", "ABORTED"}

_REASONS = {
    lease_pb2.REFUSAL_REASON_NOT_HELD: Reason.NOTHING_HELD,
    lease_pb2.REFUSAL_REASON_ALREADY_LEASED: Reason.ALREADY_LEASED,
    lease_pb2.REFUSAL_REASON_EXPIRING: Reason.EXPIRING,
    lease_pb2.REFUSAL_REASON_INCOMPATIBLE: Reason.INCOMPATIBLE,
    lease_pb2.REFUSAL_REASON_BELOW_THRESHOLD: Reason.BELOW_THRESHOLD,
    lease_pb2.REFUSAL_REASON_OWNER_LOST: Reason.OWNER_LOST,
    lease_pb2.REFUSAL_REASON_OVER_QUOTA: Reason.OVER_QUOTA,
}


@dataclass(frozen=True, slots=True)
class Granted:
    """A lease, and whose blocks it is for."""

    lease: lease_pb2.Lease
    owner_id: str
    owner_epoch: int
    held_tokens: int
    # The engine, and host and port of its side channel, as the owner's handle has them.
    engine_id: str
    side_channel: tuple[str, int]


class SessionPeer:
    """The session registry."""

    def __init__(self, api: SessionApi, bound_s: float) -> None:
        self._api = api
        self._bound_s = bound_s

    async def begin_turn(self, request: session_pb2.BeginTurnRequest) -> Turn | None:
        """Open the turn; None when the registry is away or slow.

        Raises what the caller must know: a bad field, a hard limit. Beyond a soft one the
        turn has no session.
        """
        try:
            async with asyncio.timeout(self._bound_s):
                answer = await self._api.BeginTurn(request)
        except TimeoutError:
            _log.warning("session service is slow", bound_s=self._bound_s)
            return None
        except InvalidField as error:
            raise _of_route(error) from error
        except KvplaneError as error:
            if error.code not in _AWAY:
                raise
            _log.warning("session service is away", error=str(error))
            return None
        except Exception:  # noqa: BLE001 - no part of the control plane may fail a turn
            _log.exception("session service failed")
            return None
        return Turn(
            session_id=answer.session.session_id,
            turn=answer.turn,
            last_decode=answer.session.last_decode_worker_id,
            previous_completed=answer.previous_completed,
        )

    async def complete_turn(self, request: session_pb2.CompleteTurnRequest) -> None:
        """Close the turn. Raises Unavailable when the registry is away or slow."""
        try:
            async with asyncio.timeout(self._bound_s):
                await self._api.CompleteTurn(request)
        except InvalidField as error:
            raise error.within("turn.") from error
        except TimeoutError:
            raise Unavailable("the session service is slow", retry_after=1.0) from None


class LeasePeer:
    """The lease service."""

    def __init__(self, api: LeaseApi, bound_s: float) -> None:
        self._api = api
        self._bound_s = bound_s
        self._left: set[asyncio.Task[None]] = set()

    async def grant(
        self, request_id: str, session_id: str, reader: Worker, wait_s: float
    ) -> Granted | Reason:
        """Ask for the right to read what the session holds; a Reason is a refusal.

        A grant that arrives after the bound, or after the caller has gone, is given back.
        """
        request = lease_pb2.GrantLeaseRequest(
            request_id=request_id,
            session_id=session_id,
            holder=_holder(reader),
            min_tokens=reader.profile.recompute_threshold,
            wait=_duration(wait_s),
        )
        call = asyncio.ensure_future(self._api.GrantLease(request))
        try:
            async with asyncio.timeout(self._bound_s + wait_s):
                answer = await asyncio.shield(call)
        except TimeoutError:
            _log.warning("lease service is slow", bound_s=self._bound_s + wait_s)
            self._give_back_when_granted(call)
            return Reason.LEASE_SERVICE_UNAVAILABLE
        except asyncio.CancelledError:
            self._give_back_when_granted(call)
            raise
        except StaleEpoch:
            raise
        except KvplaneError as error:
            _log.warning("lease service refuses to answer", error=str(error))
            return Reason.LEASE_SERVICE_UNAVAILABLE
        except Exception:  # noqa: BLE001 - as above
            _log.exception("lease service failed")
            return Reason.LEASE_SERVICE_UNAVAILABLE
        # A repeated call is told of the first one's lease, even if that has ended since.
        if answer.lease.state != lease_pb2.LEASE_STATE_GRANTED:
            return _REASONS.get(answer.refusal_reason, Reason.NOTHING_HELD)
        owned = answer.ownership
        return Granted(
            answer.lease,
            owned.worker_id,
            owned.epoch,
            owned.num_tokens,
            owned.params.remote_engine_id,
            (owned.params.remote_host, owned.params.remote_port),
        )

    def give_back(self, lease: lease_pb2.Lease) -> None:
        """Release a lease in the background, unless its read has begun. If it fails it expires."""
        self._leave(self._release(lease))

    async def end_epoch(self, worker_id: str, current_epoch: int) -> bool:
        """Void what the worker had in epochs below `current_epoch`; False: not heard."""
        request = lease_pb2.EndWorkerEpochRequest(worker_id=worker_id, current_epoch=current_epoch)
        try:
            async with asyncio.timeout(self._bound_s):
                await self._api.EndWorkerEpoch(request)
        except (TimeoutError, KvplaneError) as error:
            _log.warning("cannot end an epoch yet", worker_id=worker_id, error=str(error))
            return False
        except Exception:  # noqa: BLE001 - tried again later
            _log.exception("cannot end an epoch yet", worker_id=worker_id)
            return False
        return True

    async def close(self) -> None:
        """Wait for what is under way; each of it is bounded."""
        while self._left:
            await asyncio.gather(*self._left, return_exceptions=True)

    def _leave(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._left.add(task)
        task.add_done_callback(self._left.discard)

    def _give_back_when_granted(self, call: "asyncio.Future[lease_pb2.GrantLeaseResponse]") -> None:
        async def wait() -> None:
            try:
                async with asyncio.timeout(10 * (self._bound_s + 0.1)):
                    answer = await call
            except Exception as error:  # noqa: BLE001 - whatever it was, no lease came of it
                _log.info("a late grant failed", error=str(error))
                return
            if answer.HasField("lease"):
                await self._release(answer.lease)

        self._leave(wait())

    async def _release(self, lease: lease_pb2.Lease) -> None:
        request = lease_pb2.ReleaseLeasesRequest(
            holder=lease.holder,
            releases=[
                lease_pb2.LeaseRelease(
                    lease_id=lease.lease_id,
                    fencing_token=lease.fencing_token,
                    outcome=lease_pb2.READ_OUTCOME_NEVER_BEGUN,
                )
            ],
        )
        with contextlib.suppress(TimeoutError, KvplaneError):
            async with asyncio.timeout(self._bound_s):
                await self._api.ReleaseLeases(request)


def _of_route(error: InvalidField) -> InvalidField:
    """Name a field of BeginTurnRequest as RouteRequest has it."""
    field = error.metadata["field"]
    if not field.startswith("key."):
        return error
    problem = error.message.removeprefix(f"{field}: ")
    return InvalidField("session." + field.removeprefix("key."), problem)


def _holder(worker: Worker) -> lease_pb2.Holder:
    return lease_pb2.Holder(
        worker_id=worker.worker_id,
        epoch=worker.epoch,
        compatibility=worker.profile.compatibility.key(),
    )


def _duration(seconds: float) -> Duration:
    duration = Duration()
    duration.FromMicroseconds(round(seconds * 1e6))
    return duration
