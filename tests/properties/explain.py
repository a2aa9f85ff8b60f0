"""Whether some order of calls, one after the other, explains what was answered and stored."""

from collections.abc import Iterable, Sequence
from itertools import permutations
from typing import Any, Protocol, Self, TypeVar

from properties.replicas import Rows


class Mismatch(Exception):
    """The model says otherwise."""


class Model(Protocol):
    """What the store should be."""

    def after(self, call: Any, answer: Any, at_once: Rows | None) -> Iterable[Self]:
        """Return the states in which a call with that answer may leave it.

        A call that passes over locked rows may do less when others run `at_once`: these
        are the rows after all of them. Raises Mismatch when it cannot be answered so.
        """
        ...

    def compare(self, rows: Rows) -> None:
        """Raise Mismatch unless this is what is stored."""
        ...


M = TypeVar("M", bound=Model)


def explained(model: M, calls: Sequence[tuple[Any, Any]], rows: Rows) -> M:
    """Return the state after calls that ran at once, given as (call, answer).

    Raises AssertionError when no order of them explains it.
    """
    reasons = []
    for order in permutations(range(len(calls))):
        try:
            return _in_order(model, [calls[i] for i in order], rows, len(calls) > 1)
        except Mismatch as reason:
            reasons.append(f"in the order {order}: {reason}")
    told = "\n".join(f"{i}: {call}\n   -> {answer}" for i, (call, answer) in enumerate(calls))
    raise AssertionError("no order explains this\n" + told + "\n" + "\n".join(reasons))


def _in_order(model: M, calls: Sequence[tuple[Any, Any]], rows: Rows, at_once: bool) -> M:
    if not calls:
        model.compare(rows)
        return model
    (call, answer), rest = calls[0], calls[1:]
    last = Mismatch("no state is possible")
    for state in model.after(call, answer, rows if at_once else None):
        try:
            return _in_order(state, rest, rows, at_once)
        except Mismatch as reason:
            last = reason
    raise last


def expect(got: Any, wanted: Any, what: str) -> None:
    """Raise Mismatch unless the two are equal, saying where they first differ."""
    if got == wanted:
        return
    if isinstance(got, dict) and isinstance(wanted, dict) and got.keys() == wanted.keys():
        for key in got:
            expect(got[key], wanted[key], f"{what}, {key}")
    if isinstance(got, list | tuple) and isinstance(wanted, list | tuple):
        for index, pair in enumerate(zip(got, wanted, strict=False)):
            expect(*pair, f"{what}[{index}]")
    raise Mismatch(f"{what}: got {got!r}, want {wanted!r}")
