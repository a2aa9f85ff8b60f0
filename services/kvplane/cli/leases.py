"""kvplane leases ... and kvplane ownerships ..."""

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
    pages,
    sure,
)

app = typer.Typer(no_args_is_help=True, help="See and revoke the readers' leases.")
ownerships = typer.Typer(no_args_is_help=True, help="See what the workers hold.")

LeaseId = Annotated[str, typer.Argument(help="The lease's id, as `leases list` shows it.")]
Session = Annotated[str, typer.Option(help="Only of this session (its id).")]
Worker = Annotated[str, typer.Option(help="Only of this worker.")]


@app.command("list")
def list_leases(
    session: Session = "",
    worker: Worker = "",
    state: Annotated[
        list[str] | None,
        typer.Option(help="Only granted, reading, consumed, released, revoked, expired or lost."),
    ] = None,
    limit: Limit = 100,
    server: Server = None,
    tenant: Tenant = "default",
    token: Token = None,
    as_json: Json = False,
) -> None:
    """List the tenant's leases, the newest first."""
    from kvplane.api.lease.v1 import lease_pb2 as pb
    from kvplane.cli.output import show_json, show_table
    from kvplane.cli.plain import duration, plain

    states = [enum_value(pb.LeaseState, name, "--state") for name in state or ()]

    async def work(remote: Remote) -> None:
        api = remote.leases()

        def fetch(size: int, page: str) -> Any:
            return api.ListLeases(
                pb.ListLeasesRequest(
                    session_id=session,
                    worker_id=worker,
                    states=states,  # type: ignore[arg-type]
                    page_size=size,
                    page_token=page,
                )
            )

        found = [plain(item) async for item in pages(fetch, "leases", limit)]
        if as_json:
            show_json(found)
            return
        rows = [
            (
                x["lease_id"],
                x["state"] + (" (draining)" if x["draining"] else ""),
                duration(x["ttl"]) if x["state"] in {"granted", "reading"} else "-",
                (x["holder"] or {}).get("worker_id"),
                x["session_id"],
                x["ownership_id"],
                x["fencing_token"],
            )
            for x in found
        ]
        columns = ("lease", "state", "ends in", "holder", "session", "ownership", "token")
        show_table(columns, rows, f"no leases of tenant {tenant}")

    call(server, tenant, token, work)


@app.command("get")
def get_lease(
    lease_id: LeaseId,
    server: Server = None,
    tenant: Tenant = "default",
    token: Token = None,
    as_json: Json = False,
) -> None:
    """Show one lease."""
    from kvplane.api.lease.v1 import lease_pb2 as pb

    async def work(remote: Remote) -> None:
        answer = await remote.leases().GetLease(pb.GetLeaseRequest(lease_id=lease_id))
        _show(answer.lease, as_json)

    call(server, tenant, token, work)


@app.command("revoke")
def revoke_lease(
    lease_id: LeaseId,
    yes: Yes = False,
    server: Server = None,
    tenant: Tenant = "default",
    token: Token = None,
    as_json: Json = False,
) -> None:
    """Take a lease away. A read that runs is let finish before the owner frees."""
    from kvplane.api.lease.v1 import lease_pb2 as pb

    sure(f"Revoke lease {lease_id}? Its reader computes instead.", yes)

    async def work(remote: Remote) -> None:
        answer = await remote.leases().RevokeLease(pb.RevokeLeaseRequest(lease_id=lease_id))
        _show(answer.lease, as_json)

    call(server, tenant, token, work)


@ownerships.command("list")
def list_ownerships(
    session: Session = "",
    worker: Worker = "",
    state: Annotated[
        list[str] | None,
        typer.Option(help="Only held, leased, consumed, expired, released or lost."),
    ] = None,
    limit: Limit = 100,
    server: Server = None,
    tenant: Tenant = "default",
    token: Token = None,
    as_json: Json = False,
) -> None:
    """List what workers hold for the tenant, the newest first."""
    from kvplane.api.lease.v1 import lease_pb2 as pb
    from kvplane.cli.output import show_json, show_table
    from kvplane.cli.plain import duration, plain

    states = [enum_value(pb.OwnershipState, name, "--state") for name in state or ()]

    async def work(remote: Remote) -> None:
        api = remote.leases()

        def fetch(size: int, page: str) -> Any:
            return api.ListOwnerships(
                pb.ListOwnershipsRequest(
                    session_id=session,
                    worker_id=worker,
                    states=states,  # type: ignore[arg-type]
                    page_size=size,
                    page_token=page,
                )
            )

        found = [plain(item) async for item in pages(fetch, "ownerships", limit)]
        if as_json:
            show_json(found)
            return
        rows = [
            (
                x["ownership_id"],
                x["state"],
                duration(x["hold"]) if x["state"] in {"held", "leased"} else "-",
                x["worker_id"],
                x["session_id"],
                x["turn"],
                x["num_tokens"],
                "decode" if x["for_decode"] else "next turn",
                x["lease_id"],
            )
            for x in found
        ]
        columns = (
            "ownership", "state", "held for", "worker", "session", "turn", "tokens", "kept for",
            "lease",
        )  # fmt: skip
        show_table(columns, rows, f"nothing is held for tenant {tenant}")

    call(server, tenant, token, work)


def _show(lease: Any, as_json: bool) -> None:
    from kvplane.cli.output import show_fields, show_json
    from kvplane.cli.plain import duration, plain

    found = plain(lease)
    if as_json:
        show_json(found)
        return
    found["ttl"] = duration(found["ttl"])
    show_fields(found)
