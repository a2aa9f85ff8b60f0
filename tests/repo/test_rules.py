"""The rules that `make lint` checks also hold in the tests."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent


def run(*command: str) -> None:
    done = subprocess.run(
        [str(BIN / command[0]), *command[1:]], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("command", ["ruff check", "ruff format --check", "lint-imports"])
def test_style_and_layers(command: str) -> None:
    run(*command.split())


@pytest.mark.timeout(600)
def test_types() -> None:
    run("mypy")


def test_protos_lint_do_not_break_and_give_the_checked_in_stubs() -> None:
    run("python", "tools/check_protos.py")


def test_settings_page_is_what_the_settings_say() -> None:
    page = subprocess.run(
        [sys.executable, "-m", "kvplane.cli", "config", "--docs"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert (ROOT / "docs" / "settings.md").read_text() == page, "run `make docs`"


def test_links_between_the_documents_lead_somewhere() -> None:
    import re

    broken = [
        f"{page.name}: {target}"
        for page in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
        for target in re.findall(r"\]\(([^)#\s]+)", page.read_text())
        if "://" not in target and not (page.parent / target).exists()
    ]
    assert broken == []
