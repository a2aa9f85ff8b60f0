"""Bad inputs of the lease service."""

import math
from typing import Final

from kvplane.api.lease.v1 import lease_pb2 as pb
from wire.bad import (
    COUNTS,
    DURATIONS,
    EPOCHS,
    IDENTIFIERS,
    LEAST,
    MOST,
    SIZES,
    TEXTS,
    TOKENS,
    Bad,
    bad,
    unset,
)
from wire.seed import an_ownership

HANDLES: Final = ["", "\0", "x" * 257, "é" * 129]


def _handle(at: str, **more: bool) -> list[Bad]:
    return [
        *bad(f"{at}.engine_id", *HANDLES, **more),
        *bad(f"{at}.request_id", *HANDLES, **more),
    ]


def _holder(*, compatibility: bool) -> list[Bad]:
    return [
        *unset("holder.worker_id", "holder"),
        *bad("holder.worker_id", *IDENTIFIERS),
        *bad("holder.epoch", *EPOCHS),
        *(bad("holder.compatibility", "", "a\0", "x" * 4097) if compatibility else []),
    ]


def _anchor(at: str, **more: bool) -> list[Bad]:
    field = f"{at}time_anchor"
    return [
        *unset(f"{field}.anchor", field, **more),
        *bad(f"{field}.anchor", 0, -1, LEAST, MOST, **more),
        *bad(f"{field}.elapsed", *DURATIONS, **more),
    ]


_TWO_TENANTS: Final = [an_ownership("one", name, "r", "", 0) for name in ("a", "b")]


def _reports(at: str, **more: bool) -> list[Bad]:
    """Of the fields of one reported ownership."""
    own = f"{at}ownerships[0]"
    params = f"{own}.params"
    return [
        *_anchor(at, **more),
        *bad(f"{at}ownerships", [pb.Ownership()] * 1001, **more),
        *bad(f"{own}.tenant_id", *IDENTIFIERS, "a/b", "x" * 65, **more),
        *bad(f"{own}.session_id", *IDENTIFIERS[1:], **more),
        *bad(f"{own}.turn", 0, -1, LEAST, **more),
        *bad(f"{own}.worker_id", "another", **more),
        *bad(f"{own}.epoch", 2, -1, MOST, **more),
        *bad(f"{own}.num_tokens", 0, -1, MOST, **more),
        *bad(f"{own}.digests", 321, at=f"{own}.num_tokens", **more),
        *bad(f"{own}.block_size", 0, -16, 65_537, 2**31 - 1, **more),
        *bad(f"{own}.digests", b"", b"x", b"x" * 319, b"x" * 336, b"x" * (4 << 20), **more),
        *bad(f"{own}.compatibility", "", "a\0", "x" * 4097, **more),
        *bad(f"{own}.hold", *DURATIONS, **more),
        # Twice the same handle, once another tenant's.
        Bad(f"{at}ownerships[1].tenant_id", {f"{at}ownerships": _TWO_TENANTS}, **more),
        *unset(f"{params}.remote_engine_id", params, **more),
        *bad(f"{params}.remote_engine_id", *HANDLES, **more),
        *bad(f"{params}.remote_request_id", *HANDLES, **more),
        *bad(f"{params}.remote_host", "", "\0", "x" * 256, **more),
        *bad(f"{params}.remote_port", 0, -1, 65_536, **more),
        *bad(f"{params}.tp_size", 0, -1, 65_537, **more),
        *bad(f"{params}.dcp_size", 0, -1, 65_537, **more),
        *bad(f"{params}.pp_size", 0, -1, 65_537, **more),
        *bad(f"{params}.remote_num_tokens", -1, MOST, **more),
        *bad(
            f"{params}.remote_blocks_expiry_time", math.nan, math.inf, -math.inf, **more
        ),
        *bad(f"{params}.transfer_mode", "", "\0", "x" * 65, **more),
        *bad(f"{params}.remote_block_ids", [pb.BlockGroup()] * 65, **more),
        *bad(f"{params}.remote_block_ids[0].ids", [-1], [1, LEAST], [0] * 262_145, **more),
        *bad(
            f"{params}.extra_json",
            "{", "[]", "1", "null", '"a"', "{}x", '{"a":NaN}', '{"a":Infinity}', '{"a":1e999}',
            '{"a":"' + "x" * 65_536 + '"}', '{"a":' + "[" * 5000 + "]" * 5000 + "}",
            **more,
        ),
    ]  # fmt: skip


