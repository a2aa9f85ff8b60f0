"""Core statements compiled once, for the calls that come by the thousand.

Building a Core statement and finding its compiled form again costs several times what
running it does. Types apply when compiling (so PostgreSQL's casts are there) but not to
results: SQLite's booleans come back as 0 and 1.
"""

import json
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

from sqlalchemy import (
    ARRAY,
    ColumnElement,
    CursorResult,
    Insert,
    LargeBinary,
    String,
    Table,
    any_,
    bindparam,
    column,
    func,
    select,
)
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.sql import ClauseElement

from kvplane.db.database import Tx

_IsListed = Callable[[ColumnElement[Any]], ColumnElement[bool]]


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


class PreparedBlobs:
    """A statement with one list of bytes, made by `build(is_postgres, is_listed)`.

    SQLite has no such parameter (JSON holds no bytes), so there is a text for each length,
    filled up to a power of two.
    """

    def __init__(self, build: Callable[[bool, _IsListed], ClauseElement]) -> None:
        self._build = build
        self._sized: dict[int, Prepared] = {}

    def one(
        self, tx: Tx, blobs: Collection[bytes], **values: Any
    ) -> CursorResult[*tuple[Any, ...]]:
        """Run it with this list, which must not be empty."""
        listed = list(blobs)
        if tx.is_postgres:
            return self._for(0).one(tx, blobs=listed, **values)
        size = 1 << (len(listed) - 1).bit_length()
        listed += listed[:1] * (size - len(listed))
        named = {f"blob_{i}": blob for i, blob in enumerate(listed)}
        return self._for(size).one(tx, **named, **values)

    def _for(self, size: int) -> Prepared:
        found = self._sized.get(size)
        if found is None:
            one_by_one = [bindparam(f"blob_{i}", type_=LargeBinary()) for i in range(size)]

            def is_listed(key: ColumnElement[Any]) -> ColumnElement[bool]:
                if size:
                    return key.in_(one_by_one)
                return key == any_(bindparam("blobs", type_=ARRAY(LargeBinary)))

            found = Prepared(lambda is_postgres: self._build(is_postgres, is_listed))
            self._sized[size] = found
        return found


def is_listed(key: ColumnElement[Any], is_postgres: bool, name: str = "ids") -> ColumnElement[bool]:
    """Return the condition that `key` is in the parameter `name`, made by `id_list`.

    One parameter whatever the length, so the statement's text never changes. Not for bytes.
    """
    if is_postgres:
        return key == any_(bindparam(name, type_=ARRAY(key.type)))
    listed = func.json_each(bindparam(name, type_=String)).table_valued(column("value", key.type))
    return key.in_(select(listed.c.value))


def id_list(tx: Tx, ids: Iterable[str | int]) -> Any:
    """Return the parameter for `is_listed`."""
    return list(ids) if tx.is_postgres else json.dumps(list(ids))
