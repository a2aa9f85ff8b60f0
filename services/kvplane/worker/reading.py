"""The reads of one engine: asking for them, keeping their leases, giving them back."""

import asyncio
import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from kvplane.api.lease.v1 import lease_pb2 as lease
from kvplane.client import kv_params
from kvplane.client.api import LeaseApi
from kvplane.kernel.clock import Clock
from kvplane.kernel.digests import DIGEST_SIZE, DigestChain, digest_space
from kvplane.kernel.errors import KvplaneError
from kvplane.kernel.ids import derived
from kvplane.worker import reads
from kvplane.worker.control import Control
from kvplane.worker.cut import Owned, blocks_to_compare, cut_read
from kvplane.worker.holdings import duration, seconds
from kvplane.worker.identity import AgentConfig, WorkerIdentity
from kvplane.worker.once import UsedLeases
from kvplane.worker.reads import Answer, Outcome, Permit, Phase, Question, Read, Refused

log = logging.getLogger(__name__)

# About 70 microseconds of holding the interpreter between two pauses.
_CHUNK_BLOCKS: Final = 64
_RELEASE_TRIES: Final = 3
_BATCH_ITEMS: Final = 500
# Seconds between two renewals at least.
_MIN_RENEWAL: Final = 0.1
# What a lease has of the ttl that was asked for, when its owner's hold cuts it short.
_CUT_SHORT: Final = 0.9

_OUTCOMES: Final = {
    Outcome.CONSUMED: lease.READ_OUTCOME_CONSUMED,
    Outcome.UNUSED: lease.READ_OUTCOME_UNUSED,
}


@dataclass(slots=True)
class _Entry:
    read: Read


async def make_digests(chain: DigestChain, clock: Clock, wanted: Callable[[], bool]) -> bytes:
    """Run a chain to its end, letting the engine's thread run in between."""
    while chain.advance(_CHUNK_BLOCKS) and wanted():
        await clock.sleep(0)
    return bytes(chain.digests)


