"""kvplane keys ..."""

from typing import Annotated

import typer

from kvplane.cli.remote import Json, Remote, Server, Token, Yes, call, enum_value, seconds_of, sure

app = typer.Typer(
    no_args_is_help=True, help="Make, list and revoke API keys of tenants, workers and operators."
)

TenantId = Annotated[
    str,
    typer.Argument(
        help="The tenant. None: keys of workers and operators.",
        show_default=False,
    ),
]


@app.command("create")
def create_key(
    tenant_id: TenantId = "",
    role: Annotated[
        str, typer.Option(help="What it is good for: tenant, worker or operator.")
    ] = "tenant",
    worker: Annotated[
        str, typer.Option(help="The one worker that it speaks for; --role worker only.")
    ] = "",
    ttl: Annotated[
        str,
        typer.Option(
            help="How long it is valid, such as 90d or 12h. Default: until it is revoked.",
            show_default=False,
        ),
    ] = "",
    server: Server = None,
    token: Token = None,
    as_json: Json = False,
) -> None:
    """Make an API key and print it, this once."""
    from kvplane.api.tenant.v1 import tenant_pb2 as pb
    from kvplane.cli.output import show_fields, show_json
    from kvplane.cli.plain import plain

    request = pb.CreateApiKeyRequest(
        tenant_id=tenant_id,
        role=enum_value(pb.Role, role, "--role"),  # type: ignore[arg-type]
        worker_id=worker,
    )
    if ttl:
        request.ttl.seconds = seconds_of(ttl, "--ttl")

    async def work(remote: Remote) -> None:
        answer = await remote.tenants().CreateApiKey(request)
        found = plain(answer.api_key)
        if as_json:
            show_json({**found, "secret": answer.secret})
            return
        names = ("key_id", "role", "tenant_id", "worker_id", "expire_time")
        shown = {name: found[name] for name in names if found[name]}
        show_fields({**shown, "secret": answer.secret})
        typer.echo("Keep the secret now: it is not shown again.", err=True)

    call(server, "default", token, work)


@app.command("list")
def list_keys(
    tenant_id: TenantId = "", server: Server = None, token: Token = None, as_json: Json = False
) -> None:
    """List a tenant's API keys, or those of workers and operators, without their secrets."""
    from kvplane.api.tenant.v1 import tenant_pb2 as pb
    from kvplane.cli.output import show_json, show_table
    from kvplane.cli.plain import plain

    async def work(remote: Remote) -> None:
        answer = await remote.tenants().ListApiKeys(pb.ListApiKeysRequest(tenant_id=tenant_id))
        found = [plain(item) for item in answer.api_keys]
        if as_json:
            show_json(found)
            return
        rows = [
            (
                x["key_id"],
                f"{x['prefix']}…",
                x["role"],
                x["worker_id"],
                x["create_time"],
                x["expire_time"],
                x["revoke_time"],
            )
            for x in found
        ]
        columns = ("key", "begins with", "role", "worker", "made", "expires", "revoked")
        show_table(columns, rows, f"no keys: `kvplane keys create {tenant_id or '--role ...'}`")

    call(server, "default", token, work)


@app.command("revoke")
def revoke_key(
    key_id: Annotated[str, typer.Argument(help="The key's id, as `keys list` shows it.")],
    yes: Yes = False,
    server: Server = None,
    token: Token = None,
    as_json: Json = False,
) -> None:
    """Revoke an API key; servers may believe it for a few seconds more."""
    from kvplane.api.tenant.v1 import tenant_pb2 as pb
    from kvplane.cli.output import show_fields, show_json
    from kvplane.cli.plain import plain

    sure(f"Revoke API key {key_id}? Who uses it is locked out.", yes)

    async def work(remote: Remote) -> None:
        answer = await remote.tenants().RevokeApiKey(pb.RevokeApiKeyRequest(key_id=key_id))
        (show_json if as_json else show_fields)(plain(answer.api_key))

    call(server, "default", token, work)
