"""What a search may find, and what it counts."""

import json
import re
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal

Kind = Literal["internal_errors", "leaks", "half_stored"]
KINDS: Final[tuple[Kind, ...]] = ("internal_errors", "leaks", "half_stored")

# What tells of the inside: none of it is in the texts that the search makes up.
INSIDE: Final = re.compile(
    r"Traceback|[A-Z]\w+(Error|Exception)\b|File \"|\.py\b|object at 0x|<class "
    r"|(?i:sqlite|sqlalchemy|asyncpg|psycopg|aiohttp|orjson|google\.protobuf)"
)


class Finding(AssertionError):
    """Something that must never happen, with all that led to it."""

    def __init__(self, kind: Kind, what: str) -> None:
        super().__init__(f"{kind}: {what}")
        self.kind = kind


@dataclass
class Counts:
    """How much was tried, and what was found."""

    inputs: Counter[str] = field(default_factory=Counter)
    # How calls ended, to see that the search gets somewhere.
    codes: Counter[str] = field(default_factory=Counter)
    # RPCs that were answered with something else than an error.
    accepted: Counter[str] = field(default_factory=Counter)
    found: list[Finding] = field(default_factory=list)

    def report(self) -> dict[str, int]:
        """Return what `make fuzz` writes."""
        kinds = Counter(finding.kind for finding in self.found)
        return {
            "rpc_inputs": self.inputs["rpc"],
            "http_inputs": self.inputs["http"],
            **{kind: kinds[kind] for kind in KINDS},
        }

    def write(self, folder: Path) -> None:
        """Write report.json, and each finding as a text beside it."""
        folder.mkdir(parents=True, exist_ok=True)
        for old in folder.glob("finding-*.txt"):
            old.unlink()
        for number, finding in enumerate(self.found, 1):
            (folder / f"finding-{number}.txt").write_text(f"{finding}\n")
        (folder / "report.json").write_text(json.dumps(self.report(), indent=2) + "\n")
