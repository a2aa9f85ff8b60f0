"""Real NIXL reads between the KV memory of two engines, on CPU memory."""

import asyncio
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kvplane.engine.sidechannel import HandshakeFailed, Introduction, meet
from kvplane.kernel.clock import Clock

# Must be in the environment before UCX is loaded; what is set already stays.
_UCX_DEFAULTS = {"UCX_TLS": "tcp,sm", "UCX_NET_DEVICES": "lo", "NIXL_LOG_LEVEL": "ERROR"}


class ReadFailed(Exception):
    """A read could not be made. `sent` says whether anything may have left this process."""

    def __init__(self, message: str, *, sent: bool) -> None:
        super().__init__(message)
        self.sent = sent


@dataclass(slots=True)
class Peer:
    """An engine whose memory can be read."""

    engine_id: str
    agent: str
    blocks: Any
    clock_offset: float
    # Reads not over yet, and whether the last of them is to close the connection.
    reads: int = 0
    forgotten: bool = False


class Read:
    """One NIXL READ under way. Its destination must not be reused before it is over.

    It begins `delay_s()` seconds late, which for its owner and its reader is a slow read.
    """

    def __init__(
        self,
        transfer: "Transfer",
        peer: Peer,
        handle: Any,
        nbytes: int,
        delay_s: Callable[[], float],
    ) -> None:
        self._transfer = transfer
        self._handle = handle
        self._delay_s = delay_s
        self._made = transfer.clock.monotonic()
        self._posted = False
        self._failed = False
        self._over = False
        self.peer = peer
        self.nbytes = nbytes
        peer.reads += 1

    def state(self) -> str:
        """Return DONE, PROC or ERR. ERR too may still be followed by writes: see `over`."""
        waited = self._transfer.clock.monotonic() - self._made
        if not self._posted and waited >= self._delay_s():
            self._posted = True
            try:
                self._transfer.nixl.transfer(self._handle)
            except Exception:  # noqa: BLE001  the peer is gone
                self._failed = True
        if self._failed:
            return "ERR"
        if not self._posted:
            return "PROC"
        try:
            return str(self._transfer.nixl.check_xfer_state(self._handle))
        except Exception:  # noqa: BLE001  NIXL raises its own types for a peer that is gone
            return "ERR"

    def over(self) -> bool:
        """Return whether nothing can be written any more; frees the handle if so."""
        if self._over:
            return True
        if self.state() == "PROC":
            return False
        try:
            self._handle.release()
        except Exception:  # noqa: BLE001  as vLLM: keep it and its blocks, and try again
            return False
        self._over = True
        self.peer.reads -= 1
        self._transfer.dispose(self.peer)
        return True


class Transfer:
    """This engine's NIXL agent. Not thread-safe: NIXL is driven by the caller's polling.

    There is no progress thread: peers' reads advance only while `notifications` is
    called now and then, and a frozen process is frozen for its readers too.
    """

    def __init__(
        self,
        memory: npt.NDArray[np.uint8],
        engine_id: str,
        compatibility: str,
        clock: Clock,
    ) -> None:
        for name, value in _UCX_DEFAULTS.items():
            os.environ.setdefault(name, value)
        from nixl_cu12._api import nixl_agent, nixl_agent_config  # noqa: PLC0415

        self._memory = memory
        self._engine_id = engine_id
        self._compatibility = compatibility
        self.clock = clock
        self._peers: dict[str, Peer] = {}
        self._meeting: dict[str, asyncio.Lock] = {}
        self.nixl: Any = nixl_agent(
            engine_id, nixl_agent_config(enable_prog_thread=False, backends=["UCX"])
        )
        self.nixl.register_memory([(memory.ctypes.data, memory.nbytes, 0, "")], "DRAM")
        self._local = self._prepare("NIXL_INIT_AGENT", memory.ctypes.data, len(memory))

    def introduction(self) -> Introduction:
        """Return what a reader must know."""
        return Introduction(
            engine_id=self._engine_id,
            compatibility=self._compatibility,
            agent_metadata=self.nixl.get_agent_metadata(),
            address=self._memory.ctypes.data,
            num_blocks=len(self._memory),
            block_bytes=self._block_bytes,
            clock=self.clock.monotonic(),
        )

    async def connect(self, host: str, port: int, engine_id: str) -> Peer:
        """Return a peer, meeting it first if need be. ReadFailed when that fails."""
        async with self._meeting.setdefault(engine_id, asyncio.Lock()):
            peer = self._peers.get(engine_id)
            if peer is not None:
                return peer
            try:
                met, offset = await meet(host, port, engine_id, self._compatibility, self.clock)
                agent = self.nixl.add_remote_agent(met.agent_metadata)
                blocks = self._prepare(agent, met.address, met.num_blocks)
            except HandshakeFailed as error:
                raise ReadFailed(str(error), sent=False) from error
            except Exception as error:
                raise ReadFailed(f"NIXL refused {engine_id}: {error!r}", sent=False) from error
            peer = Peer(engine_id, agent, blocks, offset)
            self._peers[engine_id] = peer
            return peer

    def read(
        self,
        peer: Peer,
        local: Sequence[int],
        remote: Sequence[int],
        notification: str,
        delay_s: Callable[[], float] = lambda: 0.0,
    ) -> Read:
        """Begin to read remote blocks into local ones; at its end the peer is notified."""
        try:
            handle = self.nixl.make_prepped_xfer(
                "READ",
                self._local,
                np.asarray(local, np.int32),
                peer.blocks,
                np.asarray(remote, np.int32),
                notif_msg=notification.encode(),
            )
        except Exception as error:
            raise ReadFailed(f"cannot read these blocks: {error!r}", sent=False) from error
        read = Read(self, peer, handle, len(local) * self._block_bytes, delay_s)
        read.state()
        return read

    def notify(self, peer: Peer, notification: str) -> None:
        """Send a notification without a read. ReadFailed when the peer is gone."""
        try:
            self.nixl.send_notif(peer.agent, notif_msg=notification.encode())
        except Exception as error:
            raise ReadFailed(f"cannot notify {peer.engine_id}: {error!r}", sent=True) from error

    def forget(self, peer: Peer) -> None:
        """Meet this peer anew next time."""
        if self._peers.get(peer.engine_id) is peer:
            del self._peers[peer.engine_id]
            peer.forgotten = True
            self.dispose(peer)

    def dispose(self, peer: Peer) -> None:
        """Close the connection to a forgotten peer once no read needs it."""
        if peer.reads or not peer.forgotten or peer.engine_id in self._peers:
            return
        try:
            peer.blocks.release()
            self.nixl.remove_remote_agent(peer.agent)
        except Exception:  # noqa: BLE001, S110  it was gone already
            pass

    def notifications(self) -> list[str]:
        """Return what peers have sent, and let NIXL make progress."""
        received: dict[str, list[bytes]] = self.nixl.get_new_notifs()
        return [note.decode("utf-8", "replace") for notes in received.values() for note in notes]

    @property
    def _block_bytes(self) -> int:
        return int(self._memory.shape[1])

    def _prepare(self, agent: str, address: int, num_blocks: int) -> Any:
        descriptors = np.empty((num_blocks, 3), np.uint64)
        descriptors[:, 0] = address + np.arange(num_blocks, dtype=np.uint64) * self._block_bytes
        descriptors[:, 1] = self._block_bytes
        descriptors[:, 2] = 0
        return self.nixl.prep_xfer_dlist(agent, descriptors, "DRAM")
