"""Settings from flags, the environment and a TOML file.

A flag wins over ``KVPLANE_<SECTION>_<NAME>``, which wins over the file (``--config`` or
``KVPLANE_CONFIG``), which wins over the default. A section is a table of the file.
"""

import dataclasses
import os
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar, Final, Self, TypeVar

from pydantic import Field, ValidationError, model_validator
from pydantic.fields import FieldInfo
from pydantic_settings import (
    BaseSettings,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    SettingsError,
    TomlConfigSettingsSource,
)

from kvplane.kernel.errors import InvalidField
from kvplane.runtime.sections import (
    AuditSettings,
    AuthSettings,
    DatabaseSettings,
    GatewaySettings,
    GrpcSettings,
    LeaseSettings,
    LogSettings,
    RoutingSettings,
    Section,
    SessionSettings,
    TelemetrySettings,
    TlsSettings,
)

PREFIX: Final = "KVPLANE_"
CONFIG_VARIABLE: Final = "KVPLANE_CONFIG"
_SECRET: Final = {"internal_token", "upstream_api_key", "url"}

C = TypeVar("C")


class WrongSettings(Exception):
    """One line for each wrong setting: its name, its variable, the reason."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


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
    tls: TlsSettings = _section(TlsSettings)
    session: SessionSettings = _section(SessionSettings)
    lease: LeaseSettings = _section(LeaseSettings)
    routing: RoutingSettings = _section(RoutingSettings)
    audit: AuditSettings = _section(AuditSettings)
    gateway: GatewaySettings = _section(GatewaySettings)
    log: LogSettings = _section(LogSettings)
    telemetry: TelemetrySettings = _section(TelemetrySettings)

    @model_validator(mode="after")
    def _services_know_one_another(self) -> Self:
        token = self.auth.internal_token.get_secret_value()
        if self.auth.mode == "api_key" and not token and self.tls.files() is None:
            raise ValueError(
                "auth.internal_token: must be set for mode api_key, or tls.ca_file, tls.cert_file"
                " and tls.key_file"
            )
        return self

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


def load(config: Path | None = None, **sections: dict[str, Any]) -> Settings:
    """Read all settings. `sections` are the command line's, see `flags`.

    Raises WrongSettings.
    """
    named = config or (Path(os.environ[CONFIG_VARIABLE]) if CONFIG_VARIABLE in os.environ else None)
    if named is not None:
        _check_file(named)

    class FromHere(Settings):
        _file = named

    try:
        return FromHere(**sections)  # type: ignore[arg-type]
    except ValidationError as error:
        raise WrongSettings([_line(problem) for problem in error.errors()]) from None
    except SettingsError as error:
        raise WrongSettings([str(error.__cause__ or error)]) from None


def flags(**sections: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return sections for `load` without the options that were not given."""
    given = {
        section: {name: value for name, value in values.items() if value is not None}
        for section, values in sections.items()
    }
    return {section: values for section, values in given.items() if values}


def config_of(kind: type[C], name: str, section: Section, **more: Any) -> C:
    """Return a service's config dataclass, filled from the section `name` and `more`.

    Raises WrongSettings.
    """
    values = {
        field.name: getattr(section, field.name)
        for field in dataclasses.fields(kind)  # type: ignore[arg-type]
        if field.name in type(section).model_fields
    }
    try:
        return kind(**{**values, **more})
    except (InvalidField, ValueError) as error:
        raise WrongSettings([f"{name}.{error}"]) from None


def variable(section: str, name: str) -> str:
    """Return the environment variable of a setting."""
    return f"{PREFIX}{section}_{name}".upper()


def each_setting() -> Iterator[tuple[str, str, FieldInfo]]:
    """Yield section, name and description of every setting, in the order of the docs."""
    for section, info in Settings.model_fields.items():
        kind = info.annotation
        assert isinstance(kind, type)
        assert issubclass(kind, Section)
        for name, field in kind.model_fields.items():
            yield section, name, field


def _check_file(path: Path) -> None:
    try:
        tomllib.loads(path.read_text())
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "is not text"
        raise WrongSettings([f"{path}: {reason} (from --config or {CONFIG_VARIABLE})"]) from None
    except tomllib.TOMLDecodeError as error:
        raise WrongSettings([f"{path}: {error}"]) from None


def _line(problem: Any) -> str:
    where = [str(part) for part in problem["loc"]]
    reason = problem["msg"].removeprefix("Value error, ")
    if len(where) < 2 and problem["type"] == "value_error":  # of a section: it names itself
        name, _, reason = reason.partition(": ")
        where += name.split(".")
    shown = ".".join(where)
    if len(where) > 1:
        shown += f" ({variable(where[0], where[1])})"
    if problem["type"] == "extra_forbidden":
        return f"{shown}: there is no such setting; `kvplane config` lists them"
    given = problem.get("input")
    if _SECRET.isdisjoint(where) and isinstance(given, str | int | float):
        reason += f", not {given!r}"
    return f"{shown}: {reason}"
