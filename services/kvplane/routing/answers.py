"""Route's answer: targets with headers, kv_transfer_params for both legs, the reason."""

import json

from kvplane.api.lease.v1 import lease_pb2
from kvplane.api.routing.v1 import routing_pb2
from kvplane.routing.domain import Worker
from kvplane.routing.peers import Granted
from kvplane.routing.policy import Choice, Reason, Turn

_encode = json.JSONEncoder(separators=(",", ":")).encode


def make_answer(
    tenant_id: str, choice: Choice, turn: Turn | None, reason: Reason, granted: Granted | None
) -> routing_pb2.RouteResponse:
    """Put the answer together. A lease goes into the prefill leg's params only.

    Without a session the params still carry our key: the decode's connector needs a
    lease for what this turn's prefill holds, though nobody can come back to it.
    """
    session_id, number = (turn.session_id, turn.turn) if turn is not None else ("", 0)
    tag: dict[str, str | int] = {"tenant": tenant_id, "session": session_id, "turn": number}
    extra = _encode({"kvplane": tag})
    answer = routing_pb2.RouteResponse(
        session_id=session_id,
        turn=number,
        decode=_target(choice.decode),
        decision=routing_pb2.DECISION_REUSE if granted else routing_pb2.DECISION_RECOMPUTE,
        reason=f"DECISION_REASON_{reason.name}",
        decode_params=lease_pb2.KvTransferParams(extra_json=extra),
    )
    if choice.prefill is not None:
        if granted is not None:
            answer.lease.CopyFrom(granted.lease)
            answer.held_tokens = granted.held_tokens
            tag["lease_id"] = granted.lease.lease_id
            tag["fencing_token"] = granted.lease.fencing_token
            extra = _encode({"kvplane": tag})
        answer.prefill.CopyFrom(_target(choice.prefill))
        answer.prefill_params.do_remote_decode = True
        answer.prefill_params.do_remote_prefill = False
        answer.prefill_params.extra_json = extra
    return answer


def replay(stored: bytes, age_us: int) -> routing_pb2.RouteResponse:
    """Read a kept answer; what was left of its lease has become less since."""
    answer = routing_pb2.RouteResponse.FromString(stored)
    if age_us and answer.HasField("lease"):
        left = answer.lease.ttl.ToMicroseconds() - age_us
        answer.lease.ttl.FromMicroseconds(max(0, left))
    return answer


def _target(worker: Worker) -> routing_pb2.Target:
    rank = worker.profile.data_parallel_rank
    return routing_pb2.Target(
        worker_id=worker.worker_id,
        epoch=worker.epoch,
        url=worker.profile.url,
        headers={} if rank is None else {"X-data-parallel-rank": str(rank)},
        managed=worker.profile.managed,
    )
