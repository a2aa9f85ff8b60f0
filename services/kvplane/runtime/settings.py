"""Settings from the environment and a TOML file.

``KVPLANE_<SECTION>_<NAME>`` wins over the file (``KVPLANE_CONFIG`` or ``--config``),
which wins over the default. A section is a table of the file.
"""

import json
import os
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, SecretStr, ValidationError, field_validator
from pydantic.fields import FieldInfo
from pydantic_settings import (
    BaseSettings,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    SettingsError,
    TomlConfigSettingsSource,
)
from sqlalchemy import make_url
from sqlalchemy.exc import ArgumentError

PREFIX = "KVPLANE_"
CONFIG_VARIABLE = "KVPLANE_CONFIG"

Port = Annotated[int, Field(ge=0, le=65535)]
Seconds = Annotated[float, Field(gt=0)]


class WrongSettings(Exception):
    """One line for each wrong setting: its name, its variable, the reason."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


class Section(BaseModel):
    """A group of settings. Unknown names are refused, so that a typo is not silent."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)


class DatabaseSettings(Section):
    """Where everything is kept."""

    url: str = Field(
        "sqlite:///kvplane.db",
        description="`sqlite:///path` (one machine) or `postgresql://user:password@host/name`"
        " (replicas).",
    )

    @field_validator("url")
    @classmethod
    def _known(cls, url: str) -> str:
        try:
            kind = make_url(url).get_backend_name()
        except ArgumentError:
            kind = ""
        if kind not in {"sqlite", "postgresql"}:
            raise ValueError("must begin with sqlite:/// or postgresql://")
        return url


class GrpcSettings(Section):
    """How a service listens."""

    host: str = Field("127.0.0.1", description="Address to listen on; `0.0.0.0` for all.")
    port: Port | None = Field(
        None,
        description="gRPC port; 0 takes a free one. Default by service: session 7701, lease 7702,"
        " routing 7703, dev 7700.",
    )
    status_port: Port | None = Field(
        None,
        description="HTTP port of /metrics, /healthz and /readyz. Default: the gRPC port + 1000.",
    )
    drain_s: float = Field(
        10.0, ge=0, description="Seconds that calls under way get to finish after SIGTERM."
    )
    default_deadline_s: Seconds = Field(
        30.0, description="Deadline in seconds of a call whose client set none."
    )


class AuthSettings(Section):
    """Who may call."""

    mode: Literal["none", "api_key"] = Field(
        "none",
        description="`none`: callers name their tenant (loopback, trusted networks)."
        " `api_key`: a key names the tenant.",
    )
    internal_token: SecretStr = Field(
        SecretStr(""),
        description="Shared secret of services, workers and operators, sent as a bearer token."
        " Needed for `api_key`.",
    )
    key_cache_s: float = Field(
        5.0, ge=0, description="Seconds that a resolved API key is believed without asking again."
    )


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


class SessionSettings(Section):
    """The session and tenant services."""

    address: str = Field(
        "127.0.0.1:7701", description="`host:port` where others find the session service."
    )


class LeaseSettings(Section):
    """The lease service."""

    address: str = Field(
        "127.0.0.1:7702", description="`host:port` where others find the lease service."
    )


class RoutingSettings(Section):
    """The routing service and the worker registry."""

    address: str = Field(
        "127.0.0.1:7703", description="`host:port` where others find the routing service."
    )


class GatewaySettings(Section):
    """The OpenAI-compatible HTTP gateway."""

    host: str = Field("127.0.0.1", description="Address to listen on; `0.0.0.0` for all.")
    port: Port = Field(8000, description="HTTP port; 0 takes a free one.")


def _section(kind: type[Section]) -> Any:
    return Field(default_factory=kind, description=(kind.__doc__ or "").strip())


class Settings(BaseSettings):
    """All settings. `load` makes them."""

    model_config = SettingsConfigDict(
        env_prefix=PREFIX,
        env_nested_delimiter="_",
        env_nested_max_split=1,
        extra="forbid",
        frozen=True,
    )
    _file: ClassVar[Path | None] = None

    database: DatabaseSettings = _section(DatabaseSettings)
    grpc: GrpcSettings = _section(GrpcSettings)
    auth: AuthSettings = _section(AuthSettings)
    session: SessionSettings = _section(SessionSettings)
    lease: LeaseSettings = _section(LeaseSettings)
    routing: RoutingSettings = _section(RoutingSettings)
    gateway: GatewaySettings = _section(GatewaySettings)
    log: LogSettings = _section(LogSettings)
    telemetry: TelemetrySettings = _section(TelemetrySettings)

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Flags, then the environment, then the file."""
        file = TomlConfigSettingsSource(settings_cls, cls._file)
        return init_settings, env_settings, file


def load(config: Path | None = None, **flags: dict[str, Any]) -> Settings:
    """Read all settings. `flags` are sections from the command line; they win.

    Raises WrongSettings.
    """
    named = config or (Path(os.environ[CONFIG_VARIABLE]) if CONFIG_VARIABLE in os.environ else None)
    if named is not None:
        _check_file(named)

    class FromHere(Settings):
        _file = named

    try:
        settings = FromHere(**flags)  # type: ignore[arg-type]
    except ValidationError as error:
        raise WrongSettings([_line(problem) for problem in error.errors()]) from None
    except SettingsError as error:
        raise WrongSettings([str(error)]) from None
    if settings.auth.mode == "api_key" and not settings.auth.internal_token.get_secret_value():
        reason = "must be set for auth.mode = api_key"
        raise WrongSettings([f"{_names('auth', 'internal_token')}: {reason}"])
    return settings


def _check_file(path: Path) -> None:
    try:
        tomllib.loads(path.read_text())
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "is not text"
        raise WrongSettings([f"{path}: {reason} (from --config or {CONFIG_VARIABLE})"]) from None
    except tomllib.TOMLDecodeError as error:
        raise WrongSettings([f"{path}: {error}"]) from None


def _names(section: str, name: str) -> str:
    return f"{section}.{name} ({PREFIX}{section}_{name})".replace(
        f"{PREFIX}{section}_{name}", f"{PREFIX}{section}_{name}".upper()
    )


def _line(problem: Any) -> str:
    where = [str(part) for part in problem["loc"]]
    name = _names(where[0], where[1]) if len(where) > 1 else where[0]
    reason = problem["msg"].removeprefix("Value error, ")
    if problem["type"] == "extra_forbidden":
        return f"{name}: there is no such setting; `kvplane config` lists them"
    given = problem.get("input")
    secret = len(where) > 1 and where[1] in {"internal_token", "url"}
    if secret or not isinstance(given, str | int | float | bool):
        return f"{name}: {reason}"
    return f"{name}: {reason}, not {given!r}"


def each_setting() -> Iterator[tuple[str, str, FieldInfo]]:
    """Yield section, name and description of every setting, in the order of the docs."""
    for section, info in Settings.model_fields.items():
        kind = info.annotation
        assert isinstance(kind, type)
        assert issubclass(kind, Section)
        for name, field in kind.model_fields.items():
            yield section, name, field
