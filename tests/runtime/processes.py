"""Real kvplane processes."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path


def environment(**more: str) -> dict[str, str]:
    """This process's environment without settings of its own."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith("KVPLANE_")}
    return {**clean, "NO_COLOR": "1", **more}


def kvplane(*arguments: str, cwd: Path, **env: str) -> "subprocess.CompletedProcess[str]":
    """Run a command to its end."""
    return subprocess.run(
        [sys.executable, "-m", "kvplane.cli", *arguments],
        cwd=cwd,
        env=environment(**env),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


class Running:
    """A process whose output goes to files."""

    def __init__(self, *arguments: str, cwd: Path, **env: str) -> None:
        self.out, self.err = cwd / "out.log", cwd / "err.log"
        with self.out.open("w") as out, self.err.open("w") as err:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "kvplane.cli", *arguments],
                cwd=cwd,
                env=environment(**env),
                stdout=out,
                stderr=err,
            )

    def logged(self) -> str:
        return self.out.read_text() + self.err.read_text()

    def wait_until(self, condition, seconds: float = 30.0):
        """Return the first true value of `condition`; fail when the process ends before."""
        end = time.monotonic() + seconds
        while True:
            value = condition()
            if value:
                return value
            assert self._process.poll() is None, self.logged()
            assert time.monotonic() < end, self.logged()
            time.sleep(0.05)

    def wait_for(self, pattern: str) -> "re.Match[str]":
        return self.wait_until(lambda: re.search(pattern, self.logged()))

    def signal(self, number: int = signal.SIGTERM) -> None:
        self._process.send_signal(number)

    def ended(self, seconds: float = 20.0) -> int:
        """Return the exit code."""
        try:
            return self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running: {self.logged()}") from None

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()


@contextlib.contextmanager
def running(*arguments: str, cwd: Path, **env: str) -> Iterator[Running]:
    """A process that is gone afterwards."""
    cwd.mkdir(parents=True, exist_ok=True)
    one = Running(*arguments, cwd=cwd, **env)
    try:
        yield one
    finally:
        one.kill()


def get(url: str) -> tuple[int, str]:
    """Return code and body; code 0 when nobody listens."""
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()
    except OSError:
        return 0, ""
