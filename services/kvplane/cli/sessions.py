"""kvplane sessions ..."""

from typing import Annotated, Any

import typer

from kvplane.cli.remote import (
    Json,
    Limit,
    Remote,
    Server,
    Tenant,
    Token,
    Yes,
    call,
    enum_value,
    fail,
    pages,
    sure,
)

app = typer.Typer(no_args_is_help=True, help="See and end conversations.")

SessionId = Annotated[
    str, typer.Argument(help="The session's id. Or name it with --name.", show_default=False)
]
Name = Annotated[str, typer.Option(help="The client's name for the session, instead of the id.")]


@app.command("list")
def list_sessions(
    state: Annotated[list[str] | None, typer.Option(help="Only active, ended or expired.")] = None,
    model: Annotated[str, typer.Option(help="Only of this model.")] = "",
    worker: Annotated[str, typer.Option(help="Only those whose last decode ran there.")] = "",
    limit: Limit = 100,
    server: Server = None,
    tenant: Tenant = "default",
    token: Token = None,
    as_json: Json = False,
) -> None:
    """List the tenant's sessions."""
    from kvplane.api.session.v1 import session_pb2 as pb
    from kvplane.cli.output import show_json, show_table
    from kvplane.cli.plain import plain

    states = [enum_value(pb.SessionState, name, "--state") for name in state or ()]

    async def work(remote: Remote) -> None:
        api = remote.sessions()

        def fetch(size: int, page: str) -> Any:
            return api.ListSessions(
                pb.ListSessionsRequest(
                    states=states,  # type: ignore[arg-type]
                    model=model,
                    worker_id=worker,
                    page_size=size,
                    page_token=page,
                )
            )

        found = [plain(item) async for item in pages(fetch, "sessions", limit)]
        if as_json:
            show_json(found)
        else:
            show_table(_COLUMNS, [_row(x) for x in found], f"no sessions of tenant {tenant}")

    call(server, tenant, token, work)


@app.command("get")
def get_session(
    session_id: SessionId = "",
    name: Name = "",
    server: Server = None,
    tenant: Tenant = "default",
    token: Token = None,
    as_json: Json = False,
) -> None:
    """Show one session and what is held for it."""
    from kvplane.api.session.v1 import session_pb2 as pb

    _one_of(session_id, name)

    async def work(remote: Remote) -> None:
        request = pb.GetSessionRequest(session_id=session_id, name=name)
        _show((await remote.sessions().GetSession(request)).session, as_json)

    call(server, tenant, token, work)


@app.command("end")
def end_session(
    session_id: SessionId = "",
    name: Name = "",
    yes: Yes = False,
    server: Server = None,
    tenant: Tenant = "default",
    token: Token = None,
    as_json: Json = False,
) -> None:
    """End a session; the workers free what they hold for it."""
    from kvplane.api.session.v1 import session_pb2 as pb

    _one_of(session_id, name)
    sure(f"End session {session_id or name}? What is held for it is freed.", yes)

    async def work(remote: Remote) -> None:
        request = pb.EndSessionRequest(session_id=session_id, name=name)
        _show((await remote.sessions().EndSession(request)).session, as_json)

    call(server, tenant, token, work)


@app.command("watch")
def watch_sessions(
    session_id: Annotated[
        str, typer.Argument(help="Only this session. Default: all.", show_default=False)
    ] = "",
    server: Server = None,
    tenant: Tenant = "default",
    token: Token = None,
    as_json: Json = False,
) -> None:
    """Print every change as it happens, until Ctrl-C. With --json: one object a line."""
    from kvplane.api.session.v1 import session_pb2 as pb
    from kvplane.cli.output import show_json, show_line
    from kvplane.cli.plain import plain

    async def work(remote: Remote) -> None:
        changes = remote.sessions().WatchSessions(pb.WatchSessionsRequest(session_id=session_id))
        async for change in changes:
            found = plain(change.session)
            if as_json:
                show_json(found, indent=False)
            else:
                show_line(_COLUMNS, _row(found))

    call(server, tenant, token, work)


def _one_of(session_id: str, name: str) -> None:
    if bool(session_id) == bool(name):
        fail("give a session id or --name, one of them", 2)


_COLUMNS = (
    "session", "name", "state", "turns", "reused", "recomputed", "decode", "last turn", "model",
)  # fmt: skip


def _row(session: dict[str, Any]) -> tuple[Any, ...]:
    from kvplane.cli.plain import ago

    return (
        session["session_id"],
        session["name"],
        session["state"],
        session["turns"],
        session["tokens_reused"],
        session["tokens_recomputed"],
        session["last_decode_worker_id"],
        ago(session["last_turn_time"], _now()),
        session["model"],
    )


def _show(session: Any, as_json: bool) -> None:
    from kvplane.cli.output import show_fields, show_json
    from kvplane.cli.plain import ago, plain

    found = plain(session)
    if as_json:
        show_json(found)
        return
    for moment in ("create_time", "last_turn_time", "expire_time"):
        found[moment] = ago(found[moment], _now())
    show_fields(found)


def _now() -> Any:
    from datetime import UTC, datetime

    from kvplane.kernel.clock import SystemClock

    return datetime.fromtimestamp(SystemClock().now_us() / 1e6, UTC)
