"""What routing counts."""

from typing import Final

from prometheus_client import Counter

from kvplane.routing.policy import Reason

DECISIONS: Final = Counter(
    "kvplane_routing_decisions", "Turns routed, by why they reuse or recompute.", ("reason",)
)
# `labels()` takes a lock.
DECIDED: Final = {reason: DECISIONS.labels(reason.name.lower()) for reason in Reason}

WORKERS_LOST: Final = Counter("kvplane_routing_workers_lost", "Workers that fell silent.")
