"""Something of every kind in the control plane, and right requests about it."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from kvplane.api.audit.v1 import audit_pb2 as audit
from kvplane.api.lease.v1 import lease_pb2 as lease
from kvplane.api.routing.v1 import routing_pb2 as routing
from kvplane.api.session.v1 import session_pb2 as session
from kvplane.api.tenant.v1 import tenant_pb2 as tenant
from kvplane.kernel.compat import compatibility_key
from wire.plane import Plane

MODEL: Final = "tiny"
BLOCK: Final = 16
TOKENS: Final = 320
_STREAMS: Final = itertools.count(1)  # a worker's later stream has a higher number
COMPATIBILITY: Final = compatibility_key(
    model=MODEL,
    revision="r1",
    block_size=BLOCK,
    kv_layout="HND",
    kv_dtype="bfloat16",
    engine_version="0.32",
)


@dataclass(frozen=True)
class Seed:
    """What `sow` has made. Its tag is in every name."""

    tag: str
    tenant: str
    anchor: int
    # Of turn 1, which is complete, and turn 2, which is open.
    session_id: str
    # Of turn 1, held by the decode worker.
    held: lease.Ownership
    # Another session's, leased to the prefill worker.
    granted: lease.Lease
    key_id: str
    secret: str

    @property
    def prefill(self) -> str:
        return f"p-{self.tag}"

    @property
    def decode(self) -> str:
        return f"d-{self.tag}"

    def holder(self) -> lease.Holder:
        return lease.Holder(worker_id=self.prefill, epoch=1, compatibility=COMPATIBILITY)

    def handle(self) -> lease.OwnedHandle:
        """The engine's name of `held`."""
        return lease.OwnedHandle(
            engine_id=f"engine-d-{self.tag}", request_id=f"request0-{self.tag}"
        )

    def ownership(self, request_id: str, session_id: str = "", turn: int = 1) -> lease.Ownership:
        return an_ownership(self.tag, self.tenant, request_id, session_id, turn)

    def ref(self) -> dict[str, Any]:
        """The lease that is granted, as the holder names it."""
        return {
            "lease_id": self.granted.lease_id,
            "fencing_token": self.granted.fencing_token,
        }


def worker(worker_id: str, role: Any) -> routing.Worker:
    """What a worker says of itself."""
    return routing.Worker(
        worker_id=worker_id,
        role=role,
        url="http://127.0.0.1:9",
        kv_host="127.0.0.1",
        kv_port=5600,
        engine_id=f"engine-{worker_id}",
        compatibility=routing.Compatibility(
            model=MODEL,
            revision="r1",
            block_size=BLOCK,
            kv_layout="HND",
            kv_dtype="bfloat16",
            engine_version="0.32",
        ),
        bidirectional=True,
        managed=True,
        max_model_len=8192,
        recompute_threshold=64,
        served_models=[MODEL],
    )


def an_ownership(
    tag: str, tenant_id: str, request_id: str, session_id: str, turn: int
) -> lease.Ownership:
    blocks = TOKENS // BLOCK
    return lease.Ownership(
        tenant_id=tenant_id,
        session_id=session_id,
        turn=turn,
        params=lease.KvTransferParams(
            remote_engine_id=f"engine-d-{tag}",
            remote_request_id=request_id,
            remote_host="127.0.0.1",
            remote_port=5600,
            tp_size=1,
            dcp_size=1,
            pp_size=1,
            remote_num_tokens=TOKENS,
            remote_blocks_expiry_time=12.5,
            remote_registration_generation=1,
            transfer_mode="read",
            remote_block_ids=[lease.BlockGroup(ids=range(blocks))],
            extra_json='{"more":1}',
        ),
        num_tokens=TOKENS,
        block_size=BLOCK,
        digests=bytes(range(16)) * blocks,
        compatibility=COMPATIBILITY,
        cuttable=True,
        hold=Duration(seconds=400),
    )


