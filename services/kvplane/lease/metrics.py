"""What the lease manager counts. The process's one registry serves them."""

from collections import defaultdict
from collections.abc import Mapping
from typing import Final

from prometheus_client import Counter, Gauge

from kvplane.lease.keeping import Amount

GRANTS: Final = Counter("kvplane_lease_grants", "Answers to GrantLease.", ("result",))
RENEWALS: Final = Counter("kvplane_lease_renewals", "Renewals, item by item.", ("result",))
ENDED: Final = Counter("kvplane_lease_swept", "Rows that time has ended.", ("kind",))
STREAMS: Final = Gauge("kvplane_lease_streams", "Workers connected to this replica.")

# `labels()` takes a lock; renewals come by the ten thousand.
RENEWED: Final = RENEWALS.labels("renewed")
NOT_RENEWED: Final = RENEWALS.labels("ended")
UNKNOWN: Final = RENEWALS.labels("unknown")

FREED: Final = Counter("kvplane_lease_holds_freed", "Holds freed before their time.", ("reason",))
_TOKENS: Final = Gauge(
    "kvplane_tenant_held_tokens", "Tokens held, as this replica last saw it.", ("tenant",)
)
_BLOCKS: Final = Gauge(
    "kvplane_tenant_held_blocks", "Blocks held, as this replica last saw it.", ("tenant",)
)
_LEASES: Final = Gauge(
    "kvplane_tenant_live_leases", "Live leases, as this replica last saw it.", ("tenant",)
)
_SECONDS: Final = Counter(
    "kvplane_tenant_held_token_seconds",
    "Tokens held, times seconds; each second is counted by one replica.",
    ("tenant",),
)

# All tenants beyond these share one label.
_MAX_TENANTS: Final = 200
_OTHER: Final = "other"


class TenantMetrics:
    """What tenants hold, a bounded number of them by name: who was there first keeps it."""

    def __init__(self) -> None:
        self._named: set[str] = set()

    def show(self, held: Mapping[str, tuple[Amount, int]]) -> None:
        """Set the gauges to what is held, and to the live leases, of all tenants that have any."""
        for tenant_id in self._named - held.keys():
            for metric in (_TOKENS, _BLOCKS, _LEASES, _SECONDS):
                metric.remove(tenant_id)
        self._named &= held.keys()
        new = sorted(held.keys() - self._named - {_OTHER}, key=lambda t: (-held[t][0].tokens, t))
        self._named.update(new[: _MAX_TENANTS - len(self._named)])
        amounts: dict[str, Amount] = defaultdict(Amount)
        leases: dict[str, int] = defaultdict(int)
        for tenant_id, (amount, live) in held.items():
            amounts[self._label(tenant_id)] += amount
            leases[self._label(tenant_id)] += live
        for label in self._named | {_OTHER}:
            _TOKENS.labels(label).set(amounts[label].tokens)
            _BLOCKS.labels(label).set(amounts[label].blocks)
            _LEASES.labels(label).set(leases[label])

    def count(self, token_seconds: Mapping[str, float]) -> None:
        """Add what tenants have held."""
        for tenant_id, held in token_seconds.items():
            _SECONDS.labels(self._label(tenant_id)).inc(held)

    def _label(self, tenant_id: str) -> str:
        return tenant_id if tenant_id in self._named else _OTHER
