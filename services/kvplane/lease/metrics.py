"""What the lease manager counts. The process's one registry serves them."""

from typing import Final

from prometheus_client import Counter, Gauge

GRANTS: Final = Counter("kvplane_lease_grants", "Answers to GrantLease.", ("result",))
RENEWALS: Final = Counter("kvplane_lease_renewals", "Renewals, item by item.", ("result",))
ENDED: Final = Counter("kvplane_lease_swept", "Rows that time has ended.", ("kind",))
STREAMS: Final = Gauge("kvplane_lease_streams", "Workers connected to this replica.")

# `labels()` takes a lock; renewals come by the ten thousand.
RENEWED: Final = RENEWALS.labels("renewed")
NOT_RENEWED: Final = RENEWALS.labels("ended")
UNKNOWN: Final = RENEWALS.labels("unknown")
