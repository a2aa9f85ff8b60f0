"""Bad inputs of routing, workers, sessions and tenants."""

import math
from typing import Final

from google.protobuf.timestamp_pb2 import Timestamp
from kvplane.api.routing.v1 import routing_pb2 as routing
from kvplane.api.session.v1 import session_pb2 as session
from wire.bad import (
    COUNTS,
    DIGESTS,
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
    duration,
    unset,
)

MODELS: Final = ["", "\0", "a\0b", "x" * 257, "é" * 129]
WORDS: Final = ["\0", "a\nb", "\x1b", "x" * 257, "é" * 129]
NAMES: Final = ["x" * 513, "é" * 257]
TENANTS: Final = [*IDENTIFIERS, "a/b", "a:b", "x" * 65]
URLS: Final = [
    "", "127.0.0.1:80", "ftp://h:1", "http://h", "http://h:0", "http://h:65536", "http://h:-1",
    "http://h:x", "http://:80", "http://h:80/v1", "http://h:80?x", "http://h:80#x",
    "http://u:p@h:80", "http://h:80\r\nX: y", "http://h\0:80", "http://[::1:80",
    "http://" + "h" * 600 + ":80", "file:///etc/passwd",
]  # fmt: skip
BEAT: Final = routing.WorkerBeat(worker_id="w", epoch=1)


def _turn(at: str) -> list[Bad]:
    return [
        *bad(f"{at}session_id", *IDENTIFIERS),
        *bad(f"{at}turn", 0, -1, LEAST, MOST),
        *bad(f"{at}request_id", "beside the session", "\0"),
        *bad(f"{at}outcome", 0, 4, -1),
        *bad(f"{at}prompt_tokens", -1, LEAST, MOST),
        *bad(f"{at}completion_tokens", -1, LEAST, MOST),
        *bad(f"{at}tokens_reused", -1, LEAST, MOST, 401),
        *bad(f"{at}history_digest", *DIGESTS),
        *bad(f"{at}prefill_worker_id", *IDENTIFIERS[1:]),
        *bad(f"{at}decode_worker_id", *IDENTIFIERS[1:]),
        *bad(f"{at}time_to_first_token", *DURATIONS, duration(86_401)),
    ]


ROUTING: Final[dict[str, list[Bad]]] = {
    "Route": [
        *bad("request_id", "", "a b", "\0", "a\n", "é", "x" * 129),
        *bad("session.name", *NAMES),
        *(
            Bad("session.history[1]", {"session": session.SessionKey(history=[b"x" * 16, digest])})
            for digest in [b"", *DIGESTS]
        ),
        Bad("session.history", {"session": session.SessionKey(history=[b"x" * 16] * 65)}),
        *bad("model", *MODELS, "\x1b"),
        *bad("prompt_tokens_estimate", -1, LEAST, MOST),
        *bad("request_bytes", -1, LEAST, MOST),
        *bad("exclude_worker_ids", ["a"] * 1001),
        *bad("exclude_worker_ids[0]", *IDENTIFIERS),
    ],
    "Complete": [
        *unset("turn", "turn"),
        *_turn("turn."),
        # A turn without a session is taken, but not in any form.
        Bad("turn.outcome", {"turn.session_id": None, "turn.turn": None, "turn.outcome": 9}),
    ],
}

WORKERS: Final[dict[str, list[Bad]]] = {
    "RegisterWorker": [
        *unset("worker", "worker"),
        *bad("instance_id", *IDENTIFIERS),
        *bad("worker.worker_id", *IDENTIFIERS),
        *bad("worker.epoch", -1, LEAST, MOST),
        *bad("worker.role", 0, 4, -1),
        *bad("worker.url", *URLS),
        *bad("worker.kv_host", "", "a/b", "a b", "\0", "x" * 257),
        *bad("worker.kv_port", 0, -1, 65_536, 2**31 - 1),
        *bad("worker.engine_id", "", *WORDS),
        *bad("worker.data_parallel_rank", -1, 65_536),
        *unset("worker.compatibility.model", "worker.compatibility"),
        *bad("worker.compatibility.model", "", *WORDS),
        *bad("worker.compatibility.revision", *WORDS),
        *bad("worker.compatibility.block_size", 0, -16, 65_537),
        *bad("worker.compatibility.kv_layout", "", *WORDS),
        *bad("worker.compatibility.kv_dtype", "", *WORDS),
        *bad("worker.compatibility.engine_version", "", *WORDS),
        *bad("worker.max_model_len", -1, LEAST, MOST),
        *bad("worker.recompute_threshold", -1, -(2**31)),
        *bad("worker.served_models", ["a"] * 65),
        *bad("worker.served_models[0]", "", *WORDS),
    ],
    "Heartbeat": [
        *bad("beats", [BEAT] * 1001),
        *bad("beats[0].worker_id", *IDENTIFIERS),
        *bad("beats[0].epoch", *EPOCHS),
        *bad("beats[0].load.running", -1, -(2**31)),
        *bad("beats[0].load.waiting", -1, -(2**31)),
        *bad("beats[0].load.held", -1, -(2**31)),
        *bad("beats[0].load.kv_usage", -0.1, 1.01, math.nan, math.inf, -math.inf),
    ],
    "DrainWorker": bad("worker_id", *IDENTIFIERS),
    "DeregisterWorker": [
        *bad("worker_id", *IDENTIFIERS),
        *bad("epoch", *EPOCHS, 2, MOST),
    ],
    "GetWorker": bad("worker_id", *IDENTIFIERS),
    "ListWorkers": [
        *bad("role", 4, -1),
        *bad("states[0]", 0, 99),
        *bad("states", [1] * 1001, says="at most"),
        *bad("model", *WORDS),
        *bad("page_size", *SIZES),
        *bad("page_token", *TOKENS[:2], *TOKENS[5:8], "====", "LWE="),
    ],
}

