"""Running many seeds, with and without planted faults, and making a failure small."""

import contextlib
import logging
import multiprocessing
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import structlog

from simulation.planted import CAUGHT_AT, PLANTED
from simulation.scenario import Scenario, draw
from simulation.world import Outcome, run

_CHUNK = 25


def quiet() -> None:
    """Say nothing: the product logs each fault, and there are many."""
    logging.disable(logging.CRITICAL)
    # Killed processes leave tasks behind that Python complains about.
    sys.unraisablehook = lambda _: None
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))


def play(scenario: Scenario, plant: str = "", *, trace: bool = False) -> Outcome:
    """Run one scenario, with a planted fault if it is named."""
    with PLANTED[plant]() if plant else contextlib.nullcontext():
        return run(scenario, trace=trace)


@dataclass
class Totals:
    """What many seeds have shown."""

    seeds: int = 0
    steps: int = 0
    transactions: int = 0
    virtual_s: float = 0.0
    turns: int = 0
    faults: int = 0
    reads_checked: int = 0
    reads_dropped: int = 0
    wrong_but_dropped: int = 0
    violations: int = 0
    violating_seeds: list[int] = field(default_factory=list)
    first_violation: str | None = None
    kinds: Counter[str] = field(default_factory=Counter)
    unprotected_reads: int = 0
    unprotected_wrong_reads: int = 0

    def add(self, outcome: Outcome, plain: Outcome | None) -> None:
        """Count a seed."""
        self.seeds += 1
        for name in ("steps", "transactions", "virtual_s", "turns", "faults", "reads_checked",
                     "reads_dropped", "wrong_but_dropped", "kinds"):  # fmt: skip
            setattr(self, name, getattr(self, name) + getattr(outcome, name))
        if outcome.violations:
            self.violations += 1
            self.violating_seeds.append(outcome.seed)
            self.first_violation = (
                self.first_violation or f"seed {outcome.seed}: {outcome.violations[0]}"
            )
        if plain is not None:
            self.unprotected_reads += plain.reads_checked
            self.unprotected_wrong_reads += plain.wrong_reads

    def merge(self, other: "Totals") -> None:
        """Add another's counts."""
        first = self.first_violation
        for name, value in vars(other).items():
            if name != "first_violation":
                setattr(self, name, getattr(self, name) + value)
        self.first_violation = first or other.first_violation


def _chunk(seeds: list[int]) -> Totals:
    totals = Totals()
    for seed in seeds:
        scenario = draw(seed)
        totals.add(play(scenario), run(scenario, plain=True))
    return totals


def _catch(job: tuple[str, int, int]) -> tuple[str, int | None, str]:
    name, start, most = job
    known = CAUGHT_AT.get(name, start) - start
    if 0 < known < most:
        outcome = play(draw(start + known), name)
        if _shows(outcome):
            return name, known + 1, outcome.violations[0]
    for number in range(most):
        outcome = play(draw(start + number), name)
        if _shows(outcome):
            return name, number + 1, outcome.violations[0]
    return name, None, ""


def _shows(outcome: Outcome) -> bool:
    """Tell whether a planted fault was caught; a crash only says that it fits the code no more."""
    return bool(outcome.violations) and not outcome.violations[0].startswith("invariant 0")


def search(
    seeds: Iterable[int], jobs: int, progress: Callable[[Totals], None] = lambda totals: None
) -> Totals:
    """Run seeds; `progress` hears of what has been shown so far."""
    every = list(seeds)
    if not every:
        return Totals()
    chunks = [every[i : i + _CHUNK] for i in range(0, len(every), _CHUNK)]
    totals = Totals()
    with _pool(jobs) as pool:
        for part in pool.imap_unordered(_chunk, chunks):
            totals.merge(part)
            progress(totals)
    return totals


def catch(
    names: Iterable[str], start: int, most: int, jobs: int
) -> dict[str, tuple[int | None, str]]:
    """Return how many seeds each planted fault took, None when it was missed, and how it showed."""
    work = [(name, start, most) for name in names]
    with _pool(jobs) as pool:
        return {name: (took, how) for name, took, how in pool.imap_unordered(_catch, work)}


def _pool(jobs: int) -> Any:
    return multiprocessing.get_context("fork").Pool(jobs, initializer=quiet)


def shrink(scenario: Scenario, plant: str = "", budget_s: float = 60.0) -> Scenario:
    """Leave out whatever the failure does not need."""
    end = time.monotonic() + budget_s
    kept = scenario.parts()

    def fails(parts: list[str]) -> bool:
        return bool(play(scenario.only(set(parts)), plant).violations)

    size = max(len(kept) // 2, 1)
    while time.monotonic() < end:
        before = len(kept)
        at = 0
        while at < len(kept) and time.monotonic() < end:
            smaller = kept[:at] + kept[at + size :]
            if fails(smaller):
                kept = smaller
            else:
                at += size
        if size == 1 and len(kept) == before:
            break
        size = max(size // 2, 1)
    return scenario.only(set(kept))
