"""What turns have used, for the tenant's account."""

import math
from dataclasses import dataclass

from kvplane.session.domain import CompleteTurn, Session, TurnOutcome


@dataclass(frozen=True, slots=True)
class Usage:
    """What turns that were completed have used."""

    turns: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    # Of the prompts': read from a worker, and the others.
    tokens_reused: int = 0
    tokens_recomputed: int = 0

    def __add__(self, other: "Usage") -> "Usage":
        return Usage(
            self.turns + other.turns,
            self.prompt_tokens + other.prompt_tokens,
            self.completion_tokens + other.completion_tokens,
            self.tokens_reused + other.tokens_reused,
            self.tokens_recomputed + other.tokens_recomputed,
        )


@dataclass(frozen=True, slots=True)
class Completed:
    """The answer to CompleteTurn."""

    # None: the turn has none.
    session: Session | None
    # None: the turn had been completed before.
    used: Usage | None


def usage_of(report: CompleteTurn) -> Usage:
    """Return what a completed turn has used."""
    return Usage(
        turns=1,
        prompt_tokens=report.prompt_tokens,
        completion_tokens=report.completion_tokens,
        tokens_reused=report.tokens_reused,
        tokens_recomputed=report.prompt_tokens - report.tokens_reused,
    )


def correction(charged_tokens: int | None, report: CompleteTurn, drained: float) -> int:
    """Return how many tokens the turn used beyond what it was charged with when it began.

    Negative for fewer, but only a turn that ended well and says what it used is given
    back the rest: leaving early must not be cheaper than staying. Nor is what has `drained`
    from the tenant's bucket since: turns kept open would save it up for a burst.
    """
    if charged_tokens is None:
        return 0
    beyond = report.prompt_tokens + report.completion_tokens - charged_tokens
    known = report.outcome is TurnOutcome.OK and beyond > -charged_tokens
    left = max(0, charged_tokens - math.ceil(drained)) if known else 0
    return max(beyond, -left)
