"""The demo's processes: two engines, and `kvplane dev` with the gateway."""

import contextlib
import json
import os
import signal
import socket
from collections.abc import Callable
from pathlib import Path

from demo.build_model import SHAPES, build
from demo.servers import ROOT, Server, free_port, python, stop_all, wait_for
from demo.vllm_worker import VllmWorker

FOLDER = ROOT / "build" / "demo"
MODEL = "demo"
PREFILL, DECODE = "prefill", "decode"
# Room for the conversation, its rerun without reuse, and the blocks under way.
_TOKENS = 32768


class Cluster:
    """`start` brings everything up, `stop` takes it down."""

    def __init__(self, engine: str, folder: Path = FOLDER) -> None:
        """`engine` is vllm or reference; `folder` gets the logs and the database."""
        self.engine = engine
        self.folder = folder
        self.control_plane = f"127.0.0.1:{_port(7700)}"
        self.gateway = f"http://127.0.0.1:{_port(8000)}"
        make = self._vllm if engine == "vllm" else self._reference
        self.engines = [make(PREFILL), make(DECODE)]
        self.servers = [self._kvplane(), *self.engines]

    def start(self, say: Callable[[str], None]) -> None:
        """Start all and wait until they are ready. Raises Failed."""
        self.folder.mkdir(parents=True, exist_ok=True)
        for server in self.servers:
            server.start()
        pids = {server.name: server.process.pid for server in self.servers if server.process}
        _running(self.folder).write_text(json.dumps(pids))
        wait_for(self.servers, 300, say)

    def stop(self) -> None:
        """End all."""
        stop_all(self.servers)
        _running(self.folder).unlink(missing_ok=True)

    def _kvplane(self) -> Server:
        database = self.folder / "kvplane.db"
        for old in self.folder.glob("kvplane.db*"):
            old.unlink()
        gateway_port = self.gateway.rpartition(":")[2]
        command = [
            *(python(), "-m", "kvplane.cli", "dev", "--database", f"sqlite:///{database}"),
            *("--port", self.control_plane.rpartition(":")[2], "--gateway-port", gateway_port),
        ]
        env = {
            "KVPLANE_GRPC_STATUS_PORT": str(free_port()),
            "KVPLANE_LOG_FORMAT": "json",
            # A slow machine may read for longer than a server would.
            "KVPLANE_GATEWAY_REUSE_TIMEOUT_S": "120",
        }
        return Server("kvplane", command, url=self.gateway, env=env, logs=self.folder)

    def _vllm(self, name: str) -> Server:
        port = free_port()
        return VllmWorker(
            name,
            build("demo"),
            port,
            free_port(),
            "kv_producer" if name == PREFILL else "kv_consumer",
            served_name=MODEL,
            kv_cache_bytes=_TOKENS * SHAPES["demo"].kv_bytes_per_token(),
            # Neither keeps prefixes of its own: what is not computed was really read, and a
            # wrong block on either side shows in the answer.
            prefix_caching=False,
            connector_module="kvplane_vllm.connector",
            connector_config={
                "kvplane": {
                    "control_plane": self.control_plane,
                    "worker_id": name,
                    "url": f"http://127.0.0.1:{port}",
                }
            },
            threads=max(1, (os.cpu_count() or 2) // 2),
        ).server(self.folder)

    def _reference(self, name: str) -> Server:
        port = free_port()
        command = [
            *(python(), "-m", "kvplane.engine", "--role", name, "--port", str(port)),
            *("--model", MODEL, "--worker-id", name, "--control-plane", self.control_plane),
            # Slow enough for a reuse to be seen.
            *("--prefill-us-per-token", "150", "--decode-us-per-token", "1000"),
        ]
        return Server(name, command, url=f"http://127.0.0.1:{port}", logs=self.folder)


def end_leftovers(folder: Path = FOLDER) -> bool:
    """End what an earlier run left running; tell whether there was something."""
    found, running = False, _running(folder)
    if running.is_file():
        for pid in json.loads(running.read_text()).values():
            if _is_ours(pid):
                found = True
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(pid, signal.SIGKILL)
        running.unlink()
    return found


def _running(folder: Path) -> Path:
    """Return the file that names the processes which run."""
    return folder / "running.json"


def _is_ours(pid: int) -> bool:
    """Tell whether the process is one of ours, and not another under its old number."""
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False
    return any(part in command for part in (b"kvplane", b"vllm"))


def _port(wanted: int) -> int:
    """Return that port, or a free one if somebody listens there."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", wanted))
        except OSError:
            return free_port()
    return wanted
