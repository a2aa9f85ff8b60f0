"""The one family of errors. Each knows its gRPC code by name and its reason.

`reason` is a kvplane.api.error.v1.ErrorReason without its prefix. The runtime turns
these into google.rpc.Status, the client turns that back into these.
"""


class KvplaneError(Exception):
    """Something that a caller is told: a code, a reason, a sentence, some metadata."""

    code = "INTERNAL"
    reason = "INTERNAL"

    def __init__(
        self,
        message: str,
        *,
        metadata: dict[str, str] | None = None,
        retry_after: float | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.metadata = metadata or {}
        self.retry_after = retry_after


class InvalidField(KvplaneError):
    """A field of the request is wrong; the message names it and the fix."""

    code = "INVALID_ARGUMENT"
    reason = "INVALID_FIELD"

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"{field}: {problem}", metadata={"field": field})

    def within(self, prefix: str) -> "InvalidField":
        """Return the same about a message that is itself a part of another."""
        field = self.metadata["field"]
        return InvalidField(prefix + field, self.message.removeprefix(f"{field}: "))


class NotFound(KvplaneError):
    """There is no such thing, or it belongs to another tenant: the answer is the same."""

    code = "NOT_FOUND"
    reason = "NOT_FOUND"

    def __init__(self, kind: str, ident: str) -> None:
        super().__init__(f"no {kind} {ident!r}", metadata={"kind": kind, "id": ident})


class StaleEpoch(KvplaneError):
    """The worker has registered again since this message was made."""

    code = "ABORTED"
    reason = "STALE_EPOCH"

    def __init__(self, worker_id: str, epoch: int, current: int = 0) -> None:
        """`current` is the epoch that the raiser knows, 0 when it is not for all to know."""
        metadata = {"worker_id": worker_id, "epoch": str(epoch)}
        if current:
            metadata["current"] = str(current)
        super().__init__(
            f"epoch {epoch} of worker {worker_id!r} has ended; register again", metadata=metadata
        )


class StaleFencingToken(KvplaneError):
    """The caller's lease is not the newest one."""

    code = "ABORTED"
    reason = "STALE_FENCING_TOKEN"

    def __init__(self, lease_id: str) -> None:
        super().__init__(
            f"lease {lease_id!r} is held under another fencing token",
            metadata={"lease_id": lease_id},
        )


class IllegalTransition(KvplaneError):
    """What was asked cannot happen in this state."""

    code = "FAILED_PRECONDITION"
    reason = "ILLEGAL_TRANSITION"

    def __init__(self, kind: str, ident: str, state: str, wanted: str) -> None:
        super().__init__(
            f"{kind} {ident!r} is {state}: cannot {wanted}",
            metadata={"kind": kind, "id": ident, "state": state},
        )


class QuotaExceeded(KvplaneError):
    """A limit of the tenant is reached."""

    code = "RESOURCE_EXHAUSTED"
    reason = "QUOTA_EXCEEDED"


class Unavailable(KvplaneError):
    """A part of the control plane is away. Safe to retry."""

    code = "UNAVAILABLE"
    reason = "UNAVAILABLE"


class NoWorker(KvplaneError):
    """No live worker can serve the model."""

    code = "UNAVAILABLE"
    reason = "NO_WORKER"


class Unauthenticated(KvplaneError):
    """No credential, or a wrong one."""

    code = "UNAUTHENTICATED"
    reason = "UNAUTHENTICATED"


class PermissionDenied(KvplaneError):
    """A credential that does not allow this."""

    code = "PERMISSION_DENIED"
    reason = "PERMISSION_DENIED"


class AlreadyExists(KvplaneError):
    """The name is taken."""

    code = "ALREADY_EXISTS"
    reason = "ALREADY_EXISTS"

    def __init__(self, kind: str, ident: str) -> None:
        super().__init__(f"{kind} {ident!r} exists already", metadata={"kind": kind, "id": ident})


class Internal(KvplaneError):
    """Our own fault. The text says nothing of the inside."""


ERRORS_BY_REASON: dict[str, type[KvplaneError]] = {
    error.reason: error
    for error in (
        InvalidField, NotFound, StaleEpoch, StaleFencingToken, IllegalTransition, QuotaExceeded,
        Unavailable, NoWorker, Unauthenticated, PermissionDenied, AlreadyExists, Internal,
    )
}  # fmt: skip


def rebuild(
    reason: str, message: str, metadata: dict[str, str], retry_after: float | None
) -> KvplaneError:
    """Make the error again that a server raised, without running its constructor."""
    error = KvplaneError.__new__(ERRORS_BY_REASON.get(reason, Internal))
    KvplaneError.__init__(error, message, metadata=metadata, retry_after=retry_after)
    return error
