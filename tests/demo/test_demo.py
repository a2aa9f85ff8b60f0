"""`make demo ENGINE=reference`, and what the demo makes of its turns."""

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from demo import report
from demo.play import Turn

ROOT = Path(__file__).resolve().parents[2]
KEYS = {
    *("turn", "prompt_tokens", "reused_tokens", "recomputed_tokens", "lease_id"),
    *("ttft_ms", "baseline_ttft_ms", "speedup", "tokens_equal"),
}


def turn(number: int, *, reused: int = 0, equal: bool = True) -> Turn:
    return Turn(number, 1000 * number, reused, "lease-1" if reused else None, 100.0, 250.0, equal)


def test_all_is_well_when_tokens_are_equal_and_something_was_reused() -> None:
    assert report.verdict([turn(1), turn(2, reused=900)]) is None


def test_different_tokens_and_no_reuse_are_failures() -> None:
    assert report.verdict([turn(1), turn(2, reused=900, equal=False)]) == "tokens differ in turn 2"
    assert report.verdict([turn(1), turn(2)]) == "no turn reused anything"


def test_the_report_and_the_plot(tmp_path: Path) -> None:
    turns = [turn(1), turn(2, reused=900)]
    report.write(turns, tmp_path / "report.json")
    report.plot(turns, "reference", tmp_path / "plot.png")
    written = json.loads((tmp_path / "report.json").read_text())
    assert written["turns"][1] == {
        "turn": 2,
        "prompt_tokens": 2000,
        "reused_tokens": 900,
        "recomputed_tokens": 1100,
        "lease_id": "lease-1",
        "ttft_ms": 100.0,
        "baseline_ttft_ms": 250.0,
        "speedup": 2.5,
        "tokens_equal": True,
    }
    assert (tmp_path / "plot.png").stat().st_size > 5000
    assert len(report.row(turns[1])) == len(report.header().splitlines()[0])


@pytest.mark.processes
@pytest.mark.timeout(300)
def test_the_demo_on_reference_engines(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "demo.run", "--engine", "reference", "--out", str(tmp_path)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT / "examples")},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    turns = json.loads((tmp_path / "report.json").read_text())["turns"]
    assert [t["turn"] for t in turns] == [1, 2, 3, 4, 5]
    assert all(set(t) == KEYS and t["tokens_equal"] for t in turns)
    assert all(t["prompt_tokens"] == t["reused_tokens"] + t["recomputed_tokens"] for t in turns)
    assert turns[0]["lease_id"] is None
    leases = [t["lease_id"] for t in turns[1:]]
    assert len(set(leases)) == 4
    # All but the newest document and its question was read.
    assert all(
        after["reused_tokens"] >= before["prompt_tokens"]
        for before, after in itertools.pairwise(turns)
    )
    assert "make demo ENGINE=reference ARGS=--keep" in done.stdout
