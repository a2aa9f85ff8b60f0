"""Check the protocol's model with spin: as it is, and with each planted fault.

    python tests/model/check.py            the scenes, the faults, the assumptions
    python tests/model/check.py --pairs    also each two scenes at once: minutes, and 3 GB

Prints a table and writes build/model/report.json. Exits with 1 when the model violates a
property, has steps that are never taken, or violates none when a fault is planted.
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MODEL, FAULT_SWITCHES = (Path(__file__).with_name(name) for name in ("lease.pml", "faults.h"))
REPORT = ROOT / "build" / "model" / "report.json"

# Numbered as the invariants of docs/protocol.md. 4, tenants, is not in the model.
PROPERTIES = {
    1: "nothing is freed under a read that is used",
    2: "at most one reader for an ownership",
    3: "a lease ends before the hold, and at its holder no later",
    5: "what is read is what the prompt says",
    6: "an ended epoch owns nothing, changes nothing",
    7: "a silent reader blocks no longer than its lease",
    8: "renewal never revives",
    9: "a repeated request gets the first answer",
}
SCENES = {
    "the block is pinned again": ("AGAIN",),
    "workers are lost and restart": ("EPOCHS",),
    "a hold is made longer": ("LONGER",),
}
PAIRS = list(combinations(("AGAIN", "EPOCHS", "LONGER"), 2))


@dataclass(frozen=True)
class Planted:
    """A fault, the property that it breaks, and what besides must happen for it to show."""

    name: str
    property: int
    needs: tuple[str, ...] = ()
    kind: str = "fault"


PLANTED = [
    Planted("NO_MARGIN", 1),
    Planted("DOUBLE_GRANT", 2),
    Planted("ANSWER_FORGOTTEN", 9),
    Planted("EPOCH_IGNORED", 6, ("EPOCHS", "CLOCK=0")),
    Planted("NO_DRAIN", 1),
    Planted("DRAIN_NEVER_ENDS", 7),
    Planted("NO_SLACK", 1),
    Planted("RENEW_REVIVES", 8),
    Planted("RENEWAL_SHORTENS", 3),
    Planted("HOLDER_COUNTS_FROM_REPLY", 1),
    Planted("LATE_RESULT_USED", 1),
    Planted("NO_TOKEN_CHECK", 5),
    Planted("EXPIRED_READING_HELD_AGAIN", 2, ("HOLD=6",)),
    Planted("UNUSED_AFTER_READ", 2),
    Planted("LEASE_USED_TWICE", 1),
    Planted("BEGUN_READ_GIVEN_BACK", 2),
    Planted("FENCING_IGNORED", 2),
    Planted("LATE_REPORT_BELIEVED", 1),
    Planted("RESTART_GIVES_FULL_TIME", 1),
    Planted("HOLD_MOVED_BEFORE_ACK", 1, ("LONGER",)),
    Planted("VOID_FREES_AT_ONCE", 1, ("EPOCHS",)),
    # What the argument rests on: without it the promise would not hold.
    Planted("SMALL_DRIFT", 1, kind="without"),
    Planted("DEAD_SILENCE", 1, ("EPOCHS", "CLOCK=0"), kind="without"),
]


@dataclass(frozen=True)
class Result:
    """What one search found."""

    states: int
    transitions: int
    seconds: float
    violated: bool
    trace: str
    # Statements that no path takes: a model that cannot move violates nothing.
    unreached: tuple[str, ...]


class SpinFailed(Exception):
    """Spin, the compiler or the search did not do its work."""


def search(defines: Sequence[str]) -> Result:
    """Visit every state of the model, up to the first violation."""
    flags = [f"-D{define}" for define in defines]
    with tempfile.TemporaryDirectory(prefix="kvplane-model-") as directory:
        where = Path(directory)
        for source in (MODEL, FAULT_SWITCHES):
            (where / source.name).write_bytes(source.read_bytes())
        _run(["spin", *flags, "-a", MODEL.name], where)
        # No partial-order reduction: nearly all steps depend on one another.
        options = ["-O1", "-w", "-DSAFETY", "-DNOREDUCE", "-DMEMLIM=4000"]
        _run(["gcc", *options, "-o", "pan", "pan.c"], where)
        started = time.monotonic()
        output = _run(["./pan", "-E", "-m100000"], where)
        seconds = time.monotonic() - started
        violated = "assertion violated" in output
        trace = _run(["spin", *flags, "-t", "-p", "-g", MODEL.name], where) if violated else ""
    complete = "errors: 0" in output and "Search not completed" not in output
    if not violated and not complete:
        raise SpinFailed(f"{' '.join(flags)}: the search is not complete\n{output[-3000:]}")
    return Result(
        states=_number("states, stored", output),
        transitions=_number("transitions", output),
        seconds=round(seconds, 1),
        violated=violated,
        trace=trace,
        unreached=() if violated else _unreached(output),
    )


def search_planted(planted: Planted) -> Result:
    """Look for a violation of the one property that a fault is meant to break."""
    switch = f"{planted.kind.upper()}_{planted.name}"
    return search([switch, f"ONLY={planted.property}", *planted.needs])


def _number(what: str, output: str) -> int:
    found = re.search(rf"(\S+) {what}", output)
    return int(float(found.group(1))) if found else 0


def _unreached(output: str) -> tuple[str, ...]:
    lines: list[str] = []
    for part in output.split("unreached in ")[1:]:
        if not part.startswith("proctype Monitor"):  # its checks wait for a violation
            lines += re.findall(r"(lease\.pml:\d+, .*)", part)
    return tuple(line for line in lines if '"-end-"' not in line)


def _run(command: list[str], where: Path) -> str:
    try:
        done = subprocess.run(command, cwd=where, capture_output=True, text=True, check=False)
    except FileNotFoundError as error:
        raise SpinFailed(f"{command[0]} is missing; tools/spin.py installs it") from error
    if done.returncode:
        raise SpinFailed(f"{' '.join(command)}\n{done.stdout[-3000:]}{done.stderr[-3000:]}")
    return done.stdout


def main(arguments: Sequence[str] | None = None) -> int:
    """Check everything; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", action="store_true", help="each two scenes at once, too")
    rows, good = [], True
    with ThreadPoolExecutor(2) as pool:
        jobs: list[tuple[str, str, int, Future[Result]]] = [
            ("as it is", name, 0, pool.submit(search, defines)) for name, defines in SCENES.items()
        ]
        jobs += [(p.kind, p.name, p.property, pool.submit(search_planted, p)) for p in PLANTED]
        if parser.parse_args(arguments).pairs:
            jobs += [("as it is", " + ".join(p), 0, pool.submit(search, p)) for p in PAIRS]
        print(f"{'':9}{'':30}{'states':>11}{'seconds':>9}  verdict")
        for kind, name, number, job in jobs:
            result = job.result()
            right = result.violated == (number > 0) and not result.unreached
            good = good and right
            if number:
                verdict = ("found: " if right else "NOT FOUND: ") + PROPERTIES[number]
            elif result.violated:
                verdict = f"VIOLATED\n{result.trace}"
            else:
                verdict = "\n".join(["no violation", *(f"never: {u}" for u in result.unreached)])
            counts = f"{result.states:>11,}{result.seconds:>9.1f}"
            print(f"{kind:9}{name:30}{counts}  {verdict}", flush=True)
            rows.append(
                {
                    "kind": kind,
                    "name": name,
                    "property": number or None,
                    "states": result.states,
                    "transitions": result.transitions,
                    "seconds": result.seconds,
                    "violated": result.violated,
                    "as_expected": right,
                }
            )
    REPORT.parent.mkdir(parents=True, exist_ok=True)
    report = {"ok": good, "properties": PROPERTIES, "searches": rows}
    REPORT.write_text(json.dumps(report, indent=2) + "\n")
    print(f"{'as expected' if good else 'NOT as expected'}; see {REPORT.relative_to(ROOT)}")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
