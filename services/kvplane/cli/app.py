"""The commands that run something; the others are in their own modules."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from kvplane.cli import audit, keys, leases, migrate, quotas, sessions, tenants, workers

app = typer.Typer(
    name="kvplane",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Control plane for KV-cache reuse in prefill/decode serving.",
    epilog="Start with `kvplane dev`. Settings: `kvplane config`. Commands that ask a server take"
    " their credential from KVPLANE_TOKEN (an API key), or from KVPLANE_TLS_CA_FILE,"
    " KVPLANE_TLS_CERT_FILE and KVPLANE_TLS_KEY_FILE (a certificate).",
)
app.add_typer(migrate.app, name="migrate")
app.add_typer(workers.app, name="workers")
app.add_typer(sessions.app, name="sessions")
app.add_typer(leases.app, name="leases")
app.add_typer(leases.ownerships, name="ownerships")
app.add_typer(tenants.app, name="tenants")
app.add_typer(keys.app, name="keys")
app.add_typer(quotas.app, name="quotas")
app.add_typer(audit.app, name="audit")

Config = Annotated[
    Path | None,
    typer.Option(help="A TOML file of settings.", envvar="KVPLANE_CONFIG", show_default=False),
]


@app.command()
def dev(
    database: Annotated[
        str | None, typer.Option(help="Database URL instead of the one of the settings.")
    ] = None,
    port: Annotated[int | None, typer.Option(help="gRPC port; 0 takes a free one.")] = None,
    gateway_port: Annotated[int | None, typer.Option(help="HTTP port of the gateway.")] = None,
    config: Config = None,
) -> None:
    """Run everything in one process, for this machine only.

    gRPC on 127.0.0.1:7700, the OpenAI-compatible gateway on 127.0.0.1:8000; the schema
    is migrated by itself.
    """
    from kvplane.cli.serve import run_dev

    run_dev(config, database=database, port=port, gateway_port=gateway_port)


@app.command()
def serve(
    service: Annotated[
        Literal["session", "lease", "routing", "gateway"],
        typer.Argument(
            help="session also serves tenants and the audit, routing also serves workers."
        ),
    ],
    host: Annotated[str | None, typer.Option(help="Address to listen on.")] = None,
    port: Annotated[int | None, typer.Option(help="Port to listen on.")] = None,
    config: Config = None,
) -> None:
    """Run one service. Ports: session 7701, lease 7702, routing 7703, gateway 8000."""
    from kvplane.cli.serve import run_service

    run_service(service, config, host=host, port=port)


@app.command("config")
def show_config(
    config: Config = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of TOML.")] = False,
    docs: Annotated[
        bool, typer.Option("--docs", help="Print the reference of all settings as Markdown.")
    ] = False,
) -> None:
    """Print the effective settings, as a file for --config. Secrets are masked."""
    from kvplane.cli.output import show_json
    from kvplane.cli.serve import settings_or_exit
    from kvplane.runtime.settings_text import as_toml, as_values, reference

    if docs:
        typer.echo(reference(), nl=False)
        return
    settings = settings_or_exit(config)
    if as_json:
        show_json(as_values(settings))
    else:
        typer.echo(as_toml(settings), nl=False)


@app.command()
def version(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Print the version."""
    from importlib.metadata import version as installed

    from kvplane.cli.output import show_json

    if as_json:
        show_json({"version": installed("kvplane")})
    else:
        typer.echo(f"kvplane {installed('kvplane')}")
