"""Faults put into a worker's agent on purpose. See `planted`."""

from contextlib import AbstractContextManager
from typing import Any
from unittest.mock import patch
from weakref import WeakKeyDictionary

from kvplane.worker import cut, reads
from kvplane.worker.holdings import Holdings, HoldLonger, seconds
from kvplane.worker.once import UsedLeases
from kvplane.worker.reading import Reading

from simulation.planting import all_of, everywhere


def digests_not_compared() -> AbstractContextManager[Any]:
    """The same number of tokens counts as the same tokens."""

    def matching(held: Any, held_tokens: int, own: Any, tokens: Any, size: int, _: Any) -> int:
        if held_tokens <= len(tokens):
            return held_tokens
        return len(tokens) // size * size

    return everywhere(cut.matching_tokens, matching)


def ids_not_cut() -> AbstractContextManager[Any]:
    """The count is cut to what matches, the list of blocks is not: they align from the end."""
    old = cut.cut_params

    def whole(params: Any, num_tokens: int, size: int, *, cuttable: bool) -> Any:
        answer = old(params, num_tokens, size, cuttable=cuttable)
        if answer is not None:
            answer["remote_block_ids"] = [list(group) for group in params["remote_block_ids"]]
        return answer

    return everywhere(old, whole)


def ttl_from_the_answer() -> AbstractContextManager[Any]:
    """The holder counts its lease from when the answer came."""
    old = Reading._permit

    def permit(self: Any, local_id: str, permit: Any, granted: Any, _: float) -> bool:
        until = self._clock.monotonic() + seconds(granted.ttl)
        return old(self, local_id, permit, granted, until)

    return patch.object(Reading, "_permit", permit)


def unused_after_sent() -> AbstractContextManager[Any]:
    """A reader that has read says that it has not."""
    old = reads.finished

    def finished(read: Any, *, sent: bool, failed: bool = False) -> Any:
        done, outcome = old(read, sent=sent, failed=failed)
        return done, reads.Outcome.UNUSED if outcome is not None else None

    return everywhere(old, finished)


def longer_acked_before_done() -> AbstractContextManager[Any]:
    """The agent acknowledges an order to hold longer before the engine has carried it out."""
    old = Holdings.command

    def command(self: Any, message: Any) -> Any:
        answered = old(self, message)
        if answered is None and message.WhichOneof("order") == "hold_longer":
            known = self._commands[message.command_id]
            order = HoldLonger(message.handle.request_id, 0.0, message.command_id)
            left = known.until - self._clock.monotonic() + self._config.hold_margin_seconds
            return self.answered(order, True, left)
        return answered

    return patch.object(Holdings, "command", command)


def late_read_used() -> AbstractContextManager[Any]:
    """A reader uses what came after its lease had ended."""

    def at(read: Any, now: float) -> Any:
        if read.phase is reads.Phase.READING:
            return read
        return old(read, now)

    old = reads.at
    return all_of(everywhere(old, at), everywhere(reads.lost, lambda read, reason: read))


def hold_without_margin() -> AbstractContextManager[Any]:
    """An owner reports a second more than it holds."""
    old = Holdings.reports

    def reports(self: Any, epoch: int, *, again: bool) -> Any:
        messages = old(self, epoch, again=again)
        for message in messages:
            message.hold.seconds += 2
        return messages

    return patch.object(Holdings, "reports", reports)


def lease_used_twice() -> AbstractContextManager[Any]:
    """Two requests of one worker use the same lease."""
    return patch.object(UsedLeases, "take", lambda self, lease, now: True)


def lease_used_again() -> AbstractContextManager[Any]:
    """A lease is free again for another request when the one that had it is over."""
    begin, finished = Reading.begin, Reading.finished
    taken: WeakKeyDictionary[Reading, dict[str, tuple[str, int]]] = WeakKeyDictionary()

    def begins(self: Any, question: Any) -> None:
        begin(self, question)
        if question.lease:
            taken.setdefault(self, {})[question.local_id] = question.lease

    def finishes(self: Any, local_id: str, **how: Any) -> None:
        finished(self, local_id, **how)
        lease = taken.get(self, {}).pop(local_id, None)
        if lease is not None:
            self._used._since.pop(lease, None)

    return all_of(
        patch.object(Reading, "begin", begins), patch.object(Reading, "finished", finishes)
    )
