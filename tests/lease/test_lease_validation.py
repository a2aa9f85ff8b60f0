"""Each wrong field is named, and nothing is stored."""

import pytest
from google.protobuf.duration_pb2 import Duration
from kvplane.api.lease.v1 import lease_pb2 as pb
from kvplane.kernel.errors import InvalidField
from lease.harness import Plane, Replica

HOLDER = pb.Holder(worker_id="p1", epoch=1, compatibility="c")
AT = pb.TimeAnchor(anchor=1)


@pytest.fixture
def replica(sqlite: Plane) -> Replica:
    return sqlite.replica()


def broken(replica: Replica, **fields) -> pb.Ownership:
    own = replica.ownership("r1")
    own.MergeFrom(pb.Ownership(**fields))
    for name, value in fields.items():
        if not isinstance(value, pb.KvTransferParams | Duration):
            setattr(own, name, value)
    return own


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"tenant_id": ""}, "tenant_id"),
        ({"tenant_id": "no spaces"}, "tenant_id"),
        ({"tenant_id": "x" * 129}, "tenant_id"),
        ({"session_id": "\0"}, "session_id"),
        ({"turn": 0}, "turn"),
        ({"turn": -1}, "turn"),
        ({"worker_id": "d2"}, "worker_id"),
        ({"epoch": 2}, "epoch"),
        ({"num_tokens": 0}, "num_tokens"),
        ({"num_tokens": -5}, "num_tokens"),
        ({"block_size": 0}, "block_size"),
        ({"block_size": 1 << 20}, "block_size"),
        ({"digests": b""}, "digests"),
        ({"digests": bytes(47)}, "digests"),
        ({"digests": bytes(64)}, "digests"),
        ({"digests": bytes((4 << 20) + 16)}, "digests"),
        ({"compatibility": ""}, "compatibility"),
        ({"compatibility": "x" * 5000}, "compatibility"),
        ({"compatibility": "a\0b"}, "compatibility"),
        ({"hold": Duration(seconds=-1)}, "hold"),
        ({"hold": Duration(seconds=1 << 40)}, "hold"),
        ({"params": pb.KvTransferParams(remote_engine_id="")}, "params.remote_engine_id"),
        ({"params": pb.KvTransferParams(remote_request_id="x" * 300)}, "params.remote_request_id"),
        ({"params": pb.KvTransferParams(remote_host="")}, "params.remote_host"),
        ({"params": pb.KvTransferParams(remote_port=0)}, "params.remote_port"),
        ({"params": pb.KvTransferParams(remote_port=70000)}, "params.remote_port"),
        ({"params": pb.KvTransferParams(tp_size=0)}, "params.tp_size"),
        ({"params": pb.KvTransferParams(remote_num_tokens=-1)}, "params.remote_num_tokens"),
        ({"params": pb.KvTransferParams(transfer_mode="")}, "params.transfer_mode"),
        (
            {"params": pb.KvTransferParams(remote_block_ids=[pb.BlockGroup(ids=[3, -1])])},
            "params.remote_block_ids[1].ids",
        ),
        (
            {"params": pb.KvTransferParams(remote_block_ids=[pb.BlockGroup()] * 64)},
            "params.remote_block_ids",
        ),
        ({"params": pb.KvTransferParams(extra_json="[1]")}, "params.extra_json"),
        ({"params": pb.KvTransferParams(extra_json="{")}, "params.extra_json"),
        ({"params": pb.KvTransferParams(extra_json="[" * 60_000)}, "params.extra_json"),
        ({"params": pb.KvTransferParams(extra_json=" " * 70_000)}, "params.extra_json"),
    ],
)
async def test_a_wrong_report(replica: Replica, fields: dict, field: str):
    good = replica.ownership("r0")
    with pytest.raises(InvalidField) as error:
        await replica.report(good, broken(replica, **fields))
    assert error.value.metadata["field"] == f"ownerships[1].{field}"
    assert await replica.execute("SELECT * FROM ownerships") == []


