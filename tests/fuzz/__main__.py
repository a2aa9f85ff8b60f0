"""`python -m fuzz`: search for so many seconds, and write build/fuzz/report.json."""

import argparse
import asyncio
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from kvplane.kernel.clock import SystemClock
from postgresql import new_server

from fuzz import world
from fuzz.databases import Kind, Postgres, Sqlite
from fuzz.findings import KINDS, Counts
from fuzz.methods import METHODS
from fuzz.search import HttpSearch, RpcSearch, folder

_ROOT = Path(__file__).resolve().parents[2]
_clock = SystemClock()
# What one batch of each target tries: a few seconds.
_BATCH = {"sqlite": 20, "postgresql": 10, "http": 300}


@contextmanager
def _postgres() -> Iterator[str]:
    with folder() as data:
        server = new_server(data / "postgres")
        try:
            yield server.get_uri("postgres")
        finally:
            server.cleanup()


def _batches(
    stack: ExitStack, runner: asyncio.Runner, targets: list[str]
) -> dict[str, Callable[..., None]]:
    made: dict[str, Callable[..., None]] = {}
    for target in targets:
        if target == "http":
            http = HttpSearch(runner, stack.enter_context(folder()))
            stack.callback(http.close)
            made[target] = http.batch
        else:
            kind: Kind = (
                Postgres(stack.enter_context(_postgres()))
                if target == "postgresql"
                else Sqlite(stack.enter_context(folder()))
            )
            made[target] = RpcSearch(runner, kind).batch
    return made


def _search(targets: list[str], seconds: float, first: int, last: int | None) -> Counts:
    counts = Counts()
    begun = _clock.monotonic()
    with ExitStack() as stack:
        stack.enter_context(world.quiet())
        runner = stack.enter_context(asyncio.Runner())
        batches = _batches(stack, runner, targets)
        seed = first
        while seed <= last if last is not None else _clock.monotonic() - begun < seconds:
            for target, run in batches.items():
                before = len(counts.found)
                run(counts, seed=seed, examples=_BATCH[target])
                for finding in counts.found[before:]:
                    sys.stdout.write(f"{finding}\nagain: --targets {target} --seed {seed}\n")
            so_far = " ".join(f"{name}={count}" for name, count in counts.report().items())
            sys.stdout.write(f"{_clock.monotonic() - begun:6.0f} s, seed {seed}: {so_far}\n")
            sys.stdout.flush()
            seed += 1
    return counts


def main() -> int:
    """Return 1 when anything was found."""
    parser = argparse.ArgumentParser(prog="python -m fuzz", description=__doc__)
    parser.add_argument("--seconds", type=float, default=300)
    parser.add_argument("--targets", nargs="+", choices=list(_BATCH), default=list(_BATCH))
    parser.add_argument("--first", type=int, default=1, help="the first seed")
    parser.add_argument("--seed", type=int, help="this one only")
    parser.add_argument("--folder", type=Path, default=_ROOT / "build" / "fuzz")
    given = parser.parse_args()
    first = given.first if given.seed is None else given.seed
    counts = _search(given.targets, given.seconds, first, given.seed)
    counts.write(given.folder)
    never = sorted(set(METHODS) - set(counts.accepted))
    if counts.inputs["rpc"]:
        sys.stdout.write(f"RPCs that were never accepted: {', '.join(never) or 'none'}\n")
    sys.stdout.write(
        f"{json.dumps(counts.report())}\nanswers: {dict(counts.codes.most_common())}\n"
    )
    return int(any(counts.report()[kind] for kind in KINDS))


if __name__ == "__main__":
    sys.exit(main())