async def sow(plane: Plane, tag: str, tenant_id: str = "default") -> Seed:
    """Make it all, over the wire. The same tenant with another tag shares nothing."""

    async def call(name: str, request: Message) -> Any:
        return await plane.call(name, request, tenant=tenant_id)

    for role, name in (
        (routing.WORKER_ROLE_PREFILL, f"p-{tag}"),
        (routing.WORKER_ROLE_DECODE, f"d-{tag}"),
    ):
        await call(
            "WorkerService/RegisterWorker",
            routing.RegisterWorkerRequest(worker=worker(name, role), instance_id=f"i-{tag}"),
        )
    anchor = (
        await call(
            "LeaseService/ReportOwnership",
            lease.ReportOwnershipRequest(worker_id=f"d-{tag}", epoch=1),
        )
    ).anchor
    sessions = []
    for which in ("held", "leased"):
        key = session.SessionKey(name=f"{which}-{tag}")
        for turn in (1, 2):
            begun = await call(
                "SessionService/BeginTurn",
                session.BeginTurnRequest(request_id=f"{which}{turn}-{tag}", key=key, model=MODEL),
            )
            if turn == 1:
                done = session.CompleteTurnRequest(
                    session_id=begun.session.session_id, turn=1, outcome=session.TURN_OUTCOME_OK,
                    prompt_tokens=TOKENS, decode_worker_id=f"d-{tag}",
                )  # fmt: skip
                await call("SessionService/CompleteTurn", done)
        sessions.append(begun.session.session_id)
    reported = await call(
        "LeaseService/ReportOwnership",
        lease.ReportOwnershipRequest(
            worker_id=f"d-{tag}",
            epoch=1,
            time_anchor=lease.TimeAnchor(anchor=anchor),
            ownerships=[
                an_ownership(tag, tenant_id, f"request{number}-{tag}", session_id, 1)
                for number, session_id in enumerate(sessions)
            ],
        ),
    )
    granted = await call(
        "LeaseService/GrantLease",
        lease.GrantLeaseRequest(
            request_id=f"grant-{tag}",
            holder=lease.Holder(worker_id=f"p-{tag}", epoch=1, compatibility=COMPATIBILITY),
            session_id=sessions[1],
        ),
    )
    assert granted.HasField("lease"), granted
    if tenant_id != "default":
        await call("TenantService/CreateTenant", tenant.CreateTenantRequest(tenant_id=tenant_id))
    made = await call("TenantService/CreateApiKey", tenant.CreateApiKeyRequest(tenant_id=tenant_id))
    return Seed(
        tag=tag,
        tenant=tenant_id,
        anchor=anchor,
        session_id=sessions[0],
        held=reported.ownerships[0],
        granted=granted.lease,
        key_id=made.api_key.key_id,
        secret=made.secret,
    )


def _turn(s: Seed) -> session.CompleteTurnRequest:
    """Of turn 2."""
    return session.CompleteTurnRequest(
        session_id=s.session_id,
        turn=2,
        outcome=session.TURN_OUTCOME_OK,
        prompt_tokens=400,
        completion_tokens=20,
        tokens_reused=304,
        history_digest=b"h" * 16,
        prefill_worker_id=s.prefill,
        decode_worker_id=s.decode,
        time_to_first_token=Duration(nanos=5_000_000),
    )


Right = Callable[[Seed], Message]

