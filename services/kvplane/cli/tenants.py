"""kvplane tenants ..."""

from typing import Annotated, Any

import typer

from kvplane.cli.remote import Json, Limit, Remote, Server, Token, call, pages

app = typer.Typer(no_args_is_help=True, help="Make tenants and their API keys.")
keys = typer.Typer(no_args_is_help=True, help="Make, list and revoke API keys.")
app.add_typer(keys, name="key")

TenantId = Annotated[str, typer.Argument(help="The tenant's id.")]


@app.command("create")
def create_tenant(
    tenant_id: Annotated[
        str, typer.Argument(help="1 to 64 letters, digits, '.', '_' or '-'.", show_default=False)
    ],
    display_name: Annotated[str, typer.Option(help="A name for people.")] = "",
    server: Server = None,
    token: Token = None,
    as_json: Json = False,
) -> None:
    """Make a tenant."""
    from kvplane.api.tenant.v1 import tenant_pb2 as pb

    async def work(remote: Remote) -> None:
        request = pb.CreateTenantRequest(tenant_id=tenant_id, display_name=display_name)
        _show((await remote.tenants().CreateTenant(request)).tenant, as_json)

    call(server, "default", token, work)


@app.command("list")
def list_tenants(
    limit: Limit = 1000,
    server: Server = None,
    token: Token = None,
    as_json: Json = False,
) -> None:
    """List the tenants."""
    from kvplane.api.tenant.v1 import tenant_pb2 as pb
    from kvplane.cli.output import show_json, show_table
    from kvplane.cli.plain import plain

    async def work(remote: Remote) -> None:
        api = remote.tenants()

        def fetch(size: int, page: str) -> Any:
            return api.ListTenants(pb.ListTenantsRequest(page_size=size, page_token=page))

        found = [plain(item) async for item in pages(fetch, "tenants", limit)]
        if as_json:
            show_json(found)
            return
        rows = [(x["tenant_id"], x["display_name"], x["create_time"]) for x in found]
        show_table(("tenant", "name", "made"), rows, "no tenants: `kvplane tenants create ID`")

    call(server, "default", token, work)


@keys.command("create")
def create_key(
    tenant_id: TenantId, server: Server = None, token: Token = None, as_json: Json = False
) -> None:
    """Make an API key and print it, this once."""
    from kvplane.api.tenant.v1 import tenant_pb2 as pb
    from kvplane.cli.output import show_fields, show_json
    from kvplane.cli.plain import plain

    async def work(remote: Remote) -> None:
        answer = await remote.tenants().CreateApiKey(pb.CreateApiKeyRequest(tenant_id=tenant_id))
        found = plain(answer.api_key)
        if as_json:
            show_json({**found, "secret": answer.secret})
            return
        shown = {"key_id": found["key_id"], "tenant_id": found["tenant_id"]}
        show_fields({**shown, "secret": answer.secret})
        typer.echo("Keep the secret now: it is not shown again.", err=True)

    call(server, "default", token, work)


@keys.command("list")
def list_keys(
    tenant_id: TenantId, server: Server = None, token: Token = None, as_json: Json = False
) -> None:
    """List a tenant's API keys, without their secrets."""
    from kvplane.api.tenant.v1 import tenant_pb2 as pb
    from kvplane.cli.output import show_json, show_table
    from kvplane.cli.plain import plain

    async def work(remote: Remote) -> None:
        answer = await remote.tenants().ListApiKeys(pb.ListApiKeysRequest(tenant_id=tenant_id))
        found = [plain(item) for item in answer.api_keys]
        if as_json:
            show_json(found)
            return
        rows = [(x["key_id"], f"{x['prefix']}…", x["create_time"], x["revoke_time"]) for x in found]
        columns = ("key", "begins with", "made", "revoked")
        show_table(columns, rows, f"no keys: `kvplane tenants key create {tenant_id}`")

    call(server, "default", token, work)


@keys.command("revoke")
def revoke_key(
    key_id: Annotated[str, typer.Argument(help="The key's id, as `key list` shows it.")],
    server: Server = None,
    token: Token = None,
    as_json: Json = False,
) -> None:
    """Revoke an API key; servers may believe it for a few seconds more."""
    from kvplane.api.tenant.v1 import tenant_pb2 as pb

    async def work(remote: Remote) -> None:
        answer = await remote.tenants().RevokeApiKey(pb.RevokeApiKeyRequest(key_id=key_id))
        _show(answer.api_key, as_json)

    call(server, "default", token, work)


def _show(message: Any, as_json: bool) -> None:
    from kvplane.cli.output import show_fields, show_json
    from kvplane.cli.plain import plain

    (show_json if as_json else show_fields)(plain(message))
