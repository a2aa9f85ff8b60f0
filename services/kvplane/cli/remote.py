"""What all commands that ask a server share: options, the call, errors, pages."""

import os
import re
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from typing import TYPE_CHECKING, Annotated, Any, Final, NoReturn

import typer

if TYPE_CHECKING:
    from datetime import datetime

    from kvplane.client.tls import TlsFiles
    from kvplane.kernel.errors import KvplaneError

DEFAULT_SERVER = "127.0.0.1:7700"
_TIMEOUT = 3.0
_PAGE = 1000
_SECONDS: Final = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
_DURATION: Final = re.compile(r"([0-9]{1,9})([smhd])\Z")

Server = Annotated[
    str | None,
    typer.Option(
        help="host:port of the server. Default: KVPLANE_<SERVICE>_ADDRESS, then KVPLANE_SERVER,"
        f" then {DEFAULT_SERVER}.",
        show_default=False,
    ),
]
Tenant = Annotated[
    str, typer.Option(help="On whose behalf.", envvar="KVPLANE_TENANT", show_default=True)
]
Token = Annotated[
    str | None,
    typer.Option(
        help="API key or internal token, where the server asks for one.",
        envvar="KVPLANE_TOKEN",
        show_default=False,
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]
Limit = Annotated[int, typer.Option(help="At most so many rows.", min=1)]


def fail(message: str, code: int = 1) -> NoReturn:
    """End with one line on stderr. Code 2: the user must change what was typed or set."""
    sys.stderr.write(f"kvplane: {message}\n")
    raise typer.Exit(code)


def sure(question: str, yes: bool) -> None:
    """Ask before what breaks something for somebody.

    Ends with code 1 when the answer is no, with 2 where nobody can be asked.
    """
    if yes:
        return
    if not sys.stdin.isatty():
        fail("this is asked first, and there is no terminal to ask at: add --yes", 2)
    sys.stderr.write(f"{question} [y/N] ")
    sys.stderr.flush()
    if sys.stdin.readline().strip().lower() not in {"y", "yes"}:
        fail("nothing was done")


def seconds_of(text: str, option: str) -> int:
    """Return the seconds of a duration such as ``90d``; ends with code 2 otherwise."""
    found = _DURATION.match(text)
    if found is None:
        fail(f"{option}: use a number and s, m, h or d, such as 90d, not {text!r}", 2)
    return int(found[1]) * _SECONDS[found[2]]


def moment_of(text: str, option: str) -> "datetime":
    """Return a time: ISO 8601, UTC where it does not say, or so long ago; or end with code 2."""
    from datetime import UTC, datetime

    from kvplane.kernel.clock import SystemClock

    try:
        if _DURATION.match(text):
            past = SystemClock().now_us() / 1e6 - seconds_of(text, option)
            return datetime.fromtimestamp(past, UTC)
        moment = datetime.fromisoformat(text)
        # Refuses those that are in no year from 1 to 9999 in UTC.
        return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).astimezone(UTC)
    except (ValueError, OverflowError):
        fail(f"{option}: use a time such as 2030-01-31T12:00Z, or 7d for so long ago", 2)


def address_of(service: str, server: str | None) -> str:
    """Return where a service (session, lease, routing) is."""
    return (
        server
        or os.environ.get(f"KVPLANE_{service.upper()}_ADDRESS")
        or os.environ.get("KVPLANE_SERVER")
        or DEFAULT_SERVER
    )


class Remote:
    """The services that the commands ask."""

    def __init__(self, server: str | None, tenant: str, token: str | None) -> None:
        self._server = server
        self._options: dict[str, Any] = {
            "tenant": tenant,
            "token": token,
            "timeout": _TIMEOUT,
            "tls": _tls_files(),
        }
        self.address = ""
        self.service = ""

    def _at(self, service: str) -> str:
        self.service, self.address = service, address_of(service, self._server)
        return self.address

    def leases(self) -> Any:
        """Return the lease service's client."""
        from kvplane import client

        return client.lease_api(self._at("lease"), **self._options)

    def sessions(self) -> Any:
        """Return the session service's client."""
        from kvplane import client

        return client.session_api(self._at("session"), **self._options)

    def tenants(self) -> Any:
        """Return the tenant service's client."""
        from kvplane import client

        return client.tenant_api(self._at("session"), **self._options)

    def audit(self) -> Any:
        """Return the audit service's client."""
        from kvplane import client

        return client.audit_api(self._at("session"), **self._options)

    def workers(self) -> Any:
        """Return the worker registry's client."""
        from kvplane import client

        return client.worker_api(self._at("routing"), **self._options)


