"""One unmanaged pair of real engine processes for all tests that do it no harm."""

from collections.abc import Callable, Iterator

import pytest
from engine.harness import EngineProcess, Pair


@pytest.fixture(scope="session")
def pair() -> Iterator[Pair]:
    started = Pair(
        EngineProcess("--role", "prefill", "--prefill-us-per-token", "2"),
        EngineProcess("--role", "decode", "--prefill-us-per-token", "2"),
    )
    yield started
    assert started.prefill.stop() == 0
    assert started.decode.stop() == 0


@pytest.fixture
def start() -> Iterator[Callable[..., EngineProcess]]:
    """Starts engines that end with the test."""
    running: list[EngineProcess] = []

    def begin(*args: str) -> EngineProcess:
        running.append(EngineProcess(*args))
        return running[-1]

    yield begin
    for process in running:
        process.kill()
