"""The demo's results: a table, a plot, report.json."""

import json
from collections.abc import Sequence
from pathlib import Path

from demo.play import Turn

_COLUMNS = (
    ("turn", 4),
    ("prompt", 7),
    ("reused", 7),
    ("computed", 9),
    ("lease", 17),
    ("first token", 12),
    ("without", 9),
    ("speed-up", 9),
    ("tokens", 7),
)


def header() -> str:
    """Return the table's first lines."""
    names = "".join(name.rjust(width) for name, width in _COLUMNS)
    return f"{names}\n{'-' * len(names)}"


def row(turn: Turn) -> str:
    """Return one line of the table."""
    lease = "-" if turn.lease_id is None else turn.lease_id[:14] + ".."
    cells = (
        str(turn.turn),
        str(turn.prompt_tokens),
        str(turn.reused_tokens),
        str(turn.recomputed_tokens),
        lease,
        f"{turn.ttft_ms:.0f} ms",
        f"{turn.baseline_ttft_ms:.0f} ms",
        f"{turn.speedup:.2f}",
        "equal" if turn.tokens_equal else "DIFFER",
    )
    widths = (width for _, width in _COLUMNS)
    return "".join(cell.rjust(width) for cell, width in zip(cells, widths, strict=True))


def write(turns: Sequence[Turn], path: Path) -> None:
    """Write report.json."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"turns": [turn.as_json() for turn in turns]}, indent=2) + "\n")


def plot(turns: Sequence[Turn], engine: str, path: Path) -> None:
    """Draw times to the first token, and what was reused of each prompt."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    numbers = [turn.turn for turn in turns]
    figure, (times, tokens) = pyplot.subplots(1, 2, figsize=(11, 4.2))
    without = [turn.baseline_ttft_ms for turn in turns]
    with_reuse = [turn.ttft_ms for turn in turns]
    times.bar([n - 0.2 for n in numbers], without, 0.4, label="without reuse", color="#b8b8b8")
    times.bar([n + 0.2 for n in numbers], with_reuse, 0.4, label="with reuse", color="#1f77b4")
    for turn in turns:
        label = f"{turn.speedup:.1f}x"
        times.text(turn.turn + 0.2, turn.ttft_ms, label, ha="center", va="bottom", fontsize=9)
    times.set(xlabel="turn", ylabel="ms", title="Time to the first token", xticks=numbers)
    times.legend()
    reused = [turn.reused_tokens for turn in turns]
    computed = [turn.recomputed_tokens for turn in turns]
    tokens.bar(numbers, reused, 0.6, label="read from the decode", color="#1f77b4")
    tokens.bar(numbers, computed, 0.6, bottom=reused, label="computed", color="#b8b8b8")
    tokens.set(xlabel="turn", title="Prompt tokens", xticks=numbers)
    tokens.legend()
    figure.suptitle(f"Five turns of an agent, {engine}")
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def verdict(turns: Sequence[Turn]) -> str | None:
    """Return what is wrong, None when all is well."""
    different = [str(turn.turn) for turn in turns if not turn.tokens_equal]
    if different:
        return f"tokens differ in turn {', '.join(different)}"
    if not any(turn.reused_tokens for turn in turns):
        return "no turn reused anything"
    return None
