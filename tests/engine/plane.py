"""The real control plane, in a process of its own, for engines under leases.

Run as a script it is that process: DATABASE_URL PORT.
"""

import socket
import subprocess
import sys
from pathlib import Path

from kvplane.client import lease_api, routing_api, session_api, worker_api
from kvplane.kernel.clock import SystemClock, sleep_blocking


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class ControlPlane:
    """Lease, session, routing and worker services on one port, over SQLite."""

    def __init__(self, folder: Path) -> None:
        self.port = free_port()
        self.address = f"127.0.0.1:{self.port}"
        self._database = f"sqlite+aiosqlite:///{folder / 'plane.db'}"
        self._log = (folder / "plane.log").open("a")
        self.process: subprocess.Popen | None = None

    def start(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, __file__, self._database, str(self.port)],
            stdout=self._log,
            stderr=self._log,
        )
        clock = SystemClock()
        end = clock.monotonic() + 20
        while not self._listens():
            assert clock.monotonic() < end, "the control plane does not listen"
            sleep_blocking(0.05)

    def _listens(self) -> bool:
        assert self.process is not None
        assert self.process.poll() is None, "the control plane did not start"
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self.port)) == 0

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait(10)
            self.process = None

    @property
    def routing(self):
        return routing_api(self.address)

    @property
    def workers(self):
        return worker_api(self.address)

    @property
    def sessions(self):
        return session_api(self.address)

    @property
    def leases(self):
        return lease_api(self.address)


async def _serve(url: str, port: int) -> None:
    from kvplane.cli.compose import Assembly
    from kvplane.cli.serve import flags, settings_or_exit
    from kvplane.client.quotas import QuotaBook
    from kvplane.db import migrate
    from kvplane.db.database import Database

    settings = settings_or_exit(None, **flags(database={"url": url}, grpc={"port": port}))
    await migrate.upgrade(url)
    clock = SystemClock()
    made = Assembly(settings, clock, Database(url, clock))
    tenants = made.tenant()
    quotas = QuotaBook(tenants, clock)
    leases = made.lease(quotas)
    made.routing(leases, made.session(leases, quotas))
    process = made.process(tenants, port)
    await process.start()
    await clock.sleep(3600)


if __name__ == "__main__":
    import asyncio

    asyncio.run(_serve(sys.argv[1], int(sys.argv[2])))
