"""Prometheus metrics of the gRPC side: how many calls, how they ended, how long they took."""

from typing import Final

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram

_BUCKETS: Final = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)


class RpcMetrics:
    """Counters and histograms by method (``LeaseService/GrantLease``) and code."""

    def __init__(self, registry: CollectorRegistry = REGISTRY) -> None:
        """Register the metrics; one instance a registry."""
        self._calls = Counter(
            "kvplane_rpc_calls", "Calls answered.", ("method", "code"), registry=registry
        )
        self._seconds = Histogram(
            "kvplane_rpc_seconds",
            "Time to answer a unary call; streams are not in it.",
            ("method",),
            buckets=_BUCKETS,
            registry=registry,
        )
        self._open = Gauge("kvplane_rpc_open", "Calls under way.", ("method",), registry=registry)
        # `labels()` takes a lock and builds a key; these are looked up for each call.
        self._call_cells: dict[tuple[str, str], Counter] = {}

    def method(self, name: str, *, streaming: bool) -> "MethodMetrics":
        """Return the cells of one method."""
        return MethodMetrics(
            self, name, self._open.labels(name), None if streaming else self._seconds.labels(name)
        )

    def count(self, name: str, code: str) -> None:
        """Count one answered call."""
        cell = self._call_cells.get((name, code))
        if cell is None:
            cell = self._call_cells[name, code] = self._calls.labels(name, code)
        cell.inc()


class MethodMetrics:
    """What is recorded about the calls of one method."""

    def __init__(
        self, owner: RpcMetrics, name: str, open_calls: Gauge, seconds: Histogram | None
    ) -> None:
        self._owner = owner
        self._name = name
        self._open = open_calls
        self._seconds = seconds

    def begin(self) -> None:
        """Note that a call has come in."""
        self._open.inc()

    def end(self, code: str, seconds: float) -> None:
        """Note how it ended and how long it took."""
        self._open.dec()
        self._owner.count(self._name, code)
        if self._seconds is not None:
            self._seconds.observe(seconds)