# For each RPC a request that is taken as it is.
RIGHT: Final[dict[str, Right]] = {
    "LeaseService/ReportOwnership": lambda s: lease.ReportOwnershipRequest(
        worker_id=s.decode,
        epoch=1,
        time_anchor=lease.TimeAnchor(anchor=s.anchor, elapsed=Duration(seconds=1)),
        ownerships=[s.ownership(f"new-{s.tag}", s.session_id, 2)],
    ),
    "LeaseService/WithdrawOwnership": lambda s: lease.WithdrawOwnershipRequest(
        worker_id=s.decode,
        epoch=1,
        handles=[s.handle(), lease.OwnedHandle(engine_id="e", request_id="never reported")],
    ),
    "LeaseService/GetOwnership": lambda s: lease.GetOwnershipRequest(
        ownership_id=s.held.ownership_id
    ),
    "LeaseService/ListOwnerships": lambda s: lease.ListOwnershipsRequest(
        session_id=s.session_id, worker_id=s.decode, states=[lease.OWNERSHIP_STATE_HELD]
    ),
    "LeaseService/GrantLease": lambda s: lease.GrantLeaseRequest(
        request_id=f"ask-{s.tag}", holder=s.holder(), handle=s.handle(),
        ttl=Duration(seconds=5), min_tokens=16, begin_read=True,
    ),
    "LeaseService/BeginRead": lambda s: lease.BeginReadRequest(
        **s.ref(), holder=s.holder(), ttl=Duration(seconds=5)
    ),
    "LeaseService/RenewLeases": lambda s: lease.RenewLeasesRequest(
        holder=s.holder(), leases=[lease.LeaseRef(**s.ref())], ttl=Duration(seconds=20)
    ),
    "LeaseService/ReleaseLeases": lambda s: lease.ReleaseLeasesRequest(
        holder=s.holder(),
        releases=[lease.LeaseRelease(**s.ref(), outcome=lease.READ_OUTCOME_CONSUMED)],
    ),
    "LeaseService/RevokeLease": lambda s: lease.RevokeLeaseRequest(lease_id=s.granted.lease_id),
    "LeaseService/GetLease": lambda s: lease.GetLeaseRequest(lease_id=s.granted.lease_id),
    "LeaseService/ListLeases": lambda s: lease.ListLeasesRequest(
        worker_id=s.prefill, states=[lease.LEASE_STATE_GRANTED]
    ),
    "LeaseService/ExtendHold": lambda s: lease.ExtendHoldRequest(
        session_id=s.session_id, hold=Duration(seconds=900)
    ),
    "LeaseService/FreeSession": lambda s: lease.FreeSessionRequest(session_id=s.session_id),
    "LeaseService/GetUsage": lambda s: lease.GetUsageRequest(),
    "LeaseService/EndWorkerEpoch": lambda s: lease.EndWorkerEpochRequest(
        worker_id=s.decode, current_epoch=2
    ),
    "LeaseService/Connect": lambda s: lease.ConnectRequest(
        hello=lease.Hello(
            worker_id=s.decode, epoch=1, held=[s.handle()], number=next(_STREAMS)
        )
    ),
    "RoutingService/Route": lambda s: routing.RouteRequest(
        request_id=f"route-{s.tag}",
        session=session.SessionKey(name=f"held-{s.tag}"),
        model=MODEL,
        prompt_tokens_estimate=400,
        exclude_worker_ids=["somebody"],
    ),
    "RoutingService/Complete": lambda s: routing.CompleteRequest(turn=_turn(s)),
    "WorkerService/RegisterWorker": lambda s: routing.RegisterWorkerRequest(
        worker=worker(f"new-{s.tag}", routing.WORKER_ROLE_BOTH), instance_id="i"
    ),
    "WorkerService/Heartbeat": lambda s: routing.HeartbeatRequest(
        beats=[
            routing.WorkerBeat(
                worker_id=s.decode, epoch=1, load=routing.Load(running=1, kv_usage=0.5, held=2)
            )
        ]
    ),
    "WorkerService/DrainWorker": lambda s: routing.DrainWorkerRequest(worker_id=s.decode),
    "WorkerService/DeregisterWorker": lambda s: routing.DeregisterWorkerRequest(
        worker_id=s.prefill, epoch=1
    ),
    "WorkerService/GetWorker": lambda s: routing.GetWorkerRequest(worker_id=s.decode),
    "WorkerService/ListWorkers": lambda s: routing.ListWorkersRequest(
        role=routing.WORKER_ROLE_DECODE, states=[routing.WORKER_STATE_READY], model=MODEL
    ),
    "SessionService/CreateSession": lambda s: session.CreateSessionRequest(
        name=f"new-{s.tag}", model=MODEL
    ),
    "SessionService/GetSession": lambda s: session.GetSessionRequest(session_id=s.session_id),
    "SessionService/ListSessions": lambda s: session.ListSessionsRequest(
        states=[session.SESSION_STATE_ACTIVE], model=MODEL, worker_id=s.decode
    ),
    "SessionService/EndSession": lambda s: session.EndSessionRequest(session_id=s.session_id),
    "SessionService/WatchSessions": lambda s: session.WatchSessionsRequest(
        session_id=s.session_id
    ),
    "SessionService/BeginTurn": lambda s: session.BeginTurnRequest(
        request_id=f"turn-{s.tag}",
        key=session.SessionKey(history=[b"h" * 16, b"i" * 16]),
        model=MODEL,
    ),
    "SessionService/CompleteTurn": _turn,
    "SessionService/GetUsage": lambda s: session.GetUsageRequest(),
    "TenantService/CreateTenant": lambda s: tenant.CreateTenantRequest(
        tenant_id=f"new-{s.tag}", display_name="New"
    ),
    "TenantService/GetTenant": lambda s: tenant.GetTenantRequest(tenant_id=s.tenant),
    "TenantService/ListTenants": lambda s: tenant.ListTenantsRequest(page_size=10),
    "TenantService/CreateApiKey": lambda s: tenant.CreateApiKeyRequest(tenant_id=s.tenant),
    "TenantService/ListApiKeys": lambda s: tenant.ListApiKeysRequest(tenant_id=s.tenant),
    "TenantService/RevokeApiKey": lambda s: tenant.RevokeApiKeyRequest(key_id=s.key_id),
    "TenantService/ResolveApiKey": lambda s: tenant.ResolveApiKeyRequest(secret=s.secret),
    "TenantService/GetQuotas": lambda s: tenant.GetQuotasRequest(tenant_id=s.tenant),
    "TenantService/SetQuotas": lambda s: tenant.SetQuotasRequest(
        tenant_id=s.tenant,
        quotas=tenant.Quotas(
            soft=tenant.Limits(sessions=1000), hard=tenant.Limits(tokens_per_second=1e9)
        ),
    ),
    "TenantService/RotateCacheSalt": lambda s: tenant.RotateCacheSaltRequest(tenant_id=s.tenant),
    "AuditService/ListAuditEvents": lambda s: audit.ListAuditEventsRequest(
        tenant_id=s.tenant, actor="local", action="TenantService/CreateApiKey", page_size=10
    ),
}  # fmt: skip
