"""python -m simulation --seeds N: search, count, and tell the shortest story of a failure."""

import argparse
import json
import os
import sys
import time
from pathlib import Path

from simulation.planted import PLANTED
from simulation.scenario import draw
from simulation.search import Totals, catch, play, quiet, search, shrink

_ROOT = Path(__file__).parents[2]
_REPORT = _ROOT / "build" / "simulation" / "report.json"
_PROGRESS_S = 60.0


def main() -> int:
    """Return 1 on a violation or a missed planted fault, else 0."""
    if os.environ.get("PYTHONHASHSEED") != "0":  # the order of sets is part of a run
        os.environ["PYTHONHASHSEED"] = "0"
        os.execv(sys.executable, [sys.executable, "-m", "simulation", *sys.argv[1:]])
    parser = argparse.ArgumentParser(prog="python -m simulation", description=__doc__)
    parser.add_argument("--seeds", type=int, default=300, help="how many (300)")
    parser.add_argument("--start", type=int, default=0, help="the first one (0)")
    parser.add_argument("--jobs", type=int, default=2, help="processes (2)")
    parser.add_argument(
        "--planted",
        type=int,
        default=500,
        metavar="SEEDS",
        help="at most so many seeds for each planted fault; 0: none (500)",
    )
    parser.add_argument("--plant", default="", choices=["", *PLANTED], help="with this fault in")
    parser.add_argument("--replay", type=int, metavar="SEED", help="tell one seed's story")
    parser.add_argument("--only", default="", help="of it only these parts: f0,f3,o2")
    parser.add_argument("--no-shrink", action="store_true", help="tell it as it is")
    parser.add_argument("--report", type=Path, default=_REPORT)
    options = parser.parse_args()
    quiet()
    if options.replay is not None:
        return tell(options.replay, options.plant, options.only, shrinks=not options.no_shrink)
    began = said = time.monotonic()

    def progress(so_far: Totals) -> None:
        nonlocal said
        now = time.monotonic()
        if now - said < _PROGRESS_S:
            return
        said = now
        write(options.report, so_far, {}, now - began)
        print(
            f"{so_far.seeds} of {options.seeds} seeds in {now - began:.0f} s,"
            f" {so_far.violations} violations {so_far.violating_seeds}",
            flush=True,
        )

    totals = search(range(options.start, options.start + options.seeds), options.jobs, progress)
    searched_s = time.monotonic() - began
    caught: dict[str, tuple[int | None, str]] = {}
    if options.planted:
        caught = catch(PLANTED, options.start, options.planted, options.jobs)
    write(options.report, totals, caught, searched_s)
    print(
        f"{totals.seeds} seeds, {totals.steps} steps, {totals.faults} faults,"
        f" {totals.reads_checked} reads checked, {totals.violations} violations;"
        f" without kvplane {totals.unprotected_wrong_reads} of {totals.unprotected_reads}"
        f" reads were wrong; {searched_s:.0f} s"
    )
    for name, (took, how) in sorted(caught.items()):
        print(f"  planted {name}: " + (f"seed {took}: {how}" if took else "MISSED"))
    if totals.violating_seeds:
        tell(min(totals.violating_seeds), "", "", shrinks=not options.no_shrink)
    missed = [name for name, (took, _) in caught.items() if took is None]
    return 1 if totals.violations or missed else 0


def write(
    path: Path, totals: Totals, caught: dict[str, tuple[int | None, str]], seconds: float
) -> None:
    """Write the report."""
    path.parent.mkdir(parents=True, exist_ok=True)
    report = vars(totals) | {
        "planted": {name: took for name, (took, _) in sorted(caught.items())},
        "planted_shown_as": {name: how for name, (_, how) in sorted(caught.items())},
        "seconds": round(seconds, 1),
    }
    path.write_text(json.dumps(report, indent=2) + "\n")


def tell(seed: int, plant: str, only: str, *, shrinks: bool) -> int:
    """Replay a seed, make it small if it fails, and print its story."""
    scenario = draw(seed)
    if only:
        scenario = scenario.only(set(only.split(",")))
    outcome = play(scenario, plant, trace=True)
    if not outcome.violations:
        print(
            f"seed {seed}: no violation; {outcome}" if not shrinks else f"seed {seed}: no violation"
        )
        return 0
    if shrinks:
        scenario = shrink(scenario, plant)
        outcome = play(scenario, plant, trace=True)
    print("\n".join(scenario.told()))
    print("\n".join(outcome.log[-200:]))
    print("\n".join(outcome.violations[:5]))
    kept = ",".join(scenario.parts()) or "none"
    more = f" --plant {plant}" if plant else ""
    print(
        f"replay: cd tests && python -m simulation --replay {seed} --only {kept} --no-shrink{more}"
    )
    return 1


if __name__ == "__main__":
    sys.exit(main())
