"""`kvplane dev` and `kvplane serve`: settings, logs, telemetry, then run."""

import ipaddress
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from kvplane.cli.remote import fail
from kvplane.runtime.settings import Settings, WrongSettings, flags, load


def settings_or_exit(config: Path | None, **sections: dict[str, Any]) -> Settings:
    """Return the settings; wrong ones end the process with code 2, a line for each."""
    try:
        return load(config, **sections)
    except WrongSettings as error:
        fail("wrong settings\n" + "\n".join(f"  {problem}" for problem in error.problems), 2)


def run_service(service: str, config: Path | None, host: str | None, port: int | None) -> None:
    """Run one service until SIGTERM."""
    section = "gateway" if service == "gateway" else "grpc"
    settings = settings_or_exit(config, **flags(**{section: {"host": host, "port": port}}))
    _check_who_may_call(settings, section)

    async def main() -> None:
        from kvplane.kernel.clock import SystemClock
        from kvplane.runtime.process import run

        if service == "gateway":
            from kvplane.cli.front import GatewayProcess

            await run(GatewayProcess(settings), service)
        else:
            from kvplane.cli import compose

            await run(compose.service(service, settings, SystemClock()), service)

    _run(settings, service, main)


def run_dev(
    config: Path | None, database: str | None, port: int | None, gateway_port: int | None
) -> None:
    """Run everything until SIGTERM."""
    settings = settings_or_exit(
        config,
        **flags(database={"url": database}, grpc={"port": port}, gateway={"port": gateway_port}),
    )
    for name, host in (("grpc.host", settings.grpc.host), ("gateway.host", settings.gateway.host)):
        if not _is_loopback(host):
            fail(f"{name}: `kvplane dev` is for this machine only; use 127.0.0.1, not {host}", 2)
    _check_who_may_call(settings, "grpc")

    async def main() -> None:
        from kvplane.cli.front import DevProcess
        from kvplane.db import migrate
        from kvplane.kernel.clock import SystemClock
        from kvplane.runtime.process import run

        await migrate.upgrade(settings.database.url)
        await run(DevProcess(settings, SystemClock()), "dev")

    _run(settings, "dev", main)


def _run(settings: Settings, name: str, main: Callable[[], Coroutine[Any, Any, None]]) -> None:
    import uvloop

    from kvplane.kernel.errors import KvplaneError
    from kvplane.runtime import logs, telemetry

    logs.configure(settings.log.level, settings.log.format)
    try:
        telemetry.configure(settings.telemetry, name)
        uvloop.run(main())
    except WrongSettings as error:
        fail("wrong settings\n" + "\n".join(f"  {problem}" for problem in error.problems), 2)
    except KvplaneError as error:
        fail(error.message)
    except OSError as error:
        told = error.strerror or error
        fail(f"{told}: is another one running? Choose another --port, or a --host that we have")


def _check_who_may_call(settings: Settings, section: str) -> None:
    """End with code 2 where anybody could do anything, or certificates are not of use."""
    from kvplane.client.tls import load as load_tls
    from kvplane.kernel.errors import InvalidField

    host = getattr(settings, section).host
    how = "set auth.mode (KVPLANE_AUTH_MODE) to api_key"
    files = settings.tls.files()
    if settings.auth.mode == "none" and not _is_loopback(host):
        fail(f"{section}.host: on {host} everybody could do everything; {how}", 2)
    if settings.auth.mode == "none" and files is not None:
        fail(f"tls.ca_file: who calls would not be looked at; {how}", 2)
    try:
        if files is not None:
            load_tls(files)
    except InvalidField as error:
        fail(f"tls.{error.message}", 2)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
