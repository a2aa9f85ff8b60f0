"""kvplane tenants ..."""

import contextlib
from typing import Annotated, Any

import typer

from kvplane.cli.remote import Json, Limit, Remote, Server, Token, Yes, call, fail, pages, sure

app = typer.Typer(no_args_is_help=True, help="Make tenants and see what they use.")

TenantId = Annotated[str, typer.Argument(help="The tenant's id.")]


@app.command("create")
def create_tenant(
    tenant_id: Annotated[
        str,
        typer.Argument(
            help="1 to 64 letters, digits, '.', '_' or '-', a letter or digit first.",
            show_default=False,
        ),
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


@app.command("get")
def get_tenant(
    tenant_id: TenantId, server: Server = None, token: Token = None, as_json: Json = False
) -> None:
    """Show one tenant."""
    from kvplane.api.tenant.v1 import tenant_pb2 as pb

    async def work(remote: Remote) -> None:
        request = pb.GetTenantRequest(tenant_id=tenant_id)
        _show((await remote.tenants().GetTenant(request)).tenant, as_json)

    call(server, "default", token, work)


@app.command("usage")
def show_usage(
    tenant_id: TenantId, server: Server = None, token: Token = None, as_json: Json = False
) -> None:
    """Show what a tenant has used, and what is held for it now."""
    from kvplane.api.lease.v1 import lease_pb2
    from kvplane.api.session.v1 import session_pb2
    from kvplane.api.tenant.v1 import tenant_pb2
    from kvplane.cli.output import show_fields, show_json
    from kvplane.cli.plain import plain
    from kvplane.kernel.errors import PermissionDenied

    async def work(remote: Remote) -> None:
        used = await remote.sessions().GetUsage(session_pb2.GetUsageRequest())
        if not (used.turns or used.active_sessions):  # is there such a tenant?
            with contextlib.suppress(PermissionDenied):  # who is no operator may not ask
                await remote.tenants().GetTenant(tenant_pb2.GetTenantRequest(tenant_id=tenant_id))
        held = await remote.leases().GetUsage(lease_pb2.GetUsageRequest())
        if used.tenant_id != tenant_id:
            fail(f"this API key is tenant {used.tenant_id}'s, and shows what that one has used", 2)
        found = {"tenant_id": tenant_id, **plain(used), **plain(held)}
        (show_json if as_json else show_fields)(found)

    call(server, tenant_id, token, work)


@app.command("rotate-salt")
def rotate_salt(
    tenant_id: TenantId,
    yes: Yes = False,
    server: Server = None,
    token: Token = None,
    as_json: Json = False,
) -> None:
    """Give a tenant a new, empty space in the engines' prefix caches.

    What the engines have cached for it is not found again: its prompts are computed anew.
    """
    from kvplane.api.tenant.v1 import tenant_pb2 as pb

    sure(f"Forget what the engines have cached for tenant {tenant_id}?", yes)

    async def work(remote: Remote) -> None:
        request = pb.RotateCacheSaltRequest(tenant_id=tenant_id)
        _show((await remote.tenants().RotateCacheSalt(request)).tenant, as_json)

    call(server, "default", token, work)


def _show(message: Any, as_json: bool) -> None:
    from kvplane.cli.output import show_fields, show_json
    from kvplane.cli.plain import plain

    (show_json if as_json else show_fields)(plain(message))
