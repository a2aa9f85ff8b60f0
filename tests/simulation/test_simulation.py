"""The search itself: no violation without a planted fault, one with each; replays; its loop."""

import asyncio
import json
import os
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest

from simulation.loop import Process, VirtualLoop
from simulation.planted import CAUGHT_AT, PLANTED

SEEDS = 300
_TESTS = Path(__file__).parents[1]


def simulate(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "simulation", *arguments],
        cwd=_TESTS,
        env={**os.environ, "PYTHONHASHSEED": "0"},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.timeout(1200)
def test_no_seed_violates_an_invariant(tmp_path: Path) -> None:
    report = tmp_path / "report.json"

    done = simulate("--seeds", str(SEEDS), "--planted", "0", "--report", str(report))

    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-4000:]
    seen = json.loads(report.read_text())
    assert seen["seeds"] == SEEDS
    assert seen["violations"] == 0
    assert seen["first_violation"] is None
    # It was no idle search.
    assert seen["reads_checked"] > 3 * SEEDS
    assert seen["faults"] > 2 * SEEDS
    assert seen["turns"] > 3 * SEEDS
    assert seen["kinds"]["freed by the keeper"] > SEEDS / 3
    assert seen["kinds"]["refused OVER_QUOTA"] > SEEDS / 20
    # The same users without kvplane read wrong blocks.
    assert seen["unprotected_wrong_reads"] > SEEDS


@pytest.mark.timeout(1200)
def test_each_planted_fault_is_caught(tmp_path: Path) -> None:
    report = tmp_path / "report.json"

    done = simulate("--seeds", "0", "--planted", "500", "--report", str(report))

    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-4000:]
    took = json.loads(report.read_text())["planted"]
    assert took.keys() == PLANTED.keys()
    assert all(number <= 500 for number in took.values())
    assert CAUGHT_AT.keys() <= PLANTED.keys()


@pytest.mark.timeout(300)
def test_a_failure_is_made_small_and_replays() -> None:
    first = simulate("--replay", "0", "--plant", "digests_not_compared")

    assert first.returncode == 1, first.stdout[-4000:] + first.stderr[-4000:]
    line = re.search(r"python -m simulation (--replay .*)", first.stdout)
    assert line is not None
    again = simulate(*line[1].split())
    assert again.returncode == 1
    assert [row for row in again.stdout.splitlines() if row.startswith("invariant")] == [
        row for row in first.stdout.splitlines() if row.startswith("invariant")
    ]
    # Two turns and no fault are enough for a history that was edited.
    assert line[1].count("o") < 8
    assert "f" not in line[1].split("--only ")[1].split()[0]


@pytest.mark.timeout(300)
def test_a_seed_is_the_same_run_each_time() -> None:
    runs = [simulate("--replay", "11", "--no-shrink") for _ in range(2)]

    assert runs[0].returncode == 0, runs[0].stdout[-4000:] + runs[0].stderr[-4000:]
    assert "steps=" in runs[0].stdout
    assert runs[0].stdout == runs[1].stdout


def test_time_passes_only_when_nobody_can_run() -> None:
    loop, seen = VirtualLoop(random.Random(1)), []
    process = Process("p")

    async def wait(seconds: float) -> None:
        await asyncio.sleep(seconds)
        seen.append((seconds, loop.time()))

    for seconds in (3.0, 1.0, 2.0):
        loop.spawn(process, wait(seconds))
    loop.run_to(2.5)

    assert seen == [(1.0, 1.0), (2.0, 2.0)]
    assert loop.time() == 2.5


def test_a_frozen_process_waits_and_a_killed_one_never_runs_again() -> None:
    loop, seen = VirtualLoop(random.Random(1)), []
    frozen, killed = Process("frozen"), Process("killed")

    async def tick(name: str) -> None:
        try:
            for _ in range(3):
                await asyncio.sleep(1.0)
                seen.append((name, loop.time()))
        finally:
            seen.append((name, -1.0))

    tasks = [loop.spawn(frozen, tick("frozen")), loop.spawn(killed, tick("killed"))]
    loop.run_to(0.5)
    loop.freeze(frozen)
    loop.kill(killed)
    loop.run_to(5.0)
    assert seen == []
    loop.thaw(frozen)
    loop.run_to(9.0)

    assert seen == [("frozen", 5.0), ("frozen", 6.0), ("frozen", 7.0), ("frozen", -1.0)]
    assert not tasks[1].done()
    tasks[1].get_coro().close()


def test_the_seed_decides_who_runs_next() -> None:
    def order(seed: int) -> list[str]:
        loop, seen = VirtualLoop(random.Random(seed)), []

        async def go(name: str) -> None:
            for _ in range(4):
                seen.append(name)
                await asyncio.sleep(0)

        for name in "abc":
            loop.spawn(Process(name), go(name))
        loop.run_to(1.0)
        return seen

    assert order(1) == order(1)
    assert len({tuple(order(seed)) for seed in range(20)}) > 10
