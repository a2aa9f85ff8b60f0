"""What came over the wire, back into the error that the server raised."""

from typing import Final

import grpc
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2  # type: ignore[import-untyped]

from kvplane.client.tls import explain
from kvplane.kernel.errors import ERRORS_BY_REASON, KvplaneError, rebuild

_DETAILS_KEY: Final = "grpc-status-details-bin"

# A peer that is not ours (a proxy, gRPC itself) sends a code without a reason.
_REASON_BY_CODE: Final = {
    grpc.StatusCode.INVALID_ARGUMENT: "INVALID_FIELD",
    grpc.StatusCode.OUT_OF_RANGE: "INVALID_FIELD",
    grpc.StatusCode.NOT_FOUND: "NOT_FOUND",
    grpc.StatusCode.ALREADY_EXISTS: "ALREADY_EXISTS",
    grpc.StatusCode.FAILED_PRECONDITION: "ILLEGAL_TRANSITION",
    grpc.StatusCode.RESOURCE_EXHAUSTED: "QUOTA_EXCEEDED",
    grpc.StatusCode.UNAUTHENTICATED: "UNAUTHENTICATED",
    grpc.StatusCode.PERMISSION_DENIED: "PERMISSION_DENIED",
    grpc.StatusCode.UNAVAILABLE: "UNAVAILABLE",
    # No answer in time: whether it was done is not known, as with UNAVAILABLE.
    grpc.StatusCode.DEADLINE_EXCEEDED: "UNAVAILABLE",
    grpc.StatusCode.CANCELLED: "UNAVAILABLE",
}


def from_rpc_error(error: grpc.aio.AioRpcError, *, encrypted: bool = False) -> KvplaneError:
    """Return the KvplaneError that `error` stands for. Never raises.

    `encrypted`: the call went over TLS. What is wrong with a connection's TLS is said in
    our words, and `metadata` has the key ``tls``.
    """
    message = error.details() or error.code().name
    metadata: dict[str, str] = {}
    retry_after: float | None = None
    reason = ""
    status = _status(error)
    if status is not None:
        message = status.message or message
        info = error_details_pb2.ErrorInfo()
        retry = error_details_pb2.RetryInfo()
        for detail in status.details:
            if detail.Is(info.DESCRIPTOR) and detail.Unpack(info):
                reason, metadata = info.reason, dict(info.metadata)
            elif detail.Is(retry.DESCRIPTOR) and detail.Unpack(retry):
                retry_after = retry.retry_delay.seconds + retry.retry_delay.nanos / 1e9
    if reason not in ERRORS_BY_REASON:  # none, or a newer server's
        reason = _REASON_BY_CODE.get(error.code(), "INTERNAL")
    if status is None and reason == "UNAVAILABLE":
        wrong = explain(message, encrypted=encrypted)
        if wrong is not None:
            message, metadata = wrong, {"tls": "on" if encrypted else "off"}
    return rebuild(reason, message, metadata, retry_after)


def _status(error: grpc.aio.AioRpcError) -> status_pb2.Status | None:
    for key, value in error.trailing_metadata() or ():
        if key == _DETAILS_KEY and isinstance(value, bytes):
            try:
                return status_pb2.Status.FromString(value)
            except DecodeError:
                return None
    return None
