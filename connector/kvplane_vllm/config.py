"""The ``kvplane`` block of kv_connector_extra_config.

    "kvplane": {"control_plane": "10.0.0.1:7700", "url": "http://10.0.0.7:8100"}

Each key of `PluginConfig` may be given; a wrong one stops the engine with its name.
"""

import dataclasses
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final
from urllib.parse import urlsplit

from kvplane.client.tls import TlsFiles, load
from kvplane.kernel.errors import InvalidField
from kvplane.kernel.validate import header
from kvplane.worker.identity import AgentConfig

_EXAMPLE: Final = '{"control_plane": "127.0.0.1:7700", "url": "http://127.0.0.1:8100"}'


class ConfigError(ValueError):
    """The block is missing or wrong; the text names the key and the fix."""

    def __init__(self, key: str, problem: str) -> None:
        super().__init__(f"kv_connector_extra_config.{key}: {problem}")


@dataclass(frozen=True, slots=True)
class PluginConfig:
    """What the block says."""

    control_plane: str | Mapping[str, str]  # host:port, or {"routing": ..., "lease": ...}
    url: str  # this engine's HTTP address, as the gateway reaches it
    worker_id: str = ""  # stable over restarts; default: host:port of the url
    served_models: tuple[str, ...] = ()  # default: the engine's own
    # Default: KVPLANE_TOKEN, which no list of processes shows.
    token: str | None = field(default=None, repr=False)
    # Mutual TLS with the control plane: these three, and the name in its certificates
    # where that is not in `control_plane`.
    ca_file: str = ""
    cert_file: str = ""
    key_file: str = ""
    server_name: str = ""
    begin_wait_seconds: float = AgentConfig.begin_wait_seconds
    grant_wait_seconds: float = AgentConfig.grant_wait_seconds
    read_limit_seconds: float = AgentConfig.read_limit_seconds
    lease_ttl_seconds: float = AgentConfig.lease_ttl_seconds
    max_held_share: float = AgentConfig.max_held_share

    @classmethod
    def parse(cls, extra: Mapping[str, Any]) -> "PluginConfig":
        """Read it from kv_connector_extra_config. Raises ConfigError."""
        block = extra.get("kvplane")
        if not isinstance(block, Mapping):
            raise ConfigError("kvplane", f"must be an object, such as {_EXAMPLE}")
        known = [each.name for each in dataclasses.fields(cls)]
        for key in block:
            if key not in known:
                raise ConfigError(f"kvplane.{key}", f"unknown; known are {', '.join(known)}")
        for key in ("control_plane", "url"):
            if not block.get(key):
                raise ConfigError(f"kvplane.{key}", f"must be set, such as {_EXAMPLE}")
        values = dict(block)
        for key, value in values.items():
            _check(key, value)
        if "served_models" in values:
            values["served_models"] = tuple(values["served_models"])
        values.setdefault("token", os.environ.get("KVPLANE_TOKEN") or None)
        values.setdefault("worker_id", urlsplit(values["url"]).netloc)
        return cls(**values)

    def agent(self) -> AgentConfig:
        """Return what the worker agent needs of it. Raises ConfigError for a wrong file."""
        where = self.control_plane
        both = where if isinstance(where, str) else ""
        return AgentConfig(
            routing=both or where["routing"],  # type: ignore[index]
            lease=both or where["lease"],  # type: ignore[index]
            token=self._token(),
            tls=self._tls(),
            begin_wait_seconds=self.begin_wait_seconds,
            grant_wait_seconds=self.grant_wait_seconds,
            read_limit_seconds=self.read_limit_seconds,
            lease_ttl_seconds=self.lease_ttl_seconds,
            max_held_share=self.max_held_share,
        )

    def _token(self) -> str | None:
        try:
            return header("token", self.token or "") or None
        except InvalidField as error:
            raise ConfigError("kvplane.token", error.message.removeprefix("token: ")) from None

    def _tls(self) -> TlsFiles | None:
        try:
            files = TlsFiles.of(self.ca_file, self.cert_file, self.key_file, self.server_name)
            if files is not None:
                load(files)
        except InvalidField as error:
            name, _, problem = error.message.partition(": ")
            raise ConfigError(f"kvplane.{name}", problem) from None
        return files


def _check(key: str, value: Any) -> None:
    name = f"kvplane.{key}"
    if key == "control_plane":
        if isinstance(value, str):
            _check_address(name, value)
            return
        if not isinstance(value, Mapping) or set(value) != {"routing", "lease"}:
            raise ConfigError(name, 'must be "host:port" or {"routing": ..., "lease": ...}')
        for part, address in value.items():
            _check_address(f"{name}.{part}", address)
    elif key == "url":
        parts = urlsplit(value) if isinstance(value, str) else None
        if parts is None or parts.scheme not in ("http", "https") or not parts.netloc:
            raise ConfigError(name, f"must be http://host:port, not {value!r}")
    elif key == "served_models":
        if not isinstance(value, list | tuple) or not all(isinstance(v, str) and v for v in value):
            raise ConfigError(name, "must be a list of names")
    elif key.endswith("_seconds"):
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 3600:
            raise ConfigError(name, f"must be seconds above 0, at most 3600, not {value!r}")
    elif key == "max_held_share":
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 1:
            raise ConfigError(name, f"must be a number above 0, at most 1, not {value!r}")
    elif not isinstance(value, str) or not value:
        raise ConfigError(name, "must be a string, not empty")


def _check_address(name: str, value: Any) -> None:
    for part in value.split(",") if isinstance(value, str) else [""]:
        host, _, port = part.rpartition(":")
        if not host or not port.isdigit():
            raise ConfigError(name, f"must be host:port, not {value!r}")
