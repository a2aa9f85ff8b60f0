"""What the registry counts, by tenant."""

from typing import Final

from prometheus_client import Counter

from kvplane.session.usage import Usage

# What is kept for each name is kept for ever.
MAX_TENANTS: Final = 200
_OTHER: Final = "other"

_TURNS: Final = Counter("kvplane_tenant_turns", "Turns completed.", ("tenant",))
_TOKENS: Final = Counter(
    "kvplane_tenant_tokens",
    "Tokens of completed turns, by kind: prompt, completion, and the prompts' reused and"
    " recomputed.",
    ("tenant", "kind"),
)


class _Cells:
    """One tenant's counters: `labels()` takes a lock."""

    def __init__(self, tenant: str) -> None:
        self.turns = _TURNS.labels(tenant)
        self.prompt = _TOKENS.labels(tenant, "prompt")
        self.completion = _TOKENS.labels(tenant, "completion")
        self.reused = _TOKENS.labels(tenant, "reused")
        self.recomputed = _TOKENS.labels(tenant, "recomputed")


_cells: Final[dict[str, _Cells]] = {}


def count_turn(tenant_id: str, used: Usage) -> None:
    """Count a turn that was completed. Tenants beyond the first 200 count together."""
    cells = _cells.get(tenant_id)
    if cells is None:
        name = tenant_id if len(_cells) < MAX_TENANTS else _OTHER
        cells = _cells.get(name) or _cells.setdefault(name, _Cells(name))
    cells.turns.inc(used.turns)
    cells.prompt.inc(used.prompt_tokens)
    cells.completion.inc(used.completion_tokens)
    cells.reused.inc(used.tokens_reused)
    cells.recomputed.inc(used.tokens_recomputed)
