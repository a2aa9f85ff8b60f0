"""Which parts make up the services' processes. The only place that knows all services."""

from dataclasses import dataclass, field
from typing import Any, Final

from kvplane import client
from kvplane.audit import main as audit_main
from kvplane.audit.audited import audited
from kvplane.audit.domain import AuditConfig
from kvplane.audit.service import AuditLog
from kvplane.client.api import LeaseApi, RoutingApi, SessionApi, TenantApi, WorkerApi
from kvplane.client.keys import Keys
from kvplane.client.quotas import QuotaBook, QuotaSource
from kvplane.db.database import Database
from kvplane.kernel.clock import Clock
from kvplane.lease import main as lease_main
from kvplane.lease.domain import LeaseConfig
from kvplane.routing import main as routing_main
from kvplane.routing.domain import RoutingConfig
from kvplane.runtime.auth import ApiKeys, Authenticator, TrustedNetwork
from kvplane.runtime.process import GrpcProcess, Part
from kvplane.runtime.settings import Settings, config_of
from kvplane.session import main as session_main
from kvplane.session.domain import SessionConfig
from kvplane.tenant import main as tenant_main

PORTS: Final = {"dev": 7700, "session": 7701, "lease": 7702, "routing": 7703}


@dataclass
class Assembly:
    """The services of one process, and the way to the others."""

    settings: Settings
    clock: Clock
    database: Database
    servicers: dict[str, Any] = field(default_factory=dict)
    parts: list[Part] = field(default_factory=list)
    audit_log: AuditLog = field(init=False)

    def __post_init__(self) -> None:
        """What is changed in this process is written down, by whatever way it is called."""
        config = config_of(AuditConfig, "audit", self.settings.audit)
        self.audit_log = audit_main.log(self.database, self.clock, config)

    def lease(self, quotas: QuotaSource) -> LeaseApi:
        """Add the lease service."""
        config = config_of(LeaseConfig, "lease", self.settings.lease)
        part = lease_main.build(self.database, self.clock, config, quotas=quotas)
        self.parts.append(part)
        servicer = audited(part.servicer, self.audit_log, "LeaseService")
        self.servicers["LeaseService"] = servicer
        return servicer

    def session(self, leases: LeaseApi, quotas: QuotaSource) -> SessionApi:
        """Add the session service."""
        config = config_of(SessionConfig, "session", self.settings.session)
        part = session_main.build(self.database, self.clock, leases, config, quotas=quotas)
        self.parts.append(part)
        servicer = audited(part.servicer, self.audit_log, "SessionService")
        self.servicers["SessionService"] = servicer
        return servicer

    def tenant(self) -> TenantApi:
        """Add the tenant service."""
        part = tenant_main.build(self.database, self.clock)
        self.parts.append(part)
        servicer = audited(part.servicer, self.audit_log, "TenantService")
        self.servicers["TenantService"] = servicer
        return servicer

    def routing(self, leases: LeaseApi, sessions: SessionApi) -> tuple[RoutingApi, WorkerApi]:
        """Add the routing service and the worker registry."""
        config = config_of(RoutingConfig, "routing", self.settings.routing)
        part = routing_main.build(self.database, self.clock, leases, sessions, config)
        self.parts.append(part)
        self.servicers["RoutingService"] = part.routing_servicer
        workers = audited(part.worker_servicer, self.audit_log, "WorkerService")
        self.servicers["WorkerService"] = workers
        return part.routing_servicer, workers

    def audit(self) -> None:
        """Add the audit service, which lists what all processes wrote down."""
        part = audit_main.AuditPart(self.audit_log)
        self.parts.append(part)
        self.servicers["AuditService"] = part.servicer

    def process(self, tenants: TenantApi, default_port: int) -> GrpcProcess:
        """Return the process that serves what was added."""
        return GrpcProcess(
            self.settings,
            self.clock,
            self.database,
            authenticator(self.settings, tenants, self.clock),
            self.servicers,
            self.parts,
            default_port,
        )


class Peers:
    """The services of other processes, at the addresses of the settings."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._options: dict[str, Any] = {
            "token": settings.auth.internal_token.get_secret_value() or None,
            "tls": settings.tls.files(),
        }

    def leases(self) -> LeaseApi:
        """Return the lease service."""
        return client.lease_api(self._settings.lease.address, **self._options)

    def sessions(self) -> SessionApi:
        """Return the session service."""
        return client.session_api(self._settings.session.address, **self._options)

    def tenants(self) -> TenantApi:
        """Return the tenant service, which lives with the session service."""
        return client.tenant_api(self._settings.session.address, **self._options)

    def routing(self) -> RoutingApi:
        """Return the routing service."""
        return client.routing_api(self._settings.routing.address, **self._options)

    def workers(self) -> WorkerApi:
        """Return the worker registry, which lives with the routing service."""
        return client.worker_api(self._settings.routing.address, **self._options)


def authenticator(settings: Settings, tenants: TenantApi, clock: Clock) -> Authenticator:
    """Return who decides who is calling."""
    auth = settings.auth
    if auth.mode == "none":
        return TrustedNetwork()
    keys = Keys(tenants, clock, ttl=auth.key_cache_s, stale=auth.key_stale_s)
    again_s = max(auth.key_cache_s, 1.0)
    return ApiKeys(keys, auth.internal_token.get_secret_value(), again_s)


def service(name: str, settings: Settings, clock: Clock) -> GrpcProcess:
    """Return the process of ``session``, ``lease`` or ``routing`` alone."""
    made = Assembly(settings, clock, Database(settings.database.url, clock))
    peers = Peers(settings)
    tenants = peers.tenants()
    if name == "session":
        tenants = made.tenant()
        made.session(peers.leases(), QuotaBook(tenants, clock))
        made.audit()
    elif name == "lease":
        made.lease(QuotaBook(tenants, clock))
    else:
        made.routing(peers.leases(), peers.sessions())
    return made.process(tenants, PORTS[name])
