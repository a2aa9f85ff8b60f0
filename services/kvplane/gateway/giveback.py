"""Giving back what a request does not need any more, in the background."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

import structlog
from google.protobuf.duration_pb2 import Duration

from kvplane.api.lease.v1 import lease_pb2 as lease
from kvplane.api.routing.v1 import routing_pb2 as routing
from kvplane.client.api import LeaseApi
from kvplane.gateway.tasks import Background
from kvplane.gateway.workers import WorkerWatch
from kvplane.kernel.clock import Clock
from kvplane.kernel.context import GATEWAY, Role, caller, set_caller
from kvplane.kernel.errors import KvplaneError

log = structlog.get_logger(__name__)

# A prefill's report may be on its way when its blocks are given up.
_REPORT_WAIT: Final = Duration(nanos=500_000_000)
# An engine that is busy hears late that nobody waits for it: seconds between two looks.
_LOOK_AGAIN_S: Final = (0.5, 1.0, 2.0, 4.0)


class GiveBack:
    """Leases nobody reads under, and blocks nobody will read."""

    def __init__(
        self, leases: LeaseApi, watch: WorkerWatch, background: Background, clock: Clock
    ) -> None:
        self._leases, self._watch, self._background = leases, watch, background
        self._clock = clock

    def release(self, granted: lease.Lease, outcome: lease.ReadOutcome) -> None:
        """Release a lease of the gateway's own."""
        self._background.start(self._release(granted, outcome), "release a lease")

    def unless_begun(self, granted: lease.Lease) -> None:
        """Release a lease that an engine may have heard of, if it has begun no read."""
        self.release(granted, lease.READ_OUTCOME_NEVER_BEGUN)

    def handle(self, owner: routing.Target, params: Mapping[str, Any], key: str) -> None:
        """Have `owner` free what `params` name, unless somebody reads it already.

        `key` is the same for repetitions of this wish only.
        """
        named = lease.OwnedHandle(
            engine_id=params.get("remote_engine_id"), request_id=params.get("remote_request_id")
        )
        request = lease.GrantLeaseRequest(request_id=f"free:{key}", handle=named, wait=_REPORT_WAIT)
        self._background.start(self._free(owner, request), "free a prefill's blocks")

    def turn(self, owner: routing.Target, session_id: str, turn: int) -> None:
        """Have `owner` free what it holds, or soon will, for the decode of a turn that is over.

        Its answer may have come when nobody was there any more, and a decode that was to
        read may let go only at its next step.
        """
        self._background.start(self._free_turn(owner, session_id, turn), "free a turn's blocks")

    async def _release(self, granted: lease.Lease, outcome: lease.ReadOutcome) -> None:
        release = lease.LeaseRelease(
            lease_id=granted.lease_id, fencing_token=granted.fencing_token, outcome=outcome
        )
        request = lease.ReleaseLeasesRequest(holder=granted.holder, releases=[release])
        try:
            await self._leases.ReleaseLeases(request)
        except (KvplaneError, TimeoutError, OSError) as error:
            log.info("a lease stays until it ends", lease=granted.lease_id, reason=str(error))

    async def _free_turn(self, owner: routing.Target, session_id: str, turn: int) -> None:
        request = lease.ListOwnershipsRequest(
            session_id=session_id,
            worker_id=owner.worker_id,
            states=[lease.OWNERSHIP_STATE_HELD],
        )
        for look, pause in enumerate(_LOOK_AGAIN_S):
            await self._clock.sleep(pause)
            try:
                listed = await self._leases.ListOwnerships(request)
            except (KvplaneError, TimeoutError, OSError) as error:
                log.info("a prefill's blocks may stay until their hold ends", reason=str(error))
                continue
            for own in listed.ownerships:
                if own.for_decode and own.turn == turn:
                    key = f"free:{own.ownership_id}:{look}"
                    await self._free(
                        owner,
                        lease.GrantLeaseRequest(request_id=key, ownership_id=own.ownership_id),
                    )

    async def _free(self, owner: routing.Target, request: lease.GrantLeaseRequest) -> None:
        """Take the one lease that there is, then take it away: the owner is told to free."""
        # The client did not ask for it: the audit does not say that it did.
        set_caller(replace(caller(), roles=frozenset({Role.SERVICE}), actor=GATEWAY))
        request.holder.CopyFrom(
            lease.Holder(
                worker_id=owner.worker_id,
                epoch=owner.epoch,
                compatibility=self._watch.compatibility(owner.worker_id),
            )
        )
        try:
            answer = await self._leases.GrantLease(request)
            if answer.HasField("lease"):
                await self._leases.RevokeLease(
                    lease.RevokeLeaseRequest(lease_id=answer.lease.lease_id)
                )
        except (KvplaneError, TimeoutError, OSError) as error:
            log.info("a prefill's blocks stay until their hold ends", reason=str(error))
