"""Start, watch and stop the processes of a demo or a test, each with a log file."""

import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Self

from kvplane.kernel.clock import SystemClock, sleep_blocking

ROOT = Path(__file__).resolve().parent.parent.parent
_clock = SystemClock()
_given: set[int] = set()


class Failed(Exception):
    """A process did not do what it should; the message has the end of its log."""


def free_port() -> int:
    """Return a TCP port of the loopback that nobody listens on, another one each time.

    Below the ports that outgoing connections get (32768 and up on Linux): one of them
    could take it before the server that it is meant for listens.
    """
    while True:
        port = random.randrange(15_000, 32_000)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        if port not in _given:
            _given.add(port)
            return port


class Server:
    """One process and its children, in a process group of their own."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        *,
        url: str,
        health: str = "/health",
        env: Mapping[str, str] | None = None,
        logs: Path | None = None,
    ) -> None:
        """`health` is the path below `url` that answers 200 once the process is ready."""
        self.name = name
        self.command = list(command)
        self.url = url
        self.health_url = url + health
        self.env = dict(env or {})
        self.log_path = (logs or ROOT / "build" / "logs") / f"{name}.log"
        self.process: subprocess.Popen[bytes] | None = None
        self._started = 0.0

    def start(self) -> Self:
        """Start the process; a restart appends to the log."""
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        with self.log_path.open("ab" if self.process else "wb") as log:
            self.process = subprocess.Popen(
                self.command,
                env={**os.environ, **self.env},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._started = _clock.monotonic()
        return self

    def alive(self) -> bool:
        """Tell whether the process runs."""
        return self.process is not None and self.process.poll() is None

    def healthy(self) -> bool:
        """Ask the health endpoint once."""
        try:
            with urllib.request.urlopen(self.health_url, timeout=2) as answer:  # noqa: S310
                return bool(answer.status == 200)
        except OSError:
            return False

    def wait(self, timeout: float = 180, say: Callable[[str], None] | None = None) -> Self:
        """Wait until it is healthy. Raises Failed when it ends or takes too long."""
        wait_for([self], timeout, say)
        return self

    def seconds(self) -> float:
        """Return how long ago it was started."""
        return _clock.monotonic() - self._started

    def stop(self, grace: float = 15) -> int | None:
        """Ask the process to end, end it after `grace` seconds, and return its exit status."""
        if self.process is None:
            return None
        if self.process.poll() is None:
            self.signal(signal.SIGCONT)
            # The main process alone: it ends its children in order.
            self.process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(grace)
        self.signal(signal.SIGKILL)
        return self.process.wait(10)

    def kill(self) -> None:
        """End the whole group at once, like a machine that lost power."""
        self.signal(signal.SIGKILL)
        if self.process is not None:
            self.process.wait(10)

    def freeze(self) -> None:
        """Stop the group without ending it; connections stay open."""
        self.signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """Let a frozen group go on."""
        self.signal(signal.SIGCONT)

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the process and its children."""
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, number)

    def log_tail(self, lines: int = 25) -> str:
        """Return the end of the log."""
        if not self.log_path.is_file():
            return ""
        return "\n".join(self.log_path.read_text(errors="replace").splitlines()[-lines:])


def wait_for(
    servers: Sequence[Server], timeout: float = 180, say: Callable[[str], None] | None = None
) -> None:
    """Wait until all are healthy; tell `say` now and then who is not.

    Raises Failed, with the end of its log, for one that ends or takes too long.
    """
    began = _clock.monotonic()
    waiting = list(servers)
    spoken = 0.0
    while True:
        for server in list(waiting):
            if not server.alive():
                status = server.process.returncode if server.process else None
                raise Failed(
                    f"{server.name} ended with status {status}; the end of {server.log_path}:\n\n"
                    + server.log_tail()
                )
            if server.healthy():
                waiting.remove(server)
                if say:
                    say(f"{server.name} is ready after {server.seconds():.0f} s")
        if not waiting:
            return
        passed = _clock.monotonic() - began
        names = " and ".join(server.name for server in waiting)
        if passed > timeout:
            raise Failed(
                f"{names} not ready after {timeout:.0f} s; the end of {waiting[0].log_path}:\n\n"
                + waiting[0].log_tail()
            )
        if say and passed - spoken >= 5:
            spoken = passed
            say(f"waiting for {names} ({passed:.0f} s)")
        sleep_blocking(0.2)


def stop_all(servers: Sequence[Server]) -> None:
    """Stop them together, so that nobody waits for the next one's grace."""
    for server in servers:
        if server.alive():
            server.thaw()
            assert server.process is not None
            server.process.terminate()
    for server in servers:
        server.stop()


def python() -> str:
    """Return the interpreter that runs this."""
    return sys.executable
