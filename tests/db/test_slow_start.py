"""A PostgreSQL server of the tests' own that is slow to come up."""

import subprocess

import pytest
from postgresql import begin


class Slow:
    """Comes up when it has failed in each of these ways."""

    def __init__(self, *failures: Exception) -> None:
        self.failures = list(failures)

    def start(self) -> None:
        if self.failures:
            raise self.failures.pop(0)


LATE = subprocess.TimeoutExpired("pg_ctl", 10)


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("postgresql.time.sleep", lambda seconds: None)


def test_it_is_waited_for() -> None:
    slow = Slow(LATE, AssertionError())
    begin(slow)
    assert not slow.failures


def test_one_that_never_comes_up_is_a_failure() -> None:
    with pytest.raises(subprocess.TimeoutExpired):
        begin(Slow(*[LATE] * 9))
