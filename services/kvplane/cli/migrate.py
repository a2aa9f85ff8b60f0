"""kvplane migrate ..."""

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from kvplane.cli.remote import Json, Yes, fail, sure

app = typer.Typer(no_args_is_help=True, help="Bring the database's schema up to date.")

Database = Annotated[
    str | None,
    typer.Option(
        help="Database URL. Default: the setting database.url (KVPLANE_DATABASE_URL).",
        show_default=False,
    ),
]
Config = Annotated[
    Path | None,
    typer.Option(help="A TOML file of settings.", envvar="KVPLANE_CONFIG", show_default=False),
]


@app.command()
def up(
    revision: Annotated[str, typer.Argument(help="How far.")] = "head",
    database: Database = None,
    config: Config = None,
    as_json: Json = False,
) -> None:
    """Migrate up. Several at once are safe: one migrates, the others wait."""
    from kvplane.db import migrate

    _move(database, config, as_json, lambda url: migrate.upgrade(url, revision))


@app.command()
def down(
    revision: Annotated[str, typer.Argument(help="How far; `base` removes everything.")],
    yes: Yes = False,
    database: Database = None,
    config: Config = None,
    as_json: Json = False,
) -> None:
    """Migrate down. What newer revisions added is lost."""
    from kvplane.db import migrate

    sure(f"Migrate down to {revision}? What newer revisions added is lost.", yes)
    _move(database, config, as_json, lambda url: migrate.downgrade(url, revision))


@app.command()
def status(database: Database = None, config: Config = None, as_json: Json = False) -> None:
    """Show where the schema stands. Exit code 1 unless it is right."""
    from kvplane.db import migrate

    state = _run(migrate.state, database, config)
    if as_json:
        _show_json(state)
    elif state.problem is None:
        typer.echo(f"up to date at {state.current}")
    if state.problem is not None:
        if as_json:
            raise typer.Exit(1)
        fail(state.problem)


@app.command()
def sql(
    dialect: Annotated[
        Literal["postgresql", "sqlite"], typer.Argument(help="For which database.")
    ] = "postgresql",
) -> None:
    """Print the statements that make the whole schema, for those who run SQL by hand."""
    from kvplane.db import migrate

    typer.echo(migrate.sql(dialect), nl=False)


@app.command(hidden=True)
def new(message: Annotated[str, typer.Argument(help="What it does.")]) -> None:
    """Write a revision that brings the schema to the tables in the code."""
    import asyncio

    import kvplane.cli.compose  # noqa: F401 - loads all tables
    from kvplane.db import migrate

    asyncio.run(migrate.new_revision(message))


def _move(
    database: str | None,
    config: Path | None,
    as_json: bool,
    step: Callable[[str], Awaitable[Any]],
) -> None:
    state = _run(step, database, config)
    if as_json:
        _show_json(state)
        return
    typer.echo(f"the schema is at {state.current or 'base'}")


def _show_json(state: Any) -> None:
    from kvplane.cli.output import show_json

    show_json({"current": state.current, "head": state.head, "problem": state.problem})


def _run(step: Callable[[str], Awaitable[Any]], database: str | None, config: Path | None) -> Any:
    import asyncio

    from kvplane.cli.serve import settings_or_exit
    from kvplane.kernel.errors import InvalidField, KvplaneError
    from kvplane.runtime.settings import flags

    settings = settings_or_exit(config, **flags(database={"url": database}))

    async def run() -> Any:
        return await step(settings.database.url)

    try:
        return asyncio.run(run())
    except KvplaneError as error:
        fail(error.message, 2 if isinstance(error, InvalidField) else 1)
