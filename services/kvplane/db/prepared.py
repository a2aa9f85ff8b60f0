"""Core statements compiled once, for the calls that come by the thousand.

Building a Core statement and finding its compiled form again costs several times what
running it does. Types apply when compiling (so PostgreSQL's casts are there) but not to
results: SQLite's booleans come back as 0 and 1.
"""

import json
from collections.abc import Callable, Sequence
from typing import Any

from sqlalchemy import (
    ARRAY,
    ColumnElement,
    CursorResult,
    Insert,
    String,
    Table,
    any_,
    bindparam,
    column,
    text,
)
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.sql import ClauseElement

from kvplane.db.database import Tx


class Prepared:
    """A statement with named parameters, made for each dialect by `build(is_postgres)`."""

    def __init__(self, build: Callable[[bool], ClauseElement]) -> None:
        self._build = build
        self._compiled: dict[bool, tuple[str, list[tuple[str, Any]]]] = {}

    def one(self, tx: Tx, **values: Any) -> CursorResult[*tuple[Any, ...]]:
        """Run it with these parameters."""
        sql, names = self._for(tx)
        arguments = tuple(values.get(name, default) for name, default in names)
        return tx.connection.exec_driver_sql(sql, arguments)

    def many(self, tx: Tx, rows: Sequence[dict[str, Any]]) -> None:
        """Run it for each row, in their order. There must be one."""
        sql, names = self._for(tx)
        arguments = [tuple(row.get(name, default) for name, default in names) for row in rows]
        tx.connection.exec_driver_sql(sql, arguments)

    def _for(self, tx: Tx) -> tuple[str, list[tuple[str, Any]]]:
        found = self._compiled.get(tx.is_postgres)
        if found is None:
            compiled: Any = self._build(tx.is_postgres).compile(dialect=tx.connection.dialect)
            names = [(name, compiled.params[name]) for name in compiled.positiontup]
            found = self._compiled[tx.is_postgres] = (str(compiled), names)
        return found


def prepared(statement: ClauseElement) -> Prepared:
    """Return a statement that is the same for both dialects."""
    return Prepared(lambda _: statement)


def insert_ignore(table: Table) -> Prepared:
    """Return an insert of whole rows that leaves alone those which are there already."""

    def build(is_postgres: bool) -> Insert:
        values = {name: bindparam(name, type_=c.type) for name, c in table.c.items()}
        if is_postgres:
            return postgresql.insert(table).values(values).on_conflict_do_nothing()
        return sqlite.insert(table).values(values).on_conflict_do_nothing()

    return Prepared(build)


def is_listed(key: ColumnElement[str], is_postgres: bool) -> ColumnElement[bool]:
    """Return the condition that `key` is in the parameter `ids`, made by `id_list`.

    One parameter whatever the length, so the statement's text never changes.
    """
    if is_postgres:
        return key == any_(bindparam("ids", type_=ARRAY(String)))
    listed = text("SELECT value FROM json_each(:ids)").columns(column("value", String))
    return key.in_(listed)


def id_list(tx: Tx, ids: Sequence[str]) -> Any:
    """Return the parameter for `is_listed`."""
    return list(ids) if tx.is_postgres else json.dumps(list(ids))
