"""The tables of the lease manager. Instants are microseconds since 1970 (``*_us``)."""

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    Double,
    Index,
    Integer,
    LargeBinary,
    String,
    Table,
    text,
)

from kvplane.db.metadata import metadata

_ID = String(128)

LIVE_OWNERSHIP = "state <= 2"
OPEN_LEASE = "state <= 2 OR draining"
LIVE_LEASE = "state <= 2"

# An ownership's id is derived from the engine's and the request's, so it is unique among
# all tenants and must stay so: the same blocks under two tenants would have two readers.
ownerships = Table(
    "ownerships",
    metadata,
    Column("ownership_id", _ID, primary_key=True),
    Column("tenant_id", _ID, nullable=False),
    Column("session_id", _ID, nullable=False),
    Column("turn", BigInteger, nullable=False),
    Column("worker_id", _ID, nullable=False),
    Column("epoch", BigInteger, nullable=False),
    Column("engine_id", String(256), nullable=False),
    Column("request_id", String(256), nullable=False),
    Column("num_tokens", BigInteger, nullable=False),
    Column("block_size", Integer, nullable=False),
    Column("compatibility", String(4096), nullable=False),
    Column("cuttable", Boolean, nullable=False),
    Column("for_decode", Boolean, nullable=False),
    Column("reported_us", BigInteger, nullable=False),
    Column("state", Integer, nullable=False),
    Column("hold_deadline_us", BigInteger, nullable=False),
    Column("fencing_token", BigInteger, nullable=False),
    Column("lease_id", _ID, nullable=False),
    Column("ended_us", BigInteger, nullable=False),
    # Of the engine's pool, over all groups of its KV cache.
    Column("blocks", BigInteger, nullable=False),
    Index(None, "tenant_id", "reported_us", "ownership_id"),
    Index(None, "tenant_id", "session_id", "state"),
    Index(None, "worker_id", "state"),
    Index(None, "state", "hold_deadline_us"),
    Index(None, "ended_us"),
    # All that the sums over what is held need, so that each sweep can make them.
    Index(
        "ix_ownerships_live",
        "worker_id", "tenant_id", "num_tokens", "blocks", "reported_us", "state",
        sqlite_where=text(LIVE_OWNERSHIP),
        postgresql_where=text(LIVE_OWNERSHIP),
    ),
)  # fmt: skip

# Apart from the rest: these are large, are written once and read only for a read.
ownership_payloads = Table(
    "ownership_payloads",
    metadata,
    Column("ownership_id", _ID, primary_key=True),
    Column("params", LargeBinary, nullable=False),
    Column("digests", LargeBinary, nullable=False),
)

leases = Table(
    "leases",
    metadata,
    Column("lease_id", _ID, primary_key=True),
    Column("tenant_id", _ID, nullable=False),
    Column("session_id", _ID, nullable=False),
    Column("ownership_id", _ID, nullable=False),
    Column("fencing_token", BigInteger, nullable=False),
    Column("holder_worker_id", _ID, nullable=False),
    Column("holder_epoch", BigInteger, nullable=False),
    Column("granted_us", BigInteger, nullable=False),
    Column("state", Integer, nullable=False),
    Column("deadline_us", BigInteger, nullable=False),
    Column("draining", Boolean, nullable=False),
    Column("ended_us", BigInteger, nullable=False),
    Index(None, "tenant_id", "granted_us", "lease_id"),
    Index(None, "tenant_id", "session_id"),
    Index(None, "holder_worker_id", "state"),
    # What the sweeper asks for; renewals move it, so it holds open leases only.
    Index(
        "ix_leases_open_deadline_us",
        "deadline_us",
        sqlite_where=text(OPEN_LEASE),
        postgresql_where=text(OPEN_LEASE),
    ),
    # For limits on them; renewals do not touch it.
    Index(
        "ix_leases_live_tenant_id",
        "tenant_id",
        "state",
        sqlite_where=text(LIVE_LEASE),
        postgresql_where=text(LIVE_LEASE),
    ),
    Index(None, "ended_us"),
)

# The first answer to each GrantLease, by its idempotency key.
lease_requests = Table(
    "lease_requests",
    metadata,
    Column("tenant_id", _ID, primary_key=True),
    Column("request_id", _ID, primary_key=True),
    # What was asked, in short: another question under the same key is a mistake.
    Column("fingerprint", _ID, nullable=False),
    # Empty when refused.
    Column("lease_id", _ID, nullable=False),
    Column("refusal", Integer, nullable=False),
    Column("answered_us", BigInteger, nullable=False),
    Index(None, "answered_us"),
)

# Sessions that have ended: what a worker reports of one afterwards is freed at once.
ended_sessions = Table(
    "ended_sessions",
    metadata,
    Column("tenant_id", _ID, primary_key=True),
    Column("session_id", _ID, primary_key=True),
    Column("ended_us", BigInteger, nullable=False),
    Index(None, "ended_us"),
)

# The outbox: what owners are to be told, until they have acknowledged it.
lease_commands = Table(
    "lease_commands",
    metadata,
    Column("command_id", _ID, primary_key=True),
    Column("worker_id", _ID, nullable=False),
    Column("epoch", BigInteger, nullable=False),
    Column("ownership_id", _ID, nullable=False),
    Column("engine_id", String(256), nullable=False),
    Column("request_id", String(256), nullable=False),
    # FreeNow when 0, else HoldLonger until then.
    Column("hold_until_us", BigInteger, nullable=False),
    Column("created_us", BigInteger, nullable=False),
    # Nobody needs telling after this.
    Column("expire_us", BigInteger, nullable=False),
    Index(None, "worker_id"),
    Index(None, "ownership_id"),
    Index(None, "expire_us"),
)

# The newest epoch of each worker that anybody has named, and its newest stream.
worker_epochs = Table(
    "worker_epochs",
    metadata,
    Column("worker_id", _ID, primary_key=True),
    Column("epoch", BigInteger, nullable=False),
    Column("stream_id", _ID, nullable=False),
    # The worker's own count of its streams in this epoch.
    Column("stream_number", BigInteger, nullable=False),
    # What its last Hello in this epoch has said; 0: no limit.
    Column("hold_limit_blocks", BigInteger, nullable=False, server_default="0"),
)

# What tenants have held over all time. The row of no tenant says until when that is counted.
tenant_holds = Table(
    "tenant_holds",
    metadata,
    Column("tenant_id", _ID, primary_key=True),
    Column("held_token_seconds", Double, nullable=False),
    Column("counted_until_us", BigInteger, nullable=False),
)
