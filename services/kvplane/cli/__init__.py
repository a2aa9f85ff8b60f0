"""The command line. Every command imports what it needs when it runs."""

import sys


def main() -> None:
    """Run `kvplane`."""
    try:
        from kvplane.cli.app import app
    except ModuleNotFoundError as error:
        if error.name not in {"typer", "rich"}:
            raise
        sys.exit("kvplane: the command line is not installed: pip install 'kvplane[server]'")
    app()
