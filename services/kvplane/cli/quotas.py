"""kvplane quotas ..."""

from typing import Annotated, Any, Final

import typer

from kvplane.cli.remote import Json, Remote, Server, Token, call, fail

app = typer.Typer(no_args_is_help=True, help="See and set the limits of tenants.")

TenantId = Annotated[str, typer.Argument(help="The tenant's id.")]

_HARD: Final = "Hard limits: beyond them it is refused"
_SOFT: Final = "Soft limits: beyond them nothing new is held for it"


def _limit(what: str, panel: str) -> Any:
    return typer.Option(help=f"{what}; 0: no limit.", rich_help_panel=panel, show_default=False)


_SESSIONS: Final = "Sessions that are active at once"
_HELD_TOKENS: Final = "Tokens whose KV workers hold for it"
_HELD_BLOCKS: Final = "Blocks that workers hold for it"
_LIVE_LEASES: Final = "Leases that are granted or reading"
_REQUESTS: Final = "Requests per second"
_TOKENS: Final = "Prompt and completion tokens per second"
_BYTES: Final = "Bytes of one request's body"


@app.command("get")
def get_quotas(
    tenant_id: TenantId, server: Server = None, token: Token = None, as_json: Json = False
) -> None:
    """Show a tenant's limits."""
    from kvplane.api.tenant.v1 import tenant_pb2 as pb

    async def work(remote: Remote) -> None:
        answer = await remote.tenants().GetQuotas(pb.GetQuotasRequest(tenant_id=tenant_id))
        _show(tenant_id, answer.quotas, as_json)

    call(server, "default", token, work)


@app.command("set")
def set_quotas(
    tenant_id: TenantId,
    sessions: Annotated[int | None, _limit(_SESSIONS, _HARD)] = None,
    held_tokens: Annotated[int | None, _limit(_HELD_TOKENS, _HARD)] = None,
    held_blocks: Annotated[int | None, _limit(_HELD_BLOCKS, _HARD)] = None,
    live_leases: Annotated[int | None, _limit(_LIVE_LEASES, _HARD)] = None,
    requests_per_second: Annotated[float | None, _limit(_REQUESTS, _HARD)] = None,
    tokens_per_second: Annotated[float | None, _limit(_TOKENS, _HARD)] = None,
    request_bytes: Annotated[int | None, _limit(_BYTES, _HARD)] = None,
    soft_sessions: Annotated[int | None, _limit(_SESSIONS, _SOFT)] = None,
    soft_held_tokens: Annotated[int | None, _limit(_HELD_TOKENS, _SOFT)] = None,
    soft_held_blocks: Annotated[int | None, _limit(_HELD_BLOCKS, _SOFT)] = None,
    soft_requests_per_second: Annotated[float | None, _limit(_REQUESTS, _SOFT)] = None,
    soft_tokens_per_second: Annotated[float | None, _limit(_TOKENS, _SOFT)] = None,
    soft_request_bytes: Annotated[int | None, _limit(_BYTES, _SOFT)] = None,
    server: Server = None,
    token: Token = None,
    as_json: Json = False,
) -> None:
    """Change the limits that are named and leave the others. In force within seconds."""
    from kvplane.api.tenant.v1 import tenant_pb2 as pb

    hard = {
        "sessions": sessions,
        "held_tokens": held_tokens,
        "held_blocks": held_blocks,
        "live_leases": live_leases,
        "requests_per_second": requests_per_second,
        "tokens_per_second": tokens_per_second,
        "request_bytes": request_bytes,
    }
    soft = {
        "sessions": soft_sessions,
        "held_tokens": soft_held_tokens,
        "held_blocks": soft_held_blocks,
        "requests_per_second": soft_requests_per_second,
        "tokens_per_second": soft_tokens_per_second,
        "request_bytes": soft_request_bytes,
    }
    if all(value is None for value in (*hard.values(), *soft.values())):
        fail("name a limit, such as --sessions 100", 2)
    request = pb.SetQuotasRequest(tenant_id=tenant_id)
    for message, limits in ((request.quotas.hard, hard), (request.quotas.soft, soft)):
        for name, value in limits.items():
            if value is not None:
                _put(message, name, value)

    async def work(remote: Remote) -> None:
        answer = await remote.tenants().SetQuotas(request)
        _show(tenant_id, answer.quotas, as_json)

    call(server, "default", token, work)


def _put(limits: Any, name: str, value: float) -> None:
    try:
        setattr(limits, name, value)
    except ValueError:  # more than 64 bits
        fail(f"{name}: {value} is too large", 2)


def _show(tenant_id: str, quotas: Any, as_json: bool) -> None:
    from kvplane.cli.output import show_json, show_table
    from kvplane.cli.plain import plain

    soft, hard = plain(quotas.soft), plain(quotas.hard)
    if as_json:
        show_json({"tenant_id": tenant_id, "soft": soft, "hard": hard})
        return
    rows = [(name, soft[name], hard[name]) for name in hard]
    show_table(("limit", "soft", "hard"), rows, "no limits")
