"""Our errors as google.rpc.Status, the form in which they travel."""

from typing import Final

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.protobuf.message import Message
from google.rpc import code_pb2, error_details_pb2, status_pb2  # type: ignore[import-untyped]

from kvplane.kernel.errors import KvplaneError

DOMAIN: Final = "kvplane"
DETAILS_KEY: Final = "grpc-status-details-bin"
# Trailers share 8 KiB with everything else in them, and the message is in them twice.
_MAX_TEXT: Final = 1_000

CODES: Final[dict[str, grpc.StatusCode]] = {code.name: code for code in grpc.StatusCode}


def to_status(error: KvplaneError, request_id: str = "") -> status_pb2.Status:
    """Return the error with ErrorInfo, and RetryInfo and BadRequest where they apply."""
    message = _short(error.message)
    metadata = {key: _short(value) for key, value in error.metadata.items()}
    if error.reason == "INTERNAL" and request_id:
        metadata["request_id"] = request_id
    details: list[Message] = [
        error_details_pb2.ErrorInfo(reason=error.reason, domain=DOMAIN, metadata=metadata)
    ]
    if error.retry_after is not None:
        delay = duration_pb2.Duration()
        delay.FromMilliseconds(round(error.retry_after * 1000))
        details.append(error_details_pb2.RetryInfo(retry_delay=delay))
    field = metadata.get("field")
    if field:
        violation = error_details_pb2.BadRequest.FieldViolation(
            field=field, description=message.removeprefix(f"{field}: ")
        )
        details.append(error_details_pb2.BadRequest(field_violations=[violation]))
    status = status_pb2.Status(code=code_pb2.Code.Value(error.code), message=message)
    for detail in details:
        packed = any_pb2.Any()
        packed.Pack(detail)
        status.details.append(packed)
    return status


def _short(text: str) -> str:
    # Protobuf refuses lone surrogates, which a quoted input may contain.
    clean = text.encode("utf-8", "replace").decode()
    return clean if len(clean) <= _MAX_TEXT else clean[: _MAX_TEXT - 1] + "…"
