"""The command line over mutual TLS: its variables, and one sentence for what is wrong."""

import asyncio
import dataclasses
import os
from collections.abc import Callable
from typing import Any

import pytest
from kvplane.cli.app import app
from kvplane.client import TlsFiles
from kvplane.engine import __main__ as engine
from typer.testing import CliRunner

from tls.authority import Authority

Run = Callable[..., Any]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs a command and returns its exit code and what it wrote to stderr."""
    for name in list(os.environ):
        if name.startswith("KVPLANE_"):
            monkeypatch.delenv(name)
    # What does not connect is tried again for so long.
    monkeypatch.setattr("kvplane.cli.remote._TIMEOUT", 0.5)

    async def go(*arguments: str, **env: str) -> tuple[int, str]:
        result = await asyncio.to_thread(CliRunner().invoke, app, list(arguments), env=env)
        return result.exit_code, result.stderr

    return go


def variables(files: TlsFiles) -> dict[str, str]:
    return {
        "KVPLANE_TLS_CA_FILE": files.ca_file,
        "KVPLANE_TLS_CERT_FILE": files.cert_file,
        "KVPLANE_TLS_KEY_FILE": files.key_file,
    }


@pytest.fixture
def certificate(authority: Authority, files: Callable[..., TlsFiles]) -> Callable[[str], Any]:
    """Returns the variables of a certificate."""
    return lambda uri: variables(files(authority.issue(uri)))


async def test_the_variables_are_a_credential(serve: Any, run: Run, certificate: Any) -> None:
    server = await serve()
    show = ("leases", "get", "l1", "--server", server.address)
    assert await run(*show, **certificate("kvplane:operator/ann")) == (0, "")
    assert server.leases.callers[0].actor == "cert:operator/ann"

    code, told = await run(*show, **certificate("kvplane:root/ann"))
    assert code == 1
    assert f"{server.address}: the client's certificate has kvplane:root; known are" in told
    assert "(see KVPLANE_TLS_CERT_FILE)" in told

    code, told = await run(*show, **certificate("kvplane:client/app"))
    assert code == 1
    assert "send an API key" in told
    assert "KVPLANE_TOKEN" in told


async def test_one_side_without_tls_is_said(serve: Any, run: Run, certificate: Any) -> None:
    secure, plain = await serve(), await serve(None)
    code, told = await run("leases", "get", "l1", "--server", secure.address)
    assert code == 1
    assert told == (
        f"kvplane: {secure.address}: the server closes connections without TLS, or is just going"
        " away: if it speaks TLS, give ca_file, cert_file and key_file"
        " (see KVPLANE_TLS_CA_FILE and its neighbours)\n"
    )
    code, told = await run(
        "leases", "get", "l1", "--server", plain.address, **certificate("kvplane:operator/ann")
    )
    assert code == 1
    assert f"{plain.address}: the server does not speak TLS, and we do (see KVPLANE_TLS" in told


async def test_another_service_is_said(serve: Any, run: Run) -> None:
    lease = await serve(None)
    code, told = await run("tenants", "list", "--server", lease.address)
    assert code == 1
    assert told == (
        f"kvplane: {lease.address} is not the session service:"
        " see --server and KVPLANE_SESSION_ADDRESS\n"
    )


async def test_wrong_variables_are_named(run: Run, certificate: Any) -> None:
    given = certificate("kvplane:operator/ann")
    cert = given["KVPLANE_TLS_CERT_FILE"]
    for key, wanted in (
        ("", "must be set: ca_file, cert_file, key_file belong together"),
        ("/nowhere", "/nowhere: No such file or directory"),
        (cert, f"{cert} has no private key in PEM, or one with a password"),
    ):
        told = await run("leases", "get", "l1", **{**given, "KVPLANE_TLS_KEY_FILE": key})
        assert told == (2, f"kvplane: KVPLANE_TLS_KEY_FILE: {wanted}\n")
    told = await run("leases", "get", "l1", KVPLANE_TLS_SERVER_NAME="kvplane")
    assert told == (
        2,
        "kvplane: KVPLANE_TLS_SERVER_NAME: needs ca_file, cert_file, key_file\n",
    )


@pytest.mark.parametrize("service", ["session", "lease", "routing", "gateway"])
async def test_nobody_listens_beyond_this_machine_without_credentials(
    run: Run, service: str
) -> None:
    for host in ("0.0.0.0", "::", "10.1.2.3", "kvplane.internal"):
        code, told = await run("serve", service, "--host", host, "--port", "0")
        assert code == 2
        assert f"on {host} everybody could do everything; set auth.mode" in told
    code, told = await run(
        "serve", service, "--host", "0.0.0.0", "--port", "0", KVPLANE_AUTH_MODE="api_key"
    )
    assert code == 2
    assert "auth.internal_token (KVPLANE_AUTH_INTERNAL_TOKEN): must be set for mode api_key" in told


@pytest.mark.parametrize("command", [("serve", "lease"), ("serve", "gateway"), ("dev",)])
async def test_what_has_wrong_files_does_not_start(
    run: Run, certificate: Any, command: tuple[str, ...]
) -> None:
    given = certificate("kvplane:service/lease")
    code, told = await run(*command, **given)
    assert code == 2
    assert "tls.ca_file: who calls would not be looked at; set auth.mode" in told
    given = {**given, "KVPLANE_AUTH_MODE": "api_key"}
    code, told = await run(*command, **{**given, "KVPLANE_TLS_KEY_FILE": ""})
    assert code == 2
    assert "tls.key_file (KVPLANE_TLS_KEY_FILE): must be set" in told
    code, told = await run(*command, **{**given, "KVPLANE_TLS_KEY_FILE": "/nowhere"})
    assert (code, told) == (2, "kvplane: tls.key_file: /nowhere: No such file or directory\n")


def test_the_reference_engine_takes_options_or_variables(
    monkeypatch: pytest.MonkeyPatch, authority: Authority, files: Callable[..., TlsFiles]
) -> None:
    tls = files(authority.issue("kvplane:worker/w1"), server_name="kvplane.internal")
    options = [
        f"--tls-{name.replace('_', '-')}={value}" for name, value in dataclasses.asdict(tls).items()
    ]

    def control_plane(*more: str) -> Any:
        return engine.control_plane_of(engine.parser().parse_args(["--control-plane=a:1", *more]))

    assert control_plane(*options).tls == tls
    assert control_plane().tls is None
    with pytest.raises(SystemExit, match="--tls-key-file: must be set: ca_file"):
        control_plane(*options[:2])
    with pytest.raises(SystemExit, match="--tls-key-file: /nowhere: No such file"):
        control_plane(*options, "--tls-key-file=/nowhere")
    for name, value in variables(tls).items():
        monkeypatch.setenv(name, value)
    assert control_plane("--tls-server-name=kvplane.internal").tls == tls