@pytest.mark.parametrize(
    ("rpc", "request_", "field"),
    [
        ("ReportOwnership", pb.ReportOwnershipRequest(epoch=1), "worker_id"),
        ("ReportOwnership", pb.ReportOwnershipRequest(worker_id="d1"), "epoch"),
        ("ReportOwnership", pb.ReportOwnershipRequest(worker_id="-d", epoch=1), "worker_id"),
        (
            "ReportOwnership",
            pb.ReportOwnershipRequest(
                worker_id="d1", epoch=1, time_anchor=AT, ownerships=[pb.Ownership()] * 1001
            ),
            "ownerships",
        ),
        (
            "ReportOwnership",
            pb.ReportOwnershipRequest(
                worker_id="d1",
                epoch=1,
                time_anchor=pb.TimeAnchor(anchor=1, elapsed=Duration(seconds=-1)),
            ),
            "time_anchor.elapsed",
        ),
        (
            "WithdrawOwnership",
            pb.WithdrawOwnershipRequest(
                worker_id="d1", epoch=1, handles=[pb.OwnedHandle(engine_id="e")]
            ),
            "handles[0].request_id",
        ),
        (
            "WithdrawOwnership",
            pb.WithdrawOwnershipRequest(
                worker_id="d1", epoch=1, handles=[pb.OwnedHandle(engine_id="e")] * 1001
            ),
            "handles",
        ),
        ("GetOwnership", pb.GetOwnershipRequest(), "ownership_id"),
        ("ListOwnerships", pb.ListOwnershipsRequest(page_size=1001), "page_size"),
        ("ListOwnerships", pb.ListOwnershipsRequest(page_size=-1), "page_size"),
        ("ListOwnerships", pb.ListOwnershipsRequest(page_token="nonsense"), "page_token"),
        ("ListOwnerships", pb.ListOwnershipsRequest(page_token="é"), "page_token"),
        ("ListOwnerships", pb.ListOwnershipsRequest(states=[0]), "states"),
        ("ListOwnerships", pb.ListOwnershipsRequest(session_id="\0"), "session_id"),
        ("GrantLease", pb.GrantLeaseRequest(holder=HOLDER, session_id="s"), "request_id"),
        (
            "GrantLease",
            pb.GrantLeaseRequest(request_id="q" * 129, holder=HOLDER, session_id="s"),
            "request_id",
        ),
        ("GrantLease", pb.GrantLeaseRequest(request_id="q", holder=HOLDER), "target"),
        ("GrantLease", pb.GrantLeaseRequest(request_id="q", session_id="s"), "holder.worker_id"),
        (
            "GrantLease",
            pb.GrantLeaseRequest(
                request_id="q", session_id="s", holder=pb.Holder(worker_id="p", epoch=1)
            ),
            "holder.compatibility",
        ),
        (
            "GrantLease",
            pb.GrantLeaseRequest(request_id="q", holder=HOLDER, handle=pb.OwnedHandle()),
            "handle.engine_id",
        ),
        (
            "GrantLease",
            pb.GrantLeaseRequest(request_id="q", holder=HOLDER, session_id=""),
            "session_id",
        ),
        (
            "GrantLease",
            pb.GrantLeaseRequest(
                request_id="q", holder=HOLDER, session_id="s", ttl=Duration(nanos=-1)
            ),
            "ttl",
        ),
        (
            "GrantLease",
            pb.GrantLeaseRequest(request_id="q", holder=HOLDER, session_id="s", min_tokens=-1),
            "min_tokens",
        ),
        ("BeginRead", pb.BeginReadRequest(holder=HOLDER), "lease_id"),
        ("BeginRead", pb.BeginReadRequest(lease_id="l", fencing_token=1), "holder.worker_id"),
        ("RenewLeases", pb.RenewLeasesRequest(leases=[pb.LeaseRef()]), "holder.worker_id"),
        (
            "RenewLeases",
            pb.RenewLeasesRequest(holder=HOLDER, leases=[pb.LeaseRef()]),
            "leases[0].lease_id",
        ),
        (
            "RenewLeases",
            pb.RenewLeasesRequest(holder=HOLDER, leases=[pb.LeaseRef(lease_id="l")] * 1001),
            "leases",
        ),
        (
            "ReleaseLeases",
            pb.ReleaseLeasesRequest(
                holder=HOLDER, releases=[pb.LeaseRelease(lease_id="l", fencing_token=1)]
            ),
            "releases[0].outcome",
        ),
        (
            "ReleaseLeases",
            pb.ReleaseLeasesRequest(holder=HOLDER, releases=[pb.LeaseRelease(outcome=1)] * 1001),
            "releases",
        ),
        ("RevokeLease", pb.RevokeLeaseRequest(), "lease_id"),
        ("GetLease", pb.GetLeaseRequest(lease_id="x" * 200), "lease_id"),
        ("ListLeases", pb.ListLeasesRequest(states=[9]), "states"),
        ("ListLeases", pb.ListLeasesRequest(worker_id="x" * 200), "worker_id"),
        ("ExtendHold", pb.ExtendHoldRequest(hold=Duration(seconds=1)), "session_id"),
        ("ExtendHold", pb.ExtendHoldRequest(session_id="s"), "hold"),
        ("FreeSession", pb.FreeSessionRequest(), "session_id"),
        ("EndWorkerEpoch", pb.EndWorkerEpochRequest(current_epoch=1), "worker_id"),
        ("EndWorkerEpoch", pb.EndWorkerEpochRequest(worker_id="d1"), "current_epoch"),
    ],
)
async def test_a_wrong_request(replica: Replica, rpc: str, request_, field: str):
    with pytest.raises(InvalidField) as error:
        await getattr(replica.rpc, rpc)(request_)
    assert error.value.metadata["field"] == field
    assert await replica.execute("SELECT * FROM worker_epochs") == []


async def test_a_report_of_the_largest_size_is_taken(replica: Replica):
    (own,) = await replica.report(replica.ownership("r1", tokens=(4 << 20)))
    assert len((await replica.owned(own)).digests) == 4 << 20


async def test_empty_batches_are_answered_empty(replica: Replica):
    assert await replica.renew() == []
    assert await replica.release() == []
    assert await replica.withdraw() == []
    assert await replica.report() == []


async def test_a_full_batch_is_taken(replica: Replica):
    own = [replica.ownership(f"r{n}", f"s{n}", tokens=16) for n in range(1000)]
    assert len(await replica.report(*own)) == 1000
    await replica.rpc.FreeSession(pb.FreeSessionRequest(session_id="s999"))
    states = await replica.withdraw(*(f"r{n}" for n in range(1000)))
    assert states == [pb.OWNERSHIP_STATE_EXPIRED] * 999 + [pb.OWNERSHIP_STATE_RELEASED]
