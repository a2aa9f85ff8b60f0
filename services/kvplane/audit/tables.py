"""The table of audit events."""

from typing import Final

from sqlalchemy import BigInteger, Column, Index, Integer, String, Table

from kvplane.audit import domain
from kvplane.db.metadata import metadata

audit_events = Table(
    "audit_events",
    metadata,
    # Not all of them are about a tenant.
    Column("event_id", String(64), primary_key=True),
    Column("time_us", BigInteger, nullable=False),
    Column("tenant_id", String(domain.TENANT_LENGTH), nullable=False),
    Column("actor", String(domain.ACTOR_LENGTH), nullable=False),
    Column("action", String(domain.ACTION_LENGTH), nullable=False),
    Column("target", String(domain.TARGET_LENGTH), nullable=False),
    Column("detail", String(domain.DETAIL_LENGTH), nullable=False),
    Column("outcome", Integer, nullable=False),
    Column("reason", String(domain.REASON_LENGTH), nullable=False),
    Column("request_id", String(domain.REQUEST_ID_LENGTH), nullable=False),
    Index("ix_audit_events_time_us", "time_us", "event_id"),
    Index("ix_audit_events_tenant_id_time_us", "tenant_id", "time_us", "event_id"),
)

TABLES: Final = (audit_events,)
