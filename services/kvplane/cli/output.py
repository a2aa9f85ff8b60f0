"""Tables for people, JSON for programs."""

import json
import sys
from collections.abc import Sequence
from typing import Any

from kvplane.cli.plain import text


def show_json(value: Any, *, indent: bool = True) -> None:
    """Print JSON: indented on a terminal, one line otherwise."""
    spaces = 2 if indent and sys.stdout.isatty() else None
    sys.stdout.write(json.dumps(value, indent=spaces, ensure_ascii=False) + "\n")
    sys.stdout.flush()


def show_table(columns: Sequence[str], rows: Sequence[Sequence[Any]], empty: str) -> None:
    """Print rows under their columns, or the sentence `empty`.

    Not on a terminal: aligned text without lines and never cut, for grep and awk.
    """
    if not rows:
        sys.stderr.write(f"{empty}\n")
        return
    cells = [[text(value) for value in row] for row in rows]
    if not sys.stdout.isatty():
        lines = [[column.upper().replace(" ", "_") for column in columns], *cells]
        widths = [max(len(line[i]) for line in lines) for i in range(len(columns))]
        for line in lines:
            padded = (cell.ljust(width) for cell, width in zip(line, widths, strict=True))
            sys.stdout.write("  ".join(padded).rstrip() + "\n")
        return
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(*columns, box=box.SIMPLE_HEAD, pad_edge=False)
    for row in cells:
        # Text, not markup: a name may hold square brackets.
        table.add_row(*[_literal(cell) for cell in row])
    Console().print(table)


def show_line(columns: Sequence[str], row: Sequence[Any]) -> None:
    """Print a row that stands alone: ``column=value`` for each value that is there."""
    cells = zip(columns, map(text, row), strict=True)
    sys.stdout.write("  ".join(f"{name}={cell}" for name, cell in cells if cell != "-") + "\n")
    sys.stdout.flush()


def show_fields(values: dict[str, Any]) -> None:
    """Print one thing, a line for each field."""
    width = max(len(name) for name in values)
    for name, value in values.items():
        sys.stdout.write(f"{name.replace('_', ' ').ljust(width)}  {text(value)}\n")


def _literal(cell: str) -> Any:
    from rich.text import Text

    return Text(cell)
