"""The command line, whose migration says that it runs, and may stop half-way: MARK SECONDS ..."""

import os
import sys
import time
from pathlib import Path
from typing import Any

from sqlalchemy import event
from sqlalchemy.engine import Engine

mark, seconds = Path(sys.argv[1]), float(sys.argv[2])
sys.argv = ["kvplane", *sys.argv[3:]]


@event.listens_for(Engine, "before_cursor_execute")
def before(_connection: Any, _cursor: Any, statement: str, *_: Any) -> None:
    """Half-way is where this table is made."""
    if statement.lstrip().startswith("CREATE TABLE sessions "):
        with mark.open("a") as file:
            file.write(f"{os.getpid()}\n")
        time.sleep(seconds)


from kvplane.cli import main  # noqa: E402 - it takes its arguments from above

main()