SESSION: Final[dict[str, list[Bad]]] = {
    "CreateSession": [*bad("name", "", *NAMES), *bad("model", *MODELS)],
    "GetSession": [
        *bad("session_id", *IDENTIFIERS),
        *bad("session_id", "both", at="name"),
        Bad("name", {"session_id": None, "name": NAMES[0]}),
        Bad("name", {"session_id": None, "name": NAMES[1]}),
    ],
    "ListSessions": [
        *bad("states[0]", 0, 99),
        *bad("states", [1] * 1001, says="at most"),
        *bad("model", *MODELS[1:]),
        *bad("worker_id", *IDENTIFIERS[1:]),
        *bad("page_size", *SIZES),
        *bad("page_token", *TOKENS),
    ],
    "EndSession": [
        *bad("session_id", *IDENTIFIERS),
        *bad("session_id", "both", at="name"),
        Bad("name", {"session_id": None, "name": NAMES[0]}),
    ],
    "WatchSessions": bad("session_id", *IDENTIFIERS[1:]),
    "BeginTurn": [
        *bad("request_id", *TEXTS),
        *bad("key.name", *NAMES),
        *bad("key.history", [b"x" * 16] * 65),
        *bad("key.history[1]", b"", *DIGESTS),
        *bad("model", *MODELS),
        *bad("prompt_tokens_estimate", -1, LEAST, MOST),
        *bad("request_bytes", -1, LEAST, MOST),
    ],
    "CompleteTurn": _turn(""),
    "GetUsage": [],
}

TENANT: Final[dict[str, list[Bad]]] = {
    "CreateTenant": [
        *bad("tenant_id", *TENANTS),
        *bad("display_name", "\0", "x" * 257, "é" * 129),
    ],
    "GetTenant": bad("tenant_id", *TENANTS),
    "ListTenants": [
        *bad("page_size", *SIZES),
        *bad("page_token", *TOKENS[:2], *TOKENS[5:8], "LWE="),
    ],
    "CreateApiKey": [
        *bad("tenant_id", *TENANTS),
        *bad("role", 99, -1),
        # A tenant's key is no worker's, a worker's and an operator's no tenant's.
        *bad("worker_id", "w1"),
        Bad("tenant_id", {"role": 2, "worker_id": "w1"}),
        *(Bad("worker_id", {"tenant_id": "", "role": 2, "worker_id": w}) for w in IDENTIFIERS),
        Bad("tenant_id", {"role": 3}),
        *bad("ttl", *DURATIONS),
    ],
    "ListApiKeys": bad("tenant_id", *TENANTS[1:]),
    "RevokeApiKey": bad("key_id", *IDENTIFIERS, "x" * 65),
    # No secret is malformed: whatever it looks like, it is somebody's or nobody's.
    "ResolveApiKey": [],
    "GetQuotas": bad("tenant_id", *TENANTS),
    "SetQuotas": [
        *bad("tenant_id", *TENANTS),
        *bad("quotas.soft.sessions", *COUNTS, MOST),
        *bad("quotas.soft.live_leases", 1),
        *bad("quotas.hard.held_tokens", *COUNTS, MOST),
        *bad("quotas.hard.requests_per_second", -0.1, float("nan"), float("inf"), 1e16),
        *bad("quotas.soft.tokens_per_second", -1.0, float("nan")),
        *bad("quotas.hard.request_bytes", *COUNTS),
    ],
    "RotateCacheSalt": bad("tenant_id", *TENANTS),
}

AUDIT: Final[dict[str, list[Bad]]] = {
    "ListAuditEvents": [
        *bad("tenant_id", *TENANTS[1:]),
        *bad("actor", "\0", "x" * 257),
        *bad("action", "\0", "x" * 65),
        *bad("since", Timestamp(seconds=MOST), Timestamp(nanos=-1)),
        *bad("until", Timestamp(seconds=LEAST), Timestamp(nanos=10**9)),
        *bad("page_size", *SIZES),
        *bad("page_token", *TOKENS[:2], *TOKENS[5:8], "LTEgYQ=="),
    ],
}
