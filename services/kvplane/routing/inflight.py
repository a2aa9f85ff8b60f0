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
    # Worker -> turn -> when it was sent.
    _sent: dict[str, dict[TurnKey, int]] = field(default_factory=dict)
    _targets: dict[TurnKey, tuple[str, ...]] = field(default_factory=dict)

    @property
    def loads(self) -> Mapping[str, int]:
        """Requests by worker id."""
        return self._loads

    def refresh(self, workers: Iterable[Worker]) -> None:
        """Take in new reports and forget what they include."""
        self._reported = {}
        sent: dict[str, dict[TurnKey, int]] = {}
        for worker in workers:
            ident = worker.worker_id
            self._reported[ident] = worker.load.running + worker.load.waiting
            since = {
                key: at for key, at in self._sent.get(ident, {}).items() if at > worker.last_beat_us
            }
            if since:
                sent[ident] = since
        self._sent = sent
        self._targets = {
            key: targets
            for key, targets in self._targets.items()
            if any(key in sent.get(ident, ()) for ident in targets)
        }
        self._loads = {
            ident: reported + len(sent.get(ident, ())) for ident, reported in self._reported.items()
        }

    def add(self, key: TurnKey, worker_ids: tuple[str, ...], now_us: int) -> None:
        """Count a turn at its workers. A turn that is sent again moves."""
        self.remove(key)
        self._targets[key] = worker_ids
        for ident in worker_ids:
            self._sent.setdefault(ident, {})[key] = now_us
            self._count(ident)

    def remove(self, key: TurnKey) -> None:
        """Stop counting a turn. Nothing happens when it is not counted."""
        for ident in self._targets.pop(key, ()):
            self._sent.get(ident, {}).pop(key, None)
            self._count(ident)

    def _count(self, ident: str) -> None:
        if ident in self._reported:
            self._loads[ident] = self._reported[ident] + len(self._sent.get(ident, ()))
