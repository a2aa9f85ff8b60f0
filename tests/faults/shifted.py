"""Run a module with a wall clock that is off: FILE MODULE ARGUMENTS.

FILE holds a double: by how many seconds. It is looked at at every call, so that a test can
step the clock of a running process. The monotonic clock is left alone, as a machine's is.
"""

import mmap
import runpy
import struct
import sys
import time
from pathlib import Path


class WallClock:
    """The other end: the file of one process."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.set(0.0)

    def set(self, seconds: float) -> None:
        """Be off by so much from now on."""
        with self.path.open("r+b" if self.path.exists() else "wb") as file:
            file.write(struct.pack("d", seconds))

    def command(self, *module_and_arguments: str) -> list[str]:
        """Return how to run a module under this clock."""
        # -P: the folder of this file is no place to import from.
        return [sys.executable, "-P", __file__, str(self.path), *module_and_arguments]


def main() -> None:
    path, module, *arguments = sys.argv[1:]
    with Path(path).open("rb") as file:
        shared = mmap.mmap(file.fileno(), 8, access=mmap.ACCESS_READ)

    def off() -> float:
        seconds: float = struct.unpack("d", shared[:8])[0]
        return seconds

    seconds_now, nanoseconds_now = time.time, time.time_ns

    def shifted() -> float:
        # gRPC makes deadlines of it for its core, which reads the machine's clock.
        caller = str(sys._getframe(1).f_globals.get("__name__"))
        return seconds_now() + (0.0 if caller.startswith("grpc") else off())

    time.time = shifted
    time.time_ns = lambda: nanoseconds_now() + round(off() * 1e9)
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
