"""kvplane audit ..."""

import contextlib
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from kvplane.cli.remote import Json, Limit, Remote, Server, Token, call, fail, moment_of, pages

app = typer.Typer(no_args_is_help=True, help="See who made, revoked, ended and drained what.")

Since = Annotated[
    str,
    typer.Option(
        help="Only from then on: a time such as 2030-01-31 or 2030-01-31T12:00Z (UTC where it"
        " does not say), or how long ago, such as 7d.",
        show_default=False,
    ),
]
Until = Annotated[str, typer.Option(help="Only before then; as --since.", show_default=False)]
Tenant = Annotated[str, typer.Option(help="Only on behalf of this tenant.", show_default=False)]
Actor = Annotated[
    str, typer.Option(help="Only by this one, such as key:key-3f0c.", show_default=False)
]
Action = Annotated[
    str, typer.Option(help="Only this call, such as LeaseService/RevokeLease.", show_default=False)
]


@app.command("list")
def list_events(
    since: Since = "",
    until: Until = "",
    tenant: Tenant = "",
    actor: Actor = "",
    action: Action = "",
    limit: Limit = 100,
    server: Server = None,
    token: Token = None,
    as_json: Json = False,
) -> None:
    """List what was changed, the newest first."""
    from kvplane.cli.output import show_json, show_table
    from kvplane.cli.plain import plain

    request = _request(since, until, tenant, actor, action)

    async def work(remote: Remote) -> None:
        found = [plain(item) async for item in _events(remote, request, limit)]
        if as_json:
            show_json(found)
            return
        rows = [
            (
                x["time"],
                x["actor"],
                x["action"].rpartition("/")[2],
                x["target"],
                x["detail"],
                x["tenant_id"],
                f"{x['outcome']} {x['reason']}".strip(),
            )
            for x in found
        ]
        columns = ("time", "who", "what", "target", "how", "tenant", "outcome")
        show_table(columns, rows, "nothing of that kind is written down")

    call(server, "default", token, work)


@app.command("export")
def export_events(
    since: Since = "",
    until: Until = "",
    tenant: Tenant = "",
    actor: Actor = "",
    action: Action = "",
    output: Annotated[
        Path | None, typer.Option(help="Write to this file. Default: stdout.", show_default=False)
    ] = None,
    server: Server = None,
    token: Token = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="What it does anyway: one JSON object a line.")
    ] = False,
) -> None:
    """Write all of it as JSON lines, the newest first."""
    import json

    from kvplane.cli.plain import plain

    request = _request(since, until, tenant, actor, action)
    try:
        file = contextlib.nullcontext(sys.stdout) if output is None else output.open("w")
    except OSError as error:
        fail(f"--output: {output}: {error.strerror}", 2)

    written = 0

    async def work(remote: Remote) -> None:
        nonlocal written
        async for event in _events(remote, request, sys.maxsize):
            lines.write(json.dumps(plain(event), ensure_ascii=False) + "\n")
            written += 1

    with file as lines:
        call(server, "default", token, work)
    if output is not None:
        typer.echo(f"{output}: {written} events", err=True)


def _request(since: str, until: str, tenant: str, actor: str, action: str) -> Any:
    from kvplane.api.audit.v1 import audit_pb2 as pb

    request = pb.ListAuditEventsRequest(tenant_id=tenant, actor=actor, action=action)
    if since:
        request.since.FromDatetime(moment_of(since, "--since"))
    if until:
        request.until.FromDatetime(moment_of(until, "--until"))
    return request


def _events(remote: Remote, wanted: Any, limit: int) -> Any:
    from kvplane.api.audit.v1 import audit_pb2 as pb

    api = remote.audit()

    def fetch(size: int, page: str) -> Any:
        request = pb.ListAuditEventsRequest()
        request.CopyFrom(wanted)
        request.page_size, request.page_token = size, page
        return api.ListAuditEvents(request)

    return pages(fetch, "events", limit)
