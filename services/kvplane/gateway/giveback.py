"""Giving back what a request does not need any more, in the background."""

from collections.abc import Mapping
from typing import Any, Final

import structlog
from google.protobuf.duration_pb2 import Duration

from kvplane.api.lease.v1 import lease_pb2 as lease
from kvplane.api.routing.v1 import routing_pb2 as routing
from kvplane.client.api import LeaseApi
from kvplane.gateway.tasks import Background
from kvplane.gateway.workers import WorkerWatch
from kvplane.kernel.errors import KvplaneError

log = structlog.get_logger(__name__)

# A prefill's report may be on its way when its blocks are given up.
_REPORT_WAIT: Final = Duration(nanos=500_000_000)


class GiveBack:
    """Leases nobody reads under, and blocks nobody will read."""

    def __init__(self, leases: LeaseApi, watch: WorkerWatch, background: Background) -> None:
        self._leases, self._watch, self._background = leases, watch, background

    def unused(self, granted: lease.Lease) -> None:
        """Release a lease that its engine surely never saw."""
        self._background.start(self._release(granted, lease.READ_OUTCOME_UNUSED), "release a lease")

    def consumed(self, granted: lease.Lease) -> None:
        """Release a lease after a read, or what counts as one."""
        self._background.start(
            self._release(granted, lease.READ_OUTCOME_CONSUMED), "release a lease"
        )

    def unless_begun(self, granted: lease.Lease) -> None:
        """Release a lease whose request is over, if its read was never begun."""
        self._background.start(self._release_unless_begun(granted), "release a lease")

    def handle(self, owner: routing.Target, params: Mapping[str, Any], key: str) -> None:
        """Have `owner` free what `params` name, unless somebody reads it already.

        `key` is the same for repetitions of this wish only.
        """
        self._background.start(self._free(owner, params, key), "free a prefill's blocks")

    async def _release(self, granted: lease.Lease, outcome: lease.ReadOutcome) -> None:
        release = lease.LeaseRelease(
            lease_id=granted.lease_id, fencing_token=granted.fencing_token, outcome=outcome
        )
        request = lease.ReleaseLeasesRequest(holder=granted.holder, releases=[release])
        try:
            await self._leases.ReleaseLeases(request)
        except (KvplaneError, TimeoutError, OSError) as error:
            log.info("a lease stays until it ends", lease=granted.lease_id, reason=str(error))

    async def _release_unless_begun(self, granted: lease.Lease) -> None:
        try:
            answer = await self._leases.GetLease(lease.GetLeaseRequest(lease_id=granted.lease_id))
        except (KvplaneError, TimeoutError, OSError) as error:
            log.info("a lease stays until it ends", lease=granted.lease_id, reason=str(error))
            return
        if answer.lease.state == lease.LEASE_STATE_GRANTED:
            await self._release(granted, lease.READ_OUTCOME_UNUSED)

    async def _free(self, owner: routing.Target, params: Mapping[str, Any], key: str) -> None:
        """Take the one lease that there is, then take it away: the owner is told to free."""
        request = lease.GrantLeaseRequest(
            request_id=f"free:{key}",
            holder=lease.Holder(
                worker_id=owner.worker_id,
                epoch=owner.epoch,
                compatibility=self._watch.compatibility(owner.worker_id),
            ),
            handle=lease.OwnedHandle(
                engine_id=params.get("remote_engine_id"),
                request_id=params.get("remote_request_id"),
            ),
            wait=_REPORT_WAIT,
        )
        try:
            answer = await self._leases.GrantLease(request)
            if answer.HasField("lease"):
                await self._leases.RevokeLease(
                    lease.RevokeLeaseRequest(lease_id=answer.lease.lease_id)
                )
        except (KvplaneError, TimeoutError, OSError) as error:
            log.info("a prefill's blocks stay until their hold ends", reason=str(error))
