"""The texts that the demo's agent reads. They also train its tokenizer."""

from pathlib import Path

FOLDER = Path(__file__).resolve().parent / "texts"
NAMES = ("runbook.md", "incident.md", "design.md", "review.md", "followup.md")


def read(name: str) -> str:
    """Return one text."""
    return (FOLDER / name).read_text(encoding="utf-8")
