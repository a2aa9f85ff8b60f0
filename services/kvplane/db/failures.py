"""What a failed transaction means: try again, split the batch, or the database is away."""

import asyncio
from enum import Enum, auto
from typing import Final

from sqlalchemy.exc import DBAPIError
from sqlalchemy.exc import TimeoutError as PoolTimeout

# Deadlock, serialization failure, lock timeout: another replica was first.
_CONFLICT_STATES: Final = {"40P01", "40001", "55P03"}
_SLOW_STATE: Final = "57014"  # statement timeout
# Connection, who we are, which database, resources, operator intervention, system error.
_AWAY_CLASSES: Final = ("08", "28", "3D", "53", "57", "58")
_AWAY_STATES: Final = {"25006"}  # read only after a failover

# Primary result codes, https://sqlite.org/rescode.html
_SQLITE_BUSY: Final = {5, 6}
_SQLITE_MISTAKE: Final = {1, 18, 19, 20, 21, 25}


class InDoubt(Exception):
    """The connection broke during COMMIT: nobody knows whether it happened."""


class Failure(Enum):
    """Why a transaction failed."""

    # Another process was first. Nothing is done yet.
    CONFLICT = auto()
    # SQLite's write lock was not free within the busy timeout. Nothing is done yet.
    BUSY = auto()
    # One operation took too long.
    SLOW = auto()
    # No connection, or none any more.
    AWAY = auto()
    # The connection broke during COMMIT. It must not run again by itself.
    IN_DOUBT = auto()
    # A fault of one operation.
    MISTAKE = auto()


def classify(error: BaseException) -> Failure:
    """Return why a transaction failed with `error`."""
    if isinstance(error, InDoubt):
        return Failure.IN_DOUBT
    original = error.orig if isinstance(error, DBAPIError) else error
    state = getattr(original, "sqlstate", None)
    if state is not None:
        if state in _CONFLICT_STATES:
            return Failure.CONFLICT
        if state == _SLOW_STATE:
            return Failure.SLOW
        if state.startswith(_AWAY_CLASSES) or state in _AWAY_STATES:
            return Failure.AWAY
    code = getattr(original, "sqlite_errorcode", None)
    if code is not None:
        if code & 0xFF in _SQLITE_BUSY:
            return Failure.BUSY
        return Failure.MISTAKE if code & 0xFF in _SQLITE_MISTAKE else Failure.AWAY
    if isinstance(error, DBAPIError) and error.connection_invalidated:
        return Failure.AWAY
    if isinstance(original, OSError | TimeoutError | asyncio.TimeoutError | PoolTimeout):
        return Failure.AWAY
    return Failure.MISTAKE
