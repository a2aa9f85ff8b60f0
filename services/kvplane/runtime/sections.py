"""The settings, section by section.

Names and defaults of a service's settings are those of its config dataclass; what is not
here is not worth setting.
"""

import json
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    SecretStr,
    field_validator,
    model_validator,
)
from pydantic_settings import NoDecode

from kvplane.client.tls import TlsFiles
from kvplane.db.url import check
from kvplane.kernel.errors import InvalidField
from kvplane.kernel.validate import header

Port = Annotated[int, Field(ge=0, le=65535)]
Positive = Annotated[float, Field(gt=0)]
NotNegative = Annotated[float, Field(ge=0)]


def _credential(value: SecretStr) -> SecretStr:
    try:
        return SecretStr(header("", value.get_secret_value()))
    except InvalidField as error:
        raise ValueError(error.message.removeprefix(": ")) from None


Credential = Annotated[SecretStr, AfterValidator(_credential)]


class Section(BaseModel):
    """A group of settings. Unknown names are refused, so that a typo is not silent."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)


class DatabaseSettings(Section):
    """Where everything is kept."""

    url: str = Field(
        "sqlite:///kvplane.db",
        description="`sqlite:///path` (one machine) or `postgresql://user:password@host/name`"
        " (replicas). For TLS: `?sslmode=verify-full&sslrootcert=ca.pem`.",
    )

    @field_validator("url")
    @classmethod
    def _known(cls, url: str) -> str:
        check(url)
        return url


class GrpcSettings(Section):
    """How session, lease and routing listen."""

    host: str = Field("127.0.0.1", description="Address to listen on; `0.0.0.0` for all.")
    port: Port | None = Field(
        None,
        description="gRPC port; 0 takes a free one. By default session 7701, lease 7702, routing"
        " 7703, dev 7700.",
    )
    status_port: Port | None = Field(
        None,
        description="HTTP port of /metrics, /healthz and /readyz. By default the gRPC port + 1000.",
    )
    drain_s: NotNegative = Field(
        10.0, description="Seconds that calls under way get to finish after SIGTERM."
    )
    default_deadline_s: Positive = Field(
        30.0, description="Deadline in seconds of a call whose client set none."
    )


class AuthSettings(Section):
    """Who may call."""

    mode: Literal["none", "api_key"] = Field(
        "none",
        description="`none`: everybody may do everything, on loopback only. `api_key`: callers"
        " need a key, the internal token or a certificate.",
    )
    internal_token: Credential = Field(
        SecretStr(""),
        description="Shared secret of our own services, sent as a bearer token; also good for"
        " workers and operators, who may have keys of their own instead. Needed for `api_key`"
        " unless `tls` is set.",
    )
    key_cache_s: NotNegative = Field(
        5.0,
        description="Seconds that an API key is believed without asking again, so that one that"
        " is revoked works on; streams end within twice that.",
    )
    key_stale_s: NotNegative = Field(
        300.0, description="The same while the tenant service does not answer."
    )


class TlsSettings(Section):
    """Mutual TLS, see [security-setup.md](security-setup.md): all three files, or none."""

    ca_file: str = Field("", description="PEM file of the CAs whose certificates are believed.")
    cert_file: str = Field(
        "",
        description="PEM file of this process's certificate and what lies between it and the CA."
        " It names the process by a URI, `kvplane:service/<name>`.",
    )
    key_file: str = Field("", description="PEM file of the certificate's private key.")
    server_name: str = Field(
        "",
        description="Name in the certificates of the other services, where it is not in their"
        " addresses. Needed for `ip:port,ip:port`.",
    )

    @model_validator(mode="after")
    def _together(self) -> Self:
        try:
            self.files()
        except InvalidField as error:
            raise ValueError(error.message) from None
        return self

    def files(self) -> TlsFiles | None:
        """Return where they are, None without TLS."""
        return TlsFiles.of(self.ca_file, self.cert_file, self.key_file, self.server_name)


class SessionSettings(Section):
    """The session and tenant services."""

    address: str = Field(
        "127.0.0.1:7701",
        description="Where others find them: `host:port`, or `ip:port,ip:port` for replicas.",
    )
    idle_expiry_s: Positive = Field(
        86_400.0, description="A session without a turn for so many seconds expires."
    )
    abandoned_after_s: Positive = Field(
        600.0, description="An open turn that is so many seconds old no longer counts as open."
    )
    histories_kept: int = Field(
        8, ge=1, description="Histories (newest, branches) by which a session can be found."
    )
    ended_kept_s: NotNegative = Field(
        604_800.0, description="Seconds that an ended session stays listed."
    )
    lease_bound_s: Positive = Field(
        0.3, description="Longest wait in seconds for the lease service."
    )


class LeaseSettings(Section):
    """The lease service."""

    address: str = Field(
        "127.0.0.1:7702",
        description="Where others find it: `host:port`, or `ip:port,ip:port` for replicas.",
    )
    ttl_s: Positive = Field(10.0, description="Seconds that a lease lasts unless asked otherwise.")
    min_ttl_s: Positive = Field(1.0, description="Shortest lease in seconds.")
    max_ttl_s: Positive = Field(60.0, description="Longest lease in seconds.")
    margin_s: NotNegative = Field(
        2.0, description="A lease ends so many seconds before its owner's hold does."
    )
    sweep_slack_s: NotNegative = Field(
        0.5,
        description="What is being read when its lease ends is freed so many seconds later: "
        "the reader's clock may be slow.",
    )
    unknown_hold_s: NotNegative = Field(
        0.0,
        description="Hold in seconds of an owner that reports none; 0: nobody reads from it.",
    )
    max_hold_s: Positive = Field(86_400.0, description="Longest hold in seconds.")
    sweep_interval_s: Positive = Field(
        1.0, description="Seconds between two looks for what has expired."
    )
    restart_grace_s: NotNegative = Field(
        10.0, description="After a start nothing is swept for so many seconds: one ttl."
    )
    retention_s: Positive = Field(
        600.0, description="Seconds that ended leases and ownerships stay, to answer repeats."
    )

    @model_validator(mode="after")
    def _order(self) -> Self:
        if not self.min_ttl_s <= self.ttl_s <= self.max_ttl_s:
            raise ValueError(
                f"ttl_s: must be from min_ttl_s ({self.min_ttl_s:g}) to max_ttl_s"
                f" ({self.max_ttl_s:g}), not {self.ttl_s:g}"
            )
        if self.sweep_slack_s > self.margin_s:
            raise ValueError(
                f"sweep_slack_s: must be at most margin_s ({self.margin_s:g}),"
                f" not {self.sweep_slack_s:g}"
            )
        return self


class RoutingSettings(Section):
    """The routing service and the worker registry."""

    address: str = Field(
        "127.0.0.1:7703",
        description="Where others find them: `host:port`, or `ip:port,ip:port` for replicas.",
    )
    heartbeat_interval_s: Positive = Field(
        1.0, description="Seconds between two heartbeats of a worker."
    )
    worker_timeout_s: Positive = Field(
        5.0, description="A worker that is silent for so many seconds is lost."
    )
    load_gap_requests: int = Field(
        8,
        ge=0,
        description="A session leaves its decode worker when another has so many requests less.",
    )
    session_bound_s: Positive = Field(
        0.3, description="Longest wait in seconds for the session service."
    )
    lease_bound_s: Positive = Field(
        0.3, description="Longest wait in seconds for the lease service."
    )
    report_wait_s: NotNegative = Field(
        0.25, description="Seconds to wait for the report of a turn that has just ended."
    )
    route_kept_s: Positive = Field(
        600.0, description="Seconds that a Route can be repeated with the same answer."
    )

    @model_validator(mode="after")
    def _order(self) -> Self:
        if self.heartbeat_interval_s >= self.worker_timeout_s / 2:
            raise ValueError("heartbeat_interval_s: must be less than half of worker_timeout_s")
        return self


class AuditSettings(Section):
    """What is written down about changes: who made, revoked, ended, drained what."""

    kept_days: int = Field(400, ge=1, description="Days after which an event is deleted.")


class GatewaySettings(Section):
    """The OpenAI-compatible HTTP gateway."""

    host: str = Field("127.0.0.1", description="Address to listen on; `0.0.0.0` for all.")
    port: Port = Field(8000, description="HTTP port; 0 takes a free one.")
    static_workers: Annotated[list[dict[str, Any]], NoDecode] = Field(
        default_factory=list,
        description="Engines without our connector: a JSON list in the variable, tables"
        " `[[gateway.static_workers]]` in the file.",
    )
    upstream_api_key: Credential = Field(
        SecretStr(""), description="Sent to the engines as a bearer token; empty: none."
    )
    max_body_bytes: int = Field(33_554_432, ge=1, description="Largest request body in bytes.")
    route_timeout_s: Positive = Field(
        1.0, description="Longest wait in seconds for the routing service."
    )
    connect_timeout_s: Positive = Field(
        2.0, description="Longest wait in seconds for a connection to an engine."
    )
    prefill_timeout_s: Positive = Field(300.0, description="Longest prefill in seconds.")
    reuse_timeout_s: Positive = Field(
        10.0, description="Longest prefill that reads KV, in seconds; then it is computed."
    )
    first_byte_timeout_s: Positive = Field(
        300.0, description="Longest wait in seconds for the first byte of a stream."
    )
    answer_timeout_s: Positive = Field(
        1800.0, description="Longest wait in seconds for an answer that is not a stream."
    )
    idle_timeout_s: Positive = Field(
        300.0,
        description="Longest pause in seconds between two chunks of a stream; comments do not "
        "count.",
    )
    stream_timeout_s: Positive = Field(14_400.0, description="Longest stream in seconds.")
    decode_tries: int = Field(3, ge=1, description="Decode workers tried for one request.")
    drain_s: NotNegative = Field(
        30.0, description="Seconds that requests under way get to finish after SIGTERM."
    )

    @field_validator("static_workers", mode="before")
    @classmethod
    def _from_json(cls, value: object) -> object:
        if not isinstance(value, str):
            return value
        try:
            return json.loads(value)
        except ValueError as error:
            raise ValueError(f"must be a JSON list of objects: {error}") from None


class LogSettings(Section):
    """What is written to stderr."""

    level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="`info` has one line for each call."
    )
    format: Literal["auto", "json", "console"] = Field(
        "auto", description="`auto`: text on a terminal, JSON elsewhere."
    )


class TelemetrySettings(Section):
    """OpenTelemetry."""

    enabled: bool = Field(False, description="Trace calls and pass the trace on to every hop.")
    otlp_endpoint: str = Field(
        "",
        description="Where spans go (OTLP over gRPC, `http://host:4317`); needs the packages"
        " opentelemetry-sdk and opentelemetry-exporter-otlp-proto-grpc. Empty: only the trace"
        " context is passed on.",
    )