def _tls_files() -> "TlsFiles | None":
    """Return the files that KVPLANE_TLS_* name; ends with code 2 when they are wrong."""
    from kvplane.client.tls import VARIABLE, TlsFiles, load
    from kvplane.kernel.errors import InvalidField

    try:
        files = TlsFiles.from_environment()
        if files is not None:
            load(files)
    except InvalidField as error:
        name, _, problem = error.message.partition(": ")
        fail(f"{VARIABLE}{name.upper()}: {problem}", 2)
    return files


def call(
    server: str | None,
    tenant: str,
    token: str | None,
    work: Callable[[Remote], Coroutine[Any, Any, None]],
) -> None:
    """Run `work`; its errors become one line and an exit code."""
    import asyncio

    # Errors are told in one line of ours; gRPC would tell of each try.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    from kvplane.client import close_channels
    from kvplane.kernel.errors import KvplaneError

    remote = Remote(server, tenant, token)

    async def run() -> None:
        try:
            await work(remote)
        finally:
            await close_channels()

    try:
        asyncio.run(run())
    except KvplaneError as error:
        fail(_explain(error, remote), 2 if error.reason == "INVALID_FIELD" else 1)
    except KeyboardInterrupt:
        raise typer.Exit(130) from None


def _explain(error: "KvplaneError", remote: Remote) -> str:
    address, variable = remote.address, f"KVPLANE_{remote.service.upper()}_ADDRESS"
    if "tls" in error.metadata:
        return f"{address}: {error.message} (see KVPLANE_TLS_CA_FILE and its neighbours)"
    # gRPC's own words: it never reached a server of ours.
    if error.reason == "UNAVAILABLE" and error.retry_after is None:
        return (
            f"no answer from {address}: start a server with `kvplane dev`, or name the right one"
            f" with --server, {variable} or KVPLANE_SERVER"
        )
    if error.message == "Method not found!":
        return f"{address} is not the {remote.service} service: see --server and {variable}"
    if error.reason == "UNAUTHENTICATED" and "certificate" in error.message:
        return f"{address}: {error.message} (see KVPLANE_TLS_CERT_FILE)"
    if error.reason == "UNAUTHENTICATED":
        return f"{error.message} (pass it with --token or KVPLANE_TOKEN)"
    if error.reason == "INTERNAL":
        request_id = error.metadata.get("request_id", "unknown")
        return f"{address}: {error.message} ({request_id})"
    return error.message


async def pages(
    fetch: Callable[[int, str], Awaitable[Any]], items: str, limit: int
) -> AsyncIterator[Any]:
    """Yield up to `limit` items of a paged list; `fetch` gets page size and token."""
    token = ""
    while limit > 0:
        answer = await fetch(min(limit, _PAGE), token)
        for item in getattr(answer, items):
            yield item
            limit -= 1
        token = answer.next_page_token
        if not token:
            return
    sys.stderr.write("there is more: raise --limit\n")


def enum_value(enum: Any, name: str, option: str) -> int:
    """Return the number of a short enum name such as ``held``; ends with code 2 otherwise."""
    from kvplane.cli.plain import enum_choices, enum_prefix

    known = enum.DESCRIPTOR.values_by_name.get(enum_prefix(enum.DESCRIPTOR) + name.upper())
    if known is None or known.number == 0:
        fail(f"{option}: use one of {', '.join(enum_choices(enum.DESCRIPTOR))}, not {name!r}", 2)
    return int(known.number)
