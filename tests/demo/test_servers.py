"""Processes of demos and tests: ready, ended, killed, frozen, explained."""

import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from demo.servers import Failed, Server, free_port, stop_all, wait_for

pytestmark = pytest.mark.processes

SERVE = """
import http.server, signal, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print("child", child.pid, flush=True)
class Face(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/health" else 404)
        self.end_headers()
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Face).serve_forever()
"""


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    port = free_port()
    made = Server(
        "face",
        [sys.executable, "-c", SERVE, str(port)],
        url=f"http://127.0.0.1:{port}",
        logs=tmp_path,
    )
    yield made
    made.kill()


def child_lives(server: Server) -> bool:
    pid = int(server.log_path.read_text().split("child ")[1].split()[0])
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"


def test_it_is_ready_when_its_health_says_so(server: Server) -> None:
    said: list[str] = []
    assert not server.alive()
    server.start().wait(30, said.append)
    assert server.alive()
    assert server.healthy()
    assert said[-1].startswith("face is ready after")


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
@pytest.mark.parametrize("end", ["stop", "kill"])
def test_its_children_end_with_it(server: Server, end: str) -> None:
    server.start().wait(30)
    assert child_lives(server)
    getattr(server, end)()
    assert not server.alive()
    for _ in range(100):  # the kernel may need a moment
        if not child_lives(server):
            return
        time.sleep(0.05)
    raise AssertionError("the child lives on")


def test_a_frozen_one_does_not_answer_and_can_be_stopped(server: Server) -> None:
    server.start().wait(30)
    server.freeze()
    assert not server.healthy()
    assert server.alive()
    server.thaw()
    server.wait(30)
    server.freeze()
    stop_all([server])
    assert not server.alive()


def test_one_that_ends_is_explained_with_its_log(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "raise SystemExit('no such model')"]
    server = Server("broken", command, url="http://127.0.0.1:1", logs=tmp_path).start()
    with pytest.raises(Failed, match=r"(?s)broken ended with status 1.*no such model"):
        server.wait(30)


def test_one_that_takes_too_long_is_named(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "import time; print('thinking', flush=True); time.sleep(60)"]
    server = Server("slow", command, url=f"http://127.0.0.1:{free_port()}", logs=tmp_path).start()
    said: list[str] = []
    try:
        with pytest.raises(Failed, match="slow not ready after 1 s"):
            wait_for([server], 1, said.append)
    finally:
        server.kill()
