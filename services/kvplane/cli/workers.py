"""kvplane workers ..."""

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

app = typer.Typer(no_args_is_help=True, help="See and drain the engines.")

WorkerId = Annotated[str, typer.Argument(help="The worker's id, as `workers list` shows it.")]


@app.command("list")
def list_workers(
    role: Annotated[str, typer.Option(help="Only prefill, decode or both.")] = "",
    state: Annotated[list[str] | None, typer.Option(help="Only ready, draining or lost.")] = None,
    model: Annotated[str, typer.Option(help="Only workers that serve this model.")] = "",
    limit: Limit = 1000,
    server: Server = None,
    tenant: Tenant = "default",
    token: Token = None,
    as_json: Json = False,
) -> None:
    """List the workers with their load."""
    from kvplane.api.routing.v1 import routing_pb2 as pb
    from kvplane.cli.output import show_json, show_table
    from kvplane.cli.plain import duration, plain

    states = [enum_value(pb.WorkerState, name, "--state") for name in state or ()]
    wanted = enum_value(pb.WorkerRole, role, "--role") if role else 0

    async def work(remote: Remote) -> None:
        api = remote.workers()

        def fetch(size: int, page: str) -> Any:
            return api.ListWorkers(
                pb.ListWorkersRequest(
                    role=wanted,  # type: ignore[arg-type]
                    states=states,  # type: ignore[arg-type]
                    model=model,
                    page_size=size,
                    page_token=page,
                )
            )

        found = [plain(item) async for item in pages(fetch, "workers", limit)]
        if as_json:
            show_json(found)
            return
        rows = [
            (
                w["worker_id"],
                w["role"],
                w["state"],
                (w["served_models"] or [(w["compatibility"] or {}).get("model")])[0],
                (w["load"] or {}).get("running", 0),
                (w["load"] or {}).get("waiting", 0),
                f"{(w['load'] or {}).get('kv_usage', 0):.0%}",
                (w["load"] or {}).get("held", 0),
                duration(w["silent_for"]),
                w["epoch"],
                w["url"],
            )
            for w in found
        ]
        columns = (
            "worker", "role", "state", "model", "running", "waiting", "kv", "held", "silent for",
            "epoch", "url",
        )  # fmt: skip
        show_table(columns, rows, "no workers have registered")

    call(server, tenant, token, work)


@app.command("get")
def get_worker(
    worker_id: WorkerId,
    server: Server = None,
    tenant: Tenant = "default",
    token: Token = None,
    as_json: Json = False,
) -> None:
    """Show everything about one worker."""
    from kvplane.api.routing.v1 import routing_pb2 as pb

    async def work(remote: Remote) -> None:
        answer = await remote.workers().GetWorker(pb.GetWorkerRequest(worker_id=worker_id))
        _show(answer.worker, as_json)

    call(server, tenant, token, work)


@app.command("drain")
def drain_worker(
    worker_id: WorkerId,
    yes: Yes = False,
    server: Server = None,
    tenant: Tenant = "default",
    token: Token = None,
    as_json: Json = False,
) -> None:
    """Send no new turns to a worker; its sessions move."""
    sure(f"Drain worker {worker_id}? Its sessions move to others.", yes)
    _drain(worker_id, False, server, tenant, token, as_json)


@app.command("undrain")
def undrain_worker(
    worker_id: WorkerId,
    server: Server = None,
    tenant: Tenant = "default",
    token: Token = None,
    as_json: Json = False,
) -> None:
    """Take a drained worker back into service."""
    _drain(worker_id, True, server, tenant, token, as_json)


def _drain(
    worker_id: str,
    undo: bool,
    server: str | None,
    tenant: str,
    token: str | None,
    as_json: bool,
) -> None:
    from kvplane.api.routing.v1 import routing_pb2 as pb

    async def work(remote: Remote) -> None:
        request = pb.DrainWorkerRequest(worker_id=worker_id, undo=undo)
        answer = await remote.workers().DrainWorker(request)
        _show(answer.worker, as_json)

    call(server, tenant, token, work)


def _show(worker: Any, as_json: bool) -> None:
    from kvplane.cli.output import show_fields, show_json
    from kvplane.cli.plain import duration, plain

    found = plain(worker)
    if as_json:
        show_json(found)
        return
    found["silent_for"] = duration(found["silent_for"])
    found["kv_port"] = str(found["kv_port"])
    show_fields(found)
