"""What importing a part pulls in, seen by a fresh interpreter."""

import subprocess
import sys

import pytest

HEAVY = {
    "sqlalchemy", "alembic", "asyncpg", "structlog", "pydantic", "pydantic_settings", "grpc",
    "google", "aiohttp", "orjson", "prometheus_client", "opentelemetry", "typer", "rich", "uvloop",
    "numpy", "torch", "vllm", "nixl_cu12", "cryptography",
}  # fmt: skip

# Modules, and what of HEAVY they may load. Each runs with no more than its extra installed.
LIGHT = [
    ("kvplane", set()),
    ("kvplane_vllm", set()),
    ("kvplane.engine", set()),
    ("kvplane.cli", set()),
    ("kvplane.kernel.errors, kvplane.kernel.compat, kvplane.kernel.digests", set()),
    (
        "kvplane.client, kvplane.client.connect, kvplane.worker.agent, kvplane.worker.cut,"
        " kvplane.worker.identity, kvplane.worker.reading",
        {"grpc", "google"},
    ),
    # The services, without the gateway's packages.
    (
        "kvplane.cli.compose, kvplane.cli.serve",
        {"sqlalchemy", "structlog", "pydantic", "pydantic_settings", "grpc", "google",
         "prometheus_client", "opentelemetry", "asyncpg", "alembic", "rich", "typer", "uvloop"},
    ),
    # The gateway, without a database's.
    (
        "kvplane.gateway.main",
        {"grpc", "google", "aiohttp", "orjson", "prometheus_client", "structlog", "rich",
         "opentelemetry"},
    ),
    # The reference engine, without either's.
    ("kvplane.engine.http, kvplane.engine.core, kvplane.engine.managed",
     {"aiohttp", "numpy", "grpc", "google"}),
]  # fmt: skip


@pytest.mark.parametrize(("modules", "allowed"), LIGHT, ids=[case[0][:50] for case in LIGHT])
def test_an_import_stays_light(modules: str, allowed: set[str]) -> None:
    code = f"import sys, {modules}; print(*{{name.partition('.')[0] for name in sys.modules}})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    loaded = HEAVY & set(done.stdout.split())
    assert loaded <= allowed
