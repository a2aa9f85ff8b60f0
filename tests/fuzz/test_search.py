"""A search that is the same in every run. To go on with other seeds: make fuzz."""

import asyncio
from pathlib import Path

import pytest

from fuzz.findings import Counts
from fuzz.search import HttpSearch, RpcSearch

pytestmark = pytest.mark.timeout(300)


def nothing_found(counts: Counts, target: str) -> None:
    """Show what was found, and how to find it again."""
    found = "\n\n".join(map(str, counts.found))
    assert not counts.found, f"{found}\n\nagain: cd tests && python -m fuzz --targets {target}"


def test_rpcs(calls: RpcSearch) -> None:
    counts = Counts()
    calls.batch(counts, seed=1, examples=25, shrink=False)
    nothing_found(counts, "sqlite --seed 1")
    # It gets somewhere.
    assert len(counts.accepted) > 20
    assert {"INVALID_ARGUMENT", "NOT_FOUND", "PERMISSION_DENIED", "UNAUTHENTICATED"} <= set(
        counts.codes
    )


@pytest.mark.processes
def test_endpoints(runner: asyncio.Runner, tmp_path: Path) -> None:
    search = HttpSearch(runner, tmp_path)
    counts = Counts()
    try:
        search.batch(counts, seed=1, examples=120)
    finally:
        search.close()
    nothing_found(counts, "http --seed 1")
    assert {"200", "400", "401", "404"} <= set(counts.codes)
