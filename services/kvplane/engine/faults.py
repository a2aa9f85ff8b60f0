"""Faults that a test can inject."""

from dataclasses import dataclass, fields
from typing import Any

from kvplane.kernel.errors import InvalidField


@dataclass(slots=True)
class Faults:
    """What goes wrong from now on. All zero: nothing."""

    # Seconds between the permission for a read and its start.
    read_delay_s: float = 0.0
    # Seconds that a read stays under way; only then does it touch the owner's blocks.
    slow_reads_s: float = 0.0
    # How many of the next reads fail without being sent.
    fail_reads: int = 0
    # How many of the next notifications of readers get lost.
    drop_notifications: int = 0
    # Seconds that are added to every prefill.
    prefill_delay_s: float = 0.0
    # Seconds that a decode holds its blocks for the next turn, if not what it was started with.
    hold_s: float = 0.0
    # How many of the next orders to hold longer leave the hold as it is.
    keep_holds: int = 0

    def update(self, values: dict[str, Any]) -> None:
        """Set some. InvalidField for an unknown name or a value that is no such number."""
        known = {field.name: field.type for field in fields(self)}
        for name, value in values.items():
            if name not in known:
                raise InvalidField(name, f"is not a fault; there are {', '.join(known)}")
            whole = known[name] in (int, "int")
            if isinstance(value, bool) or not isinstance(value, int if whole else int | float):
                raise InvalidField(name, "must be a whole number" if whole else "must be a number")
            if value < 0:
                raise InvalidField(name, "must not be negative")
        for name, value in values.items():
            setattr(self, name, value)

    def take(self, name: str) -> bool:
        """Use up one of a counted fault."""
        left = getattr(self, name)
        if left:
            setattr(self, name, left - 1)
        return bool(left)
