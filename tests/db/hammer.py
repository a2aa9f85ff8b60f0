"""Adds to two counters many times, as one of several processes: URL TIMES."""

import asyncio
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from db.counters import add_many
from kvplane.db.database import Database
from kvplane.kernel.clock import SystemClock


async def main(url: str, times: int) -> None:
    database = Database(url, SystemClock())
    await asyncio.gather(add_many(database, "a", times), add_many(database, "b", times))
    await database.close()


asyncio.run(main(sys.argv[1], int(sys.argv[2])))
