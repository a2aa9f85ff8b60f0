"""docker-compose.yml, read."""

import json
import os
import re
import shutil
import subprocess

import pytest
from compose.compose_file import FILE, GIVEN, ROOT, default_services, load

SERVICES = load()["services"]
WAITS_FOR = {
    "migrate": {"postgres": "service_healthy"},
    "session": {"migrate": "service_completed_successfully"},
    "lease": {"migrate": "service_completed_successfully"},
    "gateway": {"routing": "service_healthy"},
    "prefill": {"routing": "service_healthy", "lease": "service_healthy"},
    "decode": {"routing": "service_healthy", "lease": "service_healthy"},
}
ONE_SHOT = {"migrate", "model"}


def test_the_default_is_a_whole_kvplane_with_reference_engines() -> None:
    names = set(default_services(load()))
    assert names == {
        *("postgres", "migrate", "session", "lease", "routing", "gateway", "prefill", "decode")
    }
    assert SERVICES["prefill"]["command"][0] == "kvplane.engine"


@pytest.mark.parametrize("name", WAITS_FOR)
def test_start_order(name: str) -> None:
    given = {n: c["condition"] for n, c in SERVICES[name]["depends_on"].items()}
    assert given == WAITS_FOR[name]


@pytest.mark.parametrize("name", SERVICES)
def test_every_service_that_stays_has_a_health_check(name: str) -> None:
    assert ("healthcheck" in SERVICES[name]) != (name in ONE_SHOT)
    assert (SERVICES[name].get("restart") == "no") == (name in ONE_SHOT)


def test_who_is_waited_for_healthy_has_a_check() -> None:
    for service in SERVICES.values():
        for name, on in service.get("depends_on", {}).items():
            if on["condition"] == "service_healthy":
                assert "healthcheck" in SERVICES[name]


def test_images_are_targets_of_the_dockerfile() -> None:
    stages = set(re.findall(r"^FROM \S+ AS (\w+)$", (ROOT / "Dockerfile").read_text(), re.M))
    targets = {s["build"]["target"] for s in SERVICES.values() if "build" in s}
    assert targets == {"services", "engine", "vllm"}
    assert targets <= stages


@pytest.mark.parametrize("name", ["prefill-vllm", "decode-vllm"])
def test_vllm_is_started_with_a_connector_configuration_that_is_right(name: str) -> None:
    from kvplane_vllm.config import PluginConfig

    service = SERVICES[name]
    assert service["profiles"] == ["vllm"]
    command = service["command"]
    transfer = json.loads(command[command.index("--kv-transfer-config") + 1])
    config = PluginConfig.parse(transfer["kv_connector_extra_config"])
    port = next(part for part in command if part.startswith("--port=")).partition("=")[2]
    assert config.url == f"http://{name}:{port}"
    assert transfer["kv_connector_extra_config"]["bidirectional_kv_xfer"] is True
    assert transfer["kv_connector_module_path"] == "kvplane_vllm.connector"


def test_who_is_reached_from_outside_its_container_asks_for_credentials() -> None:
    """The secret has no default, so it is nobody's but the user's."""
    secret = GIVEN["KVPLANE_AUTH_INTERNAL_TOKEN"]
    served = [s for s in SERVICES.values() if s.get("command", [""])[1:2] == ["serve"]]
    assert len(served) == 4
    for service in served:
        env = service["environment"]
        assert env["KVPLANE_AUTH_MODE"] == "api_key"
        assert env["KVPLANE_AUTH_INTERNAL_TOKEN"] == secret
    for name in ("prefill", "decode", "prefill-vllm", "decode-vllm"):
        assert SERVICES[name]["environment"]["KVPLANE_TOKEN"] == secret
    published = [port for s in SERVICES.values() for port in s.get("ports", ())]
    assert published
    assert all(port.startswith("127.0.0.1:") for port in published)
    assert FILE.read_text().count("KVPLANE_AUTH_INTERNAL_TOKEN:?") == 1


def test_ports_differ() -> None:
    ports = re.findall(
        r"--(?:kv-)?port=(\d+)|SIDE_CHANNEL_PORT: .(\d+)|\w_ADDRESS: \w+:(\d+)", FILE.read_text()
    )
    flat = [port for group in ports for port in group if port]
    assert len(flat) >= 11
    assert len(flat) == len(set(flat))


def test_docker_compose_takes_the_file() -> None:
    docker = shutil.which("docker")
    probe = [docker or "docker", "compose", "version"]
    if docker is None or subprocess.run(probe, capture_output=True, check=False).returncode:
        pytest.skip("docker compose is not installed")
    env = {**os.environ, **GIVEN}
    for profile in ([], ["--profile", "vllm"]):
        command = [docker, "compose", "-f", str(FILE), *profile, "config", "--quiet"]
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
        assert done.returncode == 0, done.stderr
