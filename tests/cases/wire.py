"""Reports, grants and renewals over the wire, as workers make them."""

from collections.abc import Sequence

from kvplane.api.lease.v1 import lease_pb2 as lease
from kvplane.client import KvplaneClient

SAME = "same"


async def report(kv: KvplaneClient, worker_id: str, names: Sequence[str], hold: int = 3600) -> None:
    """Report one held block for each of some sessions."""
    request = lease.ReportOwnershipRequest(worker_id=worker_id, epoch=1)
    request.time_anchor.anchor = 1 << 61  # as just sent
    for name in names:
        owned = request.ownerships.add(
            tenant_id="default",
            session_id=name,
            turn=1,
            num_tokens=16,
            block_size=16,
            digests=bytes(16),
            compatibility=SAME,
            cuttable=True,
            params=lease.KvTransferParams(
                remote_engine_id=f"engine-{worker_id}",
                remote_request_id=name,
                remote_block_ids=[lease.BlockGroup(ids=[1])],
            ),
        )
        owned.hold.FromSeconds(hold)
    await kv.leases.ReportOwnership(request)


def holder(worker_id: str) -> lease.Holder:
    return lease.Holder(worker_id=worker_id, epoch=1, compatibility=SAME)


async def grant(kv: KvplaneClient, session: str, number: int, ttl: int = 60) -> lease.Lease:
    request = lease.GrantLeaseRequest(
        request_id=f"{session}-{number}", session_id=session, holder=holder("reader")
    )
    request.ttl.FromSeconds(ttl)
    answer = await kv.leases.GrantLease(request)
    assert answer.HasField("lease"), answer
    return answer.lease


async def renew(
    kv: KvplaneClient, leases: Sequence[lease.Lease], ttl: float
) -> list[lease.RenewResult]:
    refs = [lease.LeaseRef(lease_id=x.lease_id, fencing_token=x.fencing_token) for x in leases]
    request = lease.RenewLeasesRequest(holder=holder("reader"), leases=refs)
    request.ttl.FromMilliseconds(round(ttl * 1000))
    return list((await kv.leases.RenewLeases(request)).results)
