"""The registry's tables, and rows to values.

Names are bytes: no collation, case, trailing space, NUL or normal form can make two of
them equal.
"""

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

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
from kvplane.session.domain import Session, SessionState, Turn, TurnOutcome

sessions = Table(
    "sessions",
    metadata,
    Column("tenant_id", String(64), primary_key=True),
    Column("session_id", String(64), primary_key=True),
    Column("name", LargeBinary, nullable=True),
    Column("model", String(256), nullable=False),
    Column("state", Integer, nullable=False),
    Column("create_us", BigInteger, nullable=False),
    Column("last_turn_us", BigInteger, nullable=False),
    Column("due_us", BigInteger, nullable=False),
    Column("version", BigInteger, nullable=False),
    Column("turns", BigInteger, nullable=False),
    Column("last_prefill_worker_id", String(128), nullable=False),
    Column("last_decode_worker_id", String(128), nullable=False),
    Column("last_ok_turn", BigInteger, nullable=False),
    Column("tokens_reused", BigInteger, nullable=False),
    Column("tokens_recomputed", BigInteger, nullable=False),
    Column("newest_outcome", Integer, nullable=False),
    Column("newest_completed_us", BigInteger, nullable=False),
    Column("histories", BigInteger, nullable=False),
    Column("free_due_us", BigInteger, nullable=True),
    # One active session a name; any number of ended ones.
    Index(
        "uq_sessions_active_name",
        "tenant_id",
        "name",
        unique=True,
        postgresql_where=text("state = 1"),
        sqlite_where=text("state = 1"),
    ),
    Index("ix_sessions_name", "tenant_id", "name"),
    Index("ix_sessions_create", "tenant_id", "create_us", "session_id"),
    Index("ix_sessions_version", "tenant_id", "version", "session_id"),
    # For the sweeper, over all tenants.
    Index("ix_sessions_due", "state", "due_us"),
    Index(
        "ix_sessions_free_due",
        "free_due_us",
        postgresql_where=text("free_due_us IS NOT NULL"),
        sqlite_where=text("free_due_us IS NOT NULL"),
    ),
)

turns = Table(
    "turns",
    metadata,
    Column("tenant_id", String(64), primary_key=True),
    Column("session_id", String(64), primary_key=True),
    Column("turn", BigInteger, primary_key=True, autoincrement=False),
    Column("request_id", String(128), nullable=False),
    Column("key_digest", LargeBinary, nullable=False),
    Column("model", String(256), nullable=False),
    Column("open_us", BigInteger, nullable=False),
    Column("previous_completed", Boolean, nullable=False),
    Column("open_turns", Integer, nullable=False),
    Column("before_prefill_worker_id", String(128), nullable=False),
    Column("before_decode_worker_id", String(128), nullable=False),
    Column("before_tokens_reused", BigInteger, nullable=False),
    Column("before_tokens_recomputed", BigInteger, nullable=False),
    Column("outcome", Integer, nullable=False),
    Column("complete_us", BigInteger, nullable=False),
    Column("prompt_tokens", BigInteger, nullable=False),
    Column("completion_tokens", BigInteger, nullable=False),
    Column("tokens_reused", BigInteger, nullable=False),
    Column("prefill_worker_id", String(128), nullable=False),
    Column("decode_worker_id", String(128), nullable=False),
    Column("time_to_first_token_us", BigInteger, nullable=False),
    Column("charged_tokens", BigInteger, nullable=True),
    Index("uq_turns_request", "tenant_id", "request_id", unique=True),
    Index(
        "ix_turns_open",
        "tenant_id",
        "session_id",
        "open_us",
        postgresql_where=text("outcome = 0"),
        sqlite_where=text("outcome = 0"),
    ),
)

session_history = Table(
    "session_history",
    metadata,
    Column("tenant_id", String(64), primary_key=True),
    Column("model", String(256), primary_key=True),
    Column("digest", LargeBinary, primary_key=True),
    Column("session_id", String(64), primary_key=True),
    # The turn that it is the history of.
    Column("turn", BigInteger, nullable=False),
    # Counts a session's digests, so that the last few can be kept.
    Column("number", BigInteger, nullable=False),
    Column("recorded_us", BigInteger, nullable=False),
    Index("ix_session_history_session", "tenant_id", "session_id", "number"),
)