class Reading:
    """All reads of an engine, by the engine's own request ids."""

    def __init__(
        self,
        identity: WorkerIdentity,
        config: AgentConfig,
        control: Control,
        clock: Clock,
        post: Callable[..., None],
    ) -> None:
        self._identity, self._config = identity, config
        self._control, self._clock, self._post = control, clock, post
        self._lock = threading.Lock()
        self._entries: dict[str, _Entry] = {}
        self._digests: dict[str, bytes] = {}
        self._used = UsedLeases(config.read_limit_seconds)
        self._asking: set[asyncio.Task[None]] = set()
        self._releases: list[lease.LeaseRelease] = []
        self._released = asyncio.Event()
        # A permit has come whose lease ends before its time.
        self._cut_short = asyncio.Event()
        self._leases: LeaseApi | None = None  # set before anything is asked

    # -- the engine's thread ------------------------------------------------------

    def begin(self, question: Question) -> None:
        """Ask, unless it is known that nobody would answer."""
        now, reason = self._clock.monotonic(), self._control.away
        with self._lock:
            if reason is None and question.lease and not self._used.take(question.lease, now):
                reason = "another request has this lease"
            if reason is None:
                read = reads.begin(now, question.wait)
            else:
                read = reads.refused_at_once(reason)
            self._entries[question.local_id] = _Entry(read)
        if reason is None:
            self._post(self._start, question)

    def poll(self, local_id: str) -> Answer:
        """Return what is known."""
        entry = self._entries.get(local_id)
        if entry is None:
            return Refused("unknown")
        with self._lock:
            entry.read = reads.at(entry.read, self._clock.monotonic())
            return reads.answer(entry.read)

    def started(self, local_id: str) -> bool:
        """Take the permit."""
        entry = self._entries.get(local_id)
        if entry is None:
            return False
        with self._lock:
            now = self._clock.monotonic()
            entry.read = reads.started(entry.read, now, self._config.read_limit_seconds)
            return entry.read.phase is Phase.READING

    def valid(self, local_id: str) -> bool:
        """Return whether its lease lives."""
        entry = self._entries.get(local_id)
        if entry is None:
            return False
        with self._lock:
            entry.read = reads.at(entry.read, self._clock.monotonic())
            return entry.read.phase in (Phase.PERMITTED, Phase.READING)

    def finished(self, local_id: str, *, sent: bool, failed: bool) -> None:
        """Give the lease back."""
        with self._lock:
            entry = self._entries.pop(local_id, None)
            if entry is None:
                return
            read, (entry.read, outcome) = (
                entry.read,
                reads.finished(entry.read, sent=sent, failed=failed),
            )
        if outcome is not None:
            self._post(self._give_back, read.lease_id, read.fencing_token, outcome)

    def abandon(self, local_id: str) -> None:
        """The request is over; a read that was started goes on."""
        with self._lock:
            self._digests.pop(local_id, None)
            entry = self._entries.get(local_id)
            running = entry is not None and entry.read.phase in (Phase.READING, Phase.LOST)
        if not running:
            self.finished(local_id, sent=False, failed=False)

    def take_digests(self, local_id: str) -> bytes:
        """Return the prompt's digests if they were made, and forget them."""
        with self._lock:
            return self._digests.pop(local_id, b"")

    # -- the background thread ----------------------------------------------------

    def use(self, leases: LeaseApi) -> None:
        """Say where leases come from."""
        self._leases = leases

    def lose_all(self, reason: str) -> None:
        """The epoch ended, and with it all its leases."""
        with self._lock:
            for entry in self._entries.values():
                entry.read = reads.lost(entry.read, reason)

    def _start(self, question: Question) -> None:
        task = asyncio.get_running_loop().create_task(self._ask(question))
        self._asking.add(task)
        task.add_done_callback(self._asking.discard)

    def _wanted(self, local_id: str) -> bool:
        entry = self._entries.get(local_id)
        return entry is not None and entry.read.phase is Phase.PENDING

    async def _ask(self, question: Question) -> None:
        local_id = question.local_id
        sent_at = self._clock.monotonic()
        try:
            granted, owned, refusal = await self._call(question)
        except KvplaneError as error:
            if error.reason == "UNAVAILABLE":
                self._control.failed(f"the lease service does not answer: {error}")
            if error.reason == "STALE_EPOCH":
                self._control.register_again()
            self._refuse(local_id, str(error))
            return
        except Exception:
            log.exception("kvplane: asking for a read of %s failed", local_id)
            self._refuse(local_id, "an error of our own")
            return
        if granted is None or owned is None:
            self._refuse(local_id, refusal)
            return
        try:
            answer = await self._compare(question, owned)
        except Exception:
            log.exception("kvplane: comparing the tokens of %s failed", local_id)
            answer = Refused("an error of our own")
        if isinstance(answer, Permit) and self._permit(
            local_id, answer, granted, sent_at + seconds(granted.ttl)
        ):
            return
        if isinstance(answer, Refused):
            self._refuse(local_id, answer.reason)
        self._give_back(granted.lease_id, granted.fencing_token, Outcome.UNUSED)

    async def _call(
        self, question: Question
    ) -> tuple[lease.Lease | None, lease.Ownership | None, str]:
        assert self._leases is not None
        holder = self._identity.holder(self._control.epoch)
        ttl = duration(self._config.lease_ttl_seconds)
        if question.lease is not None:
            lease_id, token = question.lease
            begun = await self._leases.BeginRead(
                lease.BeginReadRequest(
                    lease_id=lease_id, fencing_token=token, holder=holder, ttl=ttl
                )
            )
            return begun.lease, begun.ownership, ""
        assert question.handle is not None
        engine_id, request_id = question.handle
        response = await self._leases.GrantLease(
            lease.GrantLeaseRequest(
                # One request asks once; a repetition by the client gets the same answer.
                request_id=derived("read", self._identity.engine_id, question.local_id),
                holder=holder,
                handle=lease.OwnedHandle(engine_id=engine_id, request_id=request_id),
                ttl=ttl,
                wait=duration(min(question.wait / 2, 1.0)),
                begin_read=True,
            )
        )
        if not response.HasField("lease"):
            return None, None, lease.RefusalReason.Name(response.refusal_reason)
        return response.lease, response.ownership, ""

    async def _compare(self, question: Question, owned: lease.Ownership) -> Answer:
        if question.tenant_id and owned.tenant_id != question.tenant_id:
            return Refused("it belongs to another tenant")
        named = (owned.params.remote_host, owned.params.remote_port)
        if any(said not in (None, own) for said, own in zip(question.address, named, strict=True)):
            return Refused("its owner says another address")
        if owned.compatibility != self._identity.compatibility:
            return Refused("it belongs to an incompatible engine")
        size = self._identity.block_size
        if owned.block_size != size:
            return Refused("it has another block size")
        blocks = blocks_to_compare(owned.num_tokens, question.count, size)
        chain = DigestChain(question.tokens, blocks * size, size, question.space)
        own = await make_digests(chain, self._clock, lambda: self._wanted(question.local_id))
        if len(own) < blocks * DIGEST_SIZE:
            return Refused("no longer wanted")
        with self._lock:
            if question.local_id in self._entries:
                self._digests[question.local_id] = own
        tokens = question.tokens
        if len(tokens) != question.count:
            tokens = tokens[: question.count]
        return cut_read(
            Owned(
                params=kv_params.to_dict(owned.params),
                num_tokens=owned.num_tokens,
                block_size=owned.block_size,
                digests=owned.digests,
                cuttable=owned.cuttable,
            ),
            tokens,
            own,
            question.space,
            question.min_tokens,
        )

    def _permit(
        self, local_id: str, permit: Permit, granted: lease.Lease, valid_until: float
    ) -> bool:
        """Hand the permit to the engine; False when it is too late."""
        permit = Permit(permit.num_tokens, permit.params, granted.lease_id)
        now = self._clock.monotonic()
        with self._lock:
            entry = self._entries.get(local_id)
            if entry is None:
                return False
            entry.read = reads.granted(entry.read, permit, granted.fencing_token, valid_until, now)
            permitted = entry.read.phase is Phase.PERMITTED
        if permitted and seconds(granted.ttl) < self._config.lease_ttl_seconds * _CUT_SHORT:
            self._cut_short.set()
        return permitted

    def _refuse(self, local_id: str, reason: str) -> None:
        log.debug("kvplane: %s is computed: %s", local_id, reason)
        with self._lock:
            entry = self._entries.get(local_id)
            if entry is not None:
                entry.read = reads.refused(entry.read, reason)

    def _give_back(self, lease_id: str, fencing_token: int, outcome: Outcome) -> None:
        if outcome is Outcome.LAPSE:
            return
        self._releases.append(
            lease.LeaseRelease(
                lease_id=lease_id, fencing_token=fencing_token, outcome=_OUTCOMES[outcome]
            )
        )
        self._released.set()

    async def keep_released(self, leases: LeaseApi) -> None:
        """Send releases, many in a call. Runs for ever."""
        tries = 0
        while True:
            await self._released.wait()
            self._released.clear()
            batch, self._releases = self._releases[:_BATCH_ITEMS], self._releases[_BATCH_ITEMS:]
            if not batch:
                continue
            self._released.set()  # for what came after
            request = lease.ReleaseLeasesRequest(
                holder=self._identity.holder(self._control.epoch), releases=batch
            )
            try:
                await leases.ReleaseLeases(request)
                tries = 0
            except KvplaneError as error:
                tries += 1
                if error.reason == "UNAVAILABLE" and tries < _RELEASE_TRIES:
                    self._releases = batch + self._releases
                    self._released.set()
                else:  # they end by themselves
                    log.warning("kvplane: %d leases were not released: %s", len(batch), error)
                    tries = 0

    async def keep_renewed(self, leases: LeaseApi) -> None:
        """Renew all live leases in one call, three times a ttl. Runs for ever.

        A lease that its owner's hold cuts short is renewed sooner: at once, so that the
        owner is asked to hold longer, and often enough to hear that it does.
        """
        while True:
            await self._until_renewal()
            live = self._live()
            for start in range(0, len(live), _BATCH_ITEMS):
                await self._renew(leases, live[start : start + _BATCH_ITEMS])

    async def _until_renewal(self) -> None:
        ttl = self._config.lease_ttl_seconds
        now = self._clock.monotonic()
        shortest = min([ttl, *(entry.read.valid_until - now for entry in self._live())])
        cut_short = asyncio.ensure_future(self._cut_short.wait())
        sleep = asyncio.ensure_future(self._clock.sleep(max(shortest / 3, _MIN_RENEWAL)))
        try:
            await asyncio.wait({cut_short, sleep}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            cut_short.cancel()
            sleep.cancel()
        self._cut_short.clear()

    async def _renew(self, leases: LeaseApi, live: list[_Entry]) -> None:
        sent_at = self._clock.monotonic()
        refs = [
            lease.LeaseRef(lease_id=entry.read.lease_id, fencing_token=entry.read.fencing_token)
            for entry in live
        ]
        request = lease.RenewLeasesRequest(
            holder=self._identity.holder(self._control.epoch),
            leases=refs,
            ttl=duration(self._config.lease_ttl_seconds),
        )
        try:
            response = await leases.RenewLeases(request)
        except KvplaneError as error:
            log.warning("kvplane: leases were not renewed: %s", error)
            if error.reason == "STALE_EPOCH":
                self._control.register_again()
            return
        with self._lock:
            for entry, result in zip(live, response.results, strict=False):
                if result.renewed:
                    entry.read = reads.renewed(entry.read, sent_at + seconds(result.ttl))
                elif not (result.draining and entry.read.phase is Phase.READING):
                    state = lease.LeaseState.Name(result.state)
                    entry.read = reads.lost(entry.read, f"the lease is {state}")

    def _live(self) -> list[_Entry]:
        now = self._clock.monotonic()
        with self._lock:
            for entry in self._entries.values():
                entry.read = reads.at(entry.read, now)
            return [
                entry
                for entry in self._entries.values()
                if entry.read.phase in (Phase.PERMITTED, Phase.READING)
            ]

    def space(self, salt: str, adapter: str) -> bytes:
        """Return the seed of this engine's digests."""
        return digest_space(self._identity.model, self._identity.revision, salt, adapter)
