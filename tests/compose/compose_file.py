"""docker-compose.yml as a test sees it: read, and turned into local processes."""

import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from demo.servers import Server

ROOT = Path(__file__).resolve().parents[2]
FILE = ROOT / "docker-compose.yml"
# What has no default must be given.
GIVEN = {"KVPLANE_AUTH_INTERNAL_TOKEN": "the-secret-of-the-services"}


def load() -> dict[str, Any]:
    """Return the file with its variables replaced by what is given, or their defaults."""

    def interpolate(value: Any) -> Any:
        if isinstance(value, str):
            value = re.sub(r"\$\{(\w+):\?[^}]*\}", lambda m: GIVEN[m[1]], value)
            value = re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", value)
            assert not re.search(r"(?<!\$)\$(?!\$)", value), f"no default: {value}"
            return value.replace("$$", "$")
        if isinstance(value, list):
            return [interpolate(item) for item in value]
        if isinstance(value, dict):
            return {key: interpolate(item) for key, item in value.items()}
        return value

    loaded: dict[str, Any] = interpolate(yaml.safe_load(FILE.read_text()))
    return loaded


def default_services(file: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the services that start without a profile, each after those it depends on."""
    todo = {n: s for n, s in file["services"].items() if not s.get("profiles")}
    ordered: dict[str, dict[str, Any]] = {}
    while todo:
        ready = [n for n, s in todo.items() if set(s.get("depends_on", {})) <= set(ordered)]
        assert ready, f"these wait for one another: {sorted(todo)}"
        for name in ready:
            ordered[name] = todo.pop(name)
    return ordered


@dataclass(frozen=True)
class Loopback:
    """Every service's name is a loopback address of its own, so ports need no change."""

    names: tuple[str, ...]
    database_url: str

    def address(self, name: str) -> str:
        """Return a service's address."""
        return f"127.0.9.{1 + self.names.index(name)}"

    def text(self, name: str, value: str) -> str:
        """Return a command's or setting's text as the service `name` uses it here."""
        if value.startswith("postgresql://"):
            return self.database_url
        value = re.sub(r"\b(0\.0\.0\.0|127\.0\.0\.1)\b", self.address(name), value)
        hosts = "|".join(map(re.escape, self.names))
        pattern = rf"(?<![\w.-])({hosts})(?=:\d)|(?<=--kv-host=)({hosts})$"
        return re.sub(pattern, lambda m: self.address(m[0]), value)

    def environment(self, name: str, service: Mapping[str, Any]) -> dict[str, str]:
        """Return a service's environment."""
        given = service.get("environment", {})
        env = {key: self.text(name, str(value)) for key, value in given.items()}
        if "UCX_NET_DEVICES" in env:
            env["UCX_NET_DEVICES"] = "lo"
        return {**_PATIENT, **env}

    def server(self, name: str, service: Mapping[str, Any], logs: Path) -> "Container":
        """Return the service as a process."""
        # The images' entry point.
        command = [sys.executable, "-m", *(self.text(name, str(c)) for c in service["command"])]
        test = service.get("healthcheck", {}).get("test", [])
        assert not test or test[:2] == ["CMD", "python"]
        check = [sys.executable, *(self.text(name, part) for part in test[2:])]
        env = self.environment(name, service)
        return Container(name, command, check, env, logs)


# All of it shares a few busy cores here, so what is bounded is bounded wider.
_PATIENT = {
    "KVPLANE_GATEWAY_ROUTE_TIMEOUT_S": "5",
    "KVPLANE_ROUTING_SESSION_BOUND_S": "2",
    "KVPLANE_ROUTING_LEASE_BOUND_S": "2",
    "KVPLANE_ROUTING_REPORT_WAIT_S": "1",
}


class Container(Server):
    """A service's process; its health is the file's own check."""

    def __init__(
        self, name: str, command: list[str], check: list[str], env: dict[str, str], logs: Path
    ) -> None:
        super().__init__(name, command, url="", env=env, logs=logs)
        self._check = check

    def healthy(self) -> bool:
        done = subprocess.run(self._check, capture_output=True, timeout=20, check=False)
        return done.returncode == 0

    def run_to_end(self, timeout: float) -> int:
        """Run a one-shot service and return its exit status."""
        self.start()
        assert self.process is not None
        return self.process.wait(timeout)
