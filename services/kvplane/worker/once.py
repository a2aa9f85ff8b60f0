"""One lease, one request."""

from typing import Final

# How long a lease that nobody renews may live, and messages about it be under way.
_AFTERWARDS: Final = 600.0


class UsedLeases:
    """The leases that requests of this engine have taken up.

    A client that repeats itself can bring the same lease to the engine twice. The lease
    service sees one holder; here one of the two would give back what the other reads.
    """

    def __init__(self, longest_read: float) -> None:
        """`longest_read` is in seconds."""
        self._kept = longest_read + _AFTERWARDS
        self._since: dict[tuple[str, int], float] = {}  # oldest first

    def take(self, lease: tuple[str, int], now: float) -> bool:
        """Return whether the lease (id, fencing token) was free, and take it."""
        while self._since:
            oldest = next(iter(self._since))
            if now - self._since[oldest] < self._kept:
                break
            del self._since[oldest]
        if lease in self._since:
            return False
        self._since[lease] = now
        return True
