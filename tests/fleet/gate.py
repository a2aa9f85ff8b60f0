"""A TCP door before an engine: what comes while it is shut waits there, unseen by the engine."""

import contextlib
import select
import socket
import threading
from collections.abc import Iterator

_PIECE = 1 << 16


class Gate:
    """Passes connections on to a port, byte by byte, in threads of its own."""

    def __init__(self, port: int, target: int) -> None:
        self._target = target
        self._open = threading.Event()
        self._open.set()
        self.waiting = 0
        self._listener = socket.create_server(("127.0.0.1", port))
        threading.Thread(target=self._accept, daemon=True).start()

    @contextlib.contextmanager
    def shut(self) -> Iterator[None]:
        """Keep from the engine what comes meanwhile."""
        self._open.clear()
        try:
            yield
        finally:
            self._open.set()

    def close(self) -> None:
        """Take no more connections."""
        self._open.set()
        self._listener.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                threading.Thread(target=self._pass, args=(client,), daemon=True).start()

    def _pass(self, client: socket.socket) -> None:
        with client, contextlib.suppress(OSError):
            server = socket.create_connection(("127.0.0.1", self._target))
            with server:
                other = {client: server, server: client}
                while True:
                    for ready in select.select(list(other), [], [])[0]:
                        piece = ready.recv(_PIECE)
                        if not piece:
                            return
                        if ready is client and not self._wait(client):
                            return
                        other[ready].sendall(piece)

    def _wait(self, client: socket.socket) -> bool:
        """Return once the gate is open; False when the client has gone before."""
        if self._open.is_set():
            return True
        self.waiting += 1
        try:
            while not self._open.wait(0.02):
                if select.select([client], [], [], 0)[0] and not client.recv(1, socket.MSG_PEEK):
                    return False
            return True
        finally:
            self.waiting -= 1
