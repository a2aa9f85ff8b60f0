"""How many streams one caller may have open at once."""

from collections import Counter
from typing import Final

from kvplane.kernel.context import Caller, Role
from kvplane.kernel.errors import QuotaExceeded

# Each watch asks the database every second.
MAX_OF_TENANT: Final = 100
# Of a worker with all its ranks; of all together who show no credential (health, reflection).
MAX_OF_OTHERS: Final = 1_000

# Who shows no credential.
NOBODY: Final = "nobody"


class Places:
    """Counts the streams of each caller that are open at this process."""

    def __init__(self) -> None:
        self._taken: Counter[str] = Counter()

    def take(self, whose: str) -> str:
        """Take a place, to be given back, and return `whose` it is. Raises QuotaExceeded."""
        most = MAX_OF_TENANT if whose.startswith("tenant ") else MAX_OF_OTHERS
        if whose and self._taken[whose] >= most:
            raise QuotaExceeded(
                f"{most} streams are open already: close some",
                metadata={"quota": "streams"},
                retry_after=1.0,
            )
        self._taken[whose] += 1
        return whose

    def give_back(self, whose: str) -> None:
        """Give a place back that was taken."""
        self._taken[whose] -= 1
        if not self._taken[whose]:
            del self._taken[whose]


def owner(caller: Caller) -> str:
    """Return whose place a caller's stream takes; "" for those who may have any number."""
    if Role.TENANT in caller.roles and Role.SERVICE not in caller.roles:
        return f"tenant {caller.tenant_id}"
    if Role.WORKER in caller.roles and Role.SERVICE not in caller.roles:
        return f"worker {caller.worker_id}"
    return ""