# Of tenants with limits. Locked by whoever begins a turn, before any session.
tenant_rates = Table(
    "tenant_rates",
    metadata,
    Column("tenant_id", String(64), primary_key=True),
    Column("at_us", BigInteger, nullable=False),
    Column("soft_requests", Double, nullable=False),
    Column("soft_tokens", Double, nullable=False),
    Column("hard_requests", Double, nullable=False),
    Column("hard_tokens", Double, nullable=False),
    # How much of tenant_usage's corrections is in the buckets.
    Column("settled_tokens", BigInteger, nullable=False),
    Column("settled_unheld_tokens", BigInteger, nullable=False),
)

# Sums that only grow, but for the corrections. Each process has a part of its own as a
# rule, so that replicas do not wait for one another's commits.
tenant_usage = Table(
    "tenant_usage",
    metadata,
    Column("tenant_id", String(64), primary_key=True),
    Column("part", Integer, primary_key=True, autoincrement=False),
    Column("turns", BigInteger, nullable=False),
    Column("prompt_tokens", BigInteger, nullable=False),
    Column("completion_tokens", BigInteger, nullable=False),
    Column("tokens_reused", BigInteger, nullable=False),
    Column("tokens_recomputed", BigInteger, nullable=False),
    # Tokens beyond what was charged when the turns began, with and without a session.
    Column("corrected_tokens", BigInteger, nullable=False),
    Column("corrected_unheld_tokens", BigInteger, nullable=False),
)

# Turns beyond a soft limit, to be answered again in the same way.
unheld_turns = Table(
    "unheld_turns",
    metadata,
    Column("tenant_id", String(64), primary_key=True),
    Column("request_id", String(128), primary_key=True),
    Column("key_digest", LargeBinary, nullable=False),
    Column("quota", String(64), nullable=False),
    Column("open_us", BigInteger, nullable=False),
    Column("charged_tokens", BigInteger, nullable=True),
    Column("completed", Boolean, nullable=False),
    Index("ix_unheld_turns_open_us", "open_us"),
)

_SESSION_FIELDS = [field.name for field in fields(Session)]
_TURN_FIELDS = [field.name for field in fields(Turn)]
SESSION_COLUMNS = [sessions.c[name] for name in _SESSION_FIELDS]
TURN_COLUMNS = [turns.c[name] for name in _TURN_FIELDS]
_NAME, _STATE, _NEWEST_OUTCOME = map(_SESSION_FIELDS.index, ("name", "state", "newest_outcome"))
_PREVIOUS, _OUTCOME = map(_TURN_FIELDS.index, ("previous_completed", "outcome"))


def session_of(row: Sequence[Any]) -> Session:
    """Make a Session of a row of SESSION_COLUMNS."""
    values = list(row)
    values[_NAME] = (values[_NAME] or b"").decode()
    values[_STATE] = SessionState(values[_STATE])
    values[_NEWEST_OUTCOME] = TurnOutcome(values[_NEWEST_OUTCOME])
    return Session(*values)


def session_values(session: Session) -> dict[str, Any]:
    """Return a session's columns."""
    values = {name: getattr(session, name) for name in _SESSION_FIELDS}
    values["name"] = session.name.encode() or None
    values["state"] = int(session.state)
    values["newest_outcome"] = int(session.newest_outcome)
    return values


def turn_of(row: Sequence[Any]) -> Turn:
    """Make a Turn of a row of TURN_COLUMNS."""
    values = list(row)
    values[_PREVIOUS] = bool(values[_PREVIOUS])
    values[_OUTCOME] = TurnOutcome(values[_OUTCOME])
    return Turn(*values)


def turn_values(tenant_id: str, turn: Turn) -> dict[str, Any]:
    """Return a turn's columns."""
    values = {name: getattr(turn, name) for name in _TURN_FIELDS}
    values["tenant_id"] = tenant_id
    values["outcome"] = int(turn.outcome)
    return values