_TWICE = pb.OwnedHandle(engine_id="e", request_id="r")

LEASE: Final[dict[str, list[Bad]]] = {
    "ReportOwnership": [
        *bad("worker_id", *IDENTIFIERS),
        *bad("epoch", *EPOCHS),
        *_reports(""),
    ],
    "WithdrawOwnership": [
        *bad("worker_id", *IDENTIFIERS),
        *bad("epoch", *EPOCHS),
        *bad("handles", [_TWICE] * 1001),
        *_handle("handles[1]"),
        *unset("handles[0].engine_id", "handles[0].engine_id"),
    ],
    "GetOwnership": bad("ownership_id", *TEXTS),
    "ListOwnerships": [
        *bad("session_id", *TEXTS[1:]),
        *bad("worker_id", *TEXTS[1:]),
        *bad("states", [0], [99], [1, -1]),
        *bad("states", [1] * 1001, says="at most"),
        *bad("page_size", *SIZES),
        *bad("page_token", *TOKENS),
    ],
    "GrantLease": [
        *bad("request_id", *TEXTS),
        *_holder(compatibility=True),
        *unset("target", "handle"),
        *_handle("handle"),
        *bad("ownership_id", *TEXTS),
        *bad("session_id", *TEXTS),
        *bad("ttl", *DURATIONS),
        *bad("min_tokens", *COUNTS),
        *bad("wait", *DURATIONS),
    ],
    "BeginRead": [
        *bad("lease_id", *TEXTS),
        *bad("fencing_token", 0, -1, LEAST),
        *_holder(compatibility=True),
        *bad("holder.compatibility", "other"),
        *bad("ttl", *DURATIONS),
    ],
    "RenewLeases": [
        *_holder(compatibility=False),
        *bad("leases", [pb.LeaseRef(lease_id="l", fencing_token=1)] * 1001),
        *bad("leases[0].lease_id", *TEXTS),
        *bad("leases[0].fencing_token", 0, -1, LEAST),
        *bad("ttl", *DURATIONS),
    ],
    "ReleaseLeases": [
        *_holder(compatibility=False),
        *bad("releases", [pb.LeaseRelease(lease_id="l", fencing_token=1, outcome=1)] * 1001),
        *bad("releases[0].lease_id", *TEXTS),
        *bad("releases[0].fencing_token", 0, -1, LEAST),
        *bad("releases[0].outcome", 0, 4, -1),
    ],
    "RevokeLease": bad("lease_id", *TEXTS),
    "GetLease": bad("lease_id", *TEXTS),
    "ListLeases": [
        *bad("session_id", *TEXTS[1:]),
        *bad("worker_id", *TEXTS[1:]),
        *bad("states", [0], [99], [1, -1]),
        *bad("states", [1] * 1001, says="at most"),
        *bad("page_size", *SIZES),
        *bad("page_token", *TOKENS),
    ],
    "ExtendHold": [
        *bad("session_id", *TEXTS),
        *unset("hold", "hold"),
        *bad("hold", *DURATIONS),
    ],
    "FreeSession": bad("session_id", *TEXTS),
    "GetUsage": [],
    "EndWorkerEpoch": [
        *bad("worker_id", *IDENTIFIERS),
        *bad("current_epoch", *EPOCHS),
    ],
    "Connect": [
        *unset("hello", "hello"),
        *bad("hello", pb.Report(), at="report"),
        *bad("hello.worker_id", *IDENTIFIERS),
        *bad("hello.epoch", *EPOCHS),
        *bad("hello.held", [_TWICE] * 20_001),
        *_handle("hello.held[0]"),
        *unset("message", "command_ack", later=True),
        *bad("message", pb.Hello(worker_id="again", epoch=1, number=1), at="hello", later=True),
        *_reports("report.", later=True),
        *bad("withdraw.handles", [_TWICE] * 1001, later=True),
        *_handle("withdraw.handles[0]", later=True),
        *bad("command_ack.command_id", *TEXTS, later=True),
        *bad("command_ack.hold", *DURATIONS, later=True),
        *_anchor("command_ack.", later=True),
    ],
}
