"""What the machines have in common: calls alone, calls at once, and time that passes."""

from collections.abc import Sequence
from typing import Any, ClassVar

from hypothesis import note, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine
from properties.explain import explained
from properties.replicas import Replicas, Rows

replica_numbers = st.integers(0, 1)
# A search takes as long as it takes. The profile is known once tests are collected.
TIMEOUT_S = 0 if settings.get_current_profile_name() == "search" else 600


class StoreMachine(RuleBasedStateMachine):
    """Compares a store with its model after each call."""

    replicas: ClassVar[Replicas]

    def __init__(self) -> None:
        super().__init__()
        self.replicas.clear()
        self.model: Any = None
        self.known: Any = None

    def make(self, drawn: Any, replica: int) -> None:
        """Make one call."""
        self.make_at_once([(drawn, replica)])

    def make_at_once(self, drawn: Sequence[tuple[Any, int]]) -> None:
        """Make calls at once and find an order of them that explains everything."""
        made = [(call(self.known), replica) for call, replica in drawn]
        answers = self.replicas.together([(replica, call.on) for call, replica in made])
        told = [(call, answer) for (call, _), answer in zip(made, answers, strict=True)]
        note("\n  at once ".join(f"{call} -> {answer!r}" for call, answer in told))
        rows = self.replicas.rows()
        self.model = explained(self.model, told, rows)
        for answer in answers:
            self.known.learn(answer)
        self.learn(rows)

    def learn(self, rows: Rows) -> None:
        """Take note of what calls can be about now."""

    def pass_time(self, seconds: float) -> None:
        """Let time pass."""
        self.replicas.advance(seconds)
        self.model = self.model.at(self.replicas.now_us)
