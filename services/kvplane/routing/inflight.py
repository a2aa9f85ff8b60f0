"""How busy the workers are: what they said, and what was sent to them since."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from kvplane.routing.domain import Worker

# Tenant, session, turn. Without a session: tenant, request id, 0.
TurnKey = tuple[str, str, int]


@dataclass(slots=True)
class InFlight:
    """Requests of every known worker: reported, and sent since that report.

    One router's view. A request that has been sent counts until its worker's next beat,
    which includes it, or until it is complete.
    """

    _loads: dict[str, int] = field(default_factory=dict)
    _reported: dict[str, int] = field(default_factory=dict)
    # Worker -> turn -> when it was sent, oldest first.
    _sent: dict[str, dict[TurnKey, int]] = field(default_factory=dict)
    # Where a turn still counts.
    _targets: dict[TurnKey, set[str]] = field(default_factory=dict)

    @property
    def loads(self) -> Mapping[str, int]:
        """Requests by worker id."""
        return self._loads

    def refresh(self, workers: Iterable[Worker]) -> None:
        """Take in new reports and forget what they include."""
        reported: dict[str, int] = {}
        for worker in workers:
            ident = worker.worker_id
            reported[ident] = worker.load.running + worker.load.waiting
            sent = self._sent.get(ident)
            while sent:
                key = next(iter(sent))
                if sent[key] > worker.last_beat_us:
                    break
                self._forget(key, ident)
        for ident in self._sent.keys() - reported.keys():
            for key in list(self._sent[ident]):
                self._forget(key, ident)
            del self._sent[ident]
        self._reported = reported
        self._loads = {
            ident: number + len(self._sent.get(ident, ())) for ident, number in reported.items()
        }

    def add(self, key: TurnKey, worker_ids: Iterable[str], now_us: int) -> None:
        """Count a turn at its workers. A turn that is sent again moves."""
        self.remove(key)
        self._targets[key] = set(worker_ids)
        for ident in self._targets[key]:
            self._sent.setdefault(ident, {})[key] = now_us
            self._count(ident)

    def remove(self, key: TurnKey) -> None:
        """Stop counting a turn. Nothing happens when it is not counted."""
        for ident in self._targets.pop(key, ()):
            self._sent[ident].pop(key, None)
            self._count(ident)

    def _forget(self, key: TurnKey, ident: str) -> None:
        del self._sent[ident][key]
        targets = self._targets[key]
        targets.discard(ident)
        if not targets:
            del self._targets[key]

    def _count(self, ident: str) -> None:
        if ident in self._reported:
            self._loads[ident] = self._reported[ident] + len(self._sent[ident])
