"""What those are told who only look, by the model."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from properties import lease_calls as calls
from properties.explain import expect
from properties.lease_ending import Ending


@dataclass(frozen=True)
class Lookups(Ending):
    """Changes nothing."""

    def lookups(self, call: calls.Lookups, answer: Any) -> None:
        own, lease, owns, leases, views = answer
        wanted = self.owns.get(call.ownership_id)
        mine = wanted if wanted and wanted.tenant_id == call.tenant else None
        expect(own and own[0], mine, "ownership")
        known = self.leases.get(call.lease_id)
        expect(lease and lease[0], known if known and known.tenant_id == call.tenant else None, "")
        expect(
            owns,
            _newest_first(
                (o.reported_us, o.ownership_id, o)
                for o in self.owns.values()
                if o.tenant_id == call.tenant
                and call.session in {"", o.session_id}
                and o.state in call.states
            ),
            "ownerships",
        )
        expect(
            leases,
            _newest_first(
                (one.granted_us, one.lease_id, one)
                for one in self.leases.values()
                if one.tenant_id == call.tenant and call.worker in {"", one.holder_worker_id}
            ),
            "leases",
        )
        expect(
            {worker: (view.epoch, view.stream_id) for worker, view in views.items()},
            {w: known for w, known in self.workers.items() if w in calls.WORKERS},
            "watched",
        )
        for worker, view in views.items():
            open_orders = [
                key[0]
                for key, order in self.commands.items()
                if order.worker_id == worker
                and key[1] == view.epoch
                and not 0 < order.hold_until_us <= self.now_us
            ]
            told = [command.handle.ownership_id for command in view.commands]
            expect(sorted(told), sorted(open_orders), "commands")


def _newest_first(found: Iterable[tuple[int, str, Any]]) -> list[Any]:
    return [item for *_, item in sorted(found, key=lambda one: one[:2], reverse=True)]
