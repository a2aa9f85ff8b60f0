"""The table of permissions against all descriptors."""

import pytest
from google.protobuf.descriptor import Descriptor
from kvplane.api.audit.v1 import audit_pb2
from kvplane.api.lease.v1 import lease_pb2
from kvplane.api.routing.v1 import routing_pb2
from kvplane.api.session.v1 import session_pb2
from kvplane.api.tenant.v1 import tenant_pb2
from kvplane.kernel.context import Caller, Role
from kvplane.kernel.errors import PermissionDenied
from kvplane.runtime import permissions

METHODS = {
    f"/{service.full_name}/{method.name}": method
    for module in (audit_pb2, lease_pb2, routing_pb2, session_pb2, tenant_pb2)
    for service in module.DESCRIPTOR.services_by_name.values()
    for method in service.methods
}
WORKERS = sorted(name for name, roles in permissions.ROLES.items() if Role.WORKER in roles)


def test_every_rpc_has_roles():
    assert permissions.ROLES.keys() == METHODS.keys()
    assert all(permissions.ROLES.values())


def naming_workers(message: Descriptor, seen: tuple[str, ...] = ()) -> set[str]:
    """Return the messages within `message` that have a field naming workers."""
    if message.full_name in seen:
        return set()
    found = {
        f"{message.full_name}.{field.name}" for field in message.fields if "worker" in field.name
    }
    for field in message.fields:
        if field.message_type is not None:
            found |= naming_workers(field.message_type, (*seen, message.full_name))
    return found


@pytest.mark.parametrize("name", WORKERS)
def test_no_worker_of_a_workers_request_is_overlooked(name):
    """A nested message is no id: `worker` of RegisterWorkerRequest is walked into."""
    known = {f"{message}.worker_id" for message in permissions.ACTING | permissions.HARMLESS}
    wanted = METHODS[name].input_type
    found = naming_workers(wanted) - {"kvplane.api.routing.v1.RegisterWorkerRequest.worker"}
    assert found <= known
    assert found & {f"{message}.worker_id" for message in permissions.ACTING}
    assert permissions.worker_paths(name)


def test_every_message_that_is_listed_is_in_a_workers_request():
    listed = permissions.ACTING | permissions.HARMLESS
    found = {part.rpartition(".")[0] for name in WORKERS for part in naming_workers(
        METHODS[name].input_type
    )}  # fmt: skip
    assert listed <= found


W2 = "w2"
REQUESTS = {
    "lease.v1.LeaseService/ReportOwnership": lease_pb2.ReportOwnershipRequest(worker_id=W2),
    "lease.v1.LeaseService/WithdrawOwnership": lease_pb2.WithdrawOwnershipRequest(worker_id=W2),
    "lease.v1.LeaseService/GrantLease": lease_pb2.GrantLeaseRequest(
        holder=lease_pb2.Holder(worker_id=W2)
    ),
    "lease.v1.LeaseService/BeginRead": lease_pb2.BeginReadRequest(
        holder=lease_pb2.Holder(worker_id=W2)
    ),
    "lease.v1.LeaseService/RenewLeases": lease_pb2.RenewLeasesRequest(
        holder=lease_pb2.Holder(worker_id=W2)
    ),
    "lease.v1.LeaseService/ReleaseLeases": lease_pb2.ReleaseLeasesRequest(
        holder=lease_pb2.Holder(worker_id=W2)
    ),
    "lease.v1.LeaseService/Connect": lease_pb2.ConnectRequest(hello=lease_pb2.Hello(worker_id=W2)),
    "routing.v1.WorkerService/RegisterWorker": routing_pb2.RegisterWorkerRequest(
        worker=routing_pb2.Worker(worker_id=W2)
    ),
    # One's own first: each is looked at.
    "routing.v1.WorkerService/Heartbeat": routing_pb2.HeartbeatRequest(
        beats=[routing_pb2.WorkerBeat(worker_id="w1"), routing_pb2.WorkerBeat(worker_id=W2)]
    ),
    "routing.v1.WorkerService/DeregisterWorker": routing_pb2.DeregisterWorkerRequest(worker_id=W2),
}


def test_requests_of_all_rpcs_of_workers_are_tried():
    assert {f"/kvplane.api.{name}" for name in REQUESTS} == set(WORKERS)


@pytest.mark.parametrize("name", REQUESTS)
def test_another_worker_is_refused_wherever_it_is_named(name):
    method, request = f"/kvplane.api.{name}", REQUESTS[name]
    with pytest.raises(PermissionDenied, match="for worker 'w1' only"):
        permissions.check_worker(Caller(worker_id="w1"), method, request)
    permissions.check_worker(Caller(worker_id=W2), method, type(request)())
    permissions.check_worker(Caller(), method, request)


def test_an_unknown_rpc_is_nobodys():
    with pytest.raises(PermissionDenied, match="no role at all"):
        permissions.check_role(Caller(), "/kvplane.api.lease.v1.LeaseService/Nothing")
