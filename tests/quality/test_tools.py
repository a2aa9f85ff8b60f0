"""What `make lint` checks also holds in the tests."""

import importlib.util
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent


def run(*command: str) -> str:
    """Run a tool that must succeed."""
    done = subprocess.run(
        [str(BIN / command[0]), *command[1:]], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def protos() -> ModuleType:
    """tools/check_protos.py."""
    spec = importlib.util.spec_from_file_location("check_protos", ROOT / "tools/check_protos.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_ruff() -> None:
    run("ruff", "check", "--no-cache")  # a cached import order can be out of date


def test_format() -> None:
    run("ruff", "format", "--check")


@pytest.mark.timeout(900)
def test_types() -> None:
    run("mypy")


def test_layers() -> None:
    said = run("lint-imports")
    assert re.search(r"[1-9]\d* kept, 0 broken", said), said


def test_protos_are_clean(protos: ModuleType) -> None:
    assert protos.lint() == []


def has_history() -> bool:
    if shutil.which("git") is None:
        return False
    asked = ["git", "rev-parse", "--verify", "--quiet", "HEAD:protos"]
    return subprocess.run(asked, cwd=ROOT, capture_output=True, check=False).returncode == 0


@pytest.mark.skipif(not has_history(), reason="there is no git history here")
def test_protos_break_nobody(protos: ModuleType) -> None:
    assert protos.breaking() == []


@pytest.mark.skipif(not has_history(), reason="there is no git history here")
def test_a_break_would_be_seen(
    protos: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A field that is gone, in a copy."""
    real_run = subprocess.run
    shutil.copy(ROOT / "buf.yaml", tmp_path)
    shutil.copytree(ROOT / "protos", tmp_path / "protos")
    lease = tmp_path / "protos/kvplane/api/lease/v1/lease.proto"
    text = lease.read_text()
    assert "  int64 fencing_token = 2;\n" in text
    lease.write_text(text.replace("  int64 fencing_token = 2;\n", "", 1))

    def elsewhere(command: list[str], **options: object) -> object:
        if command[0] == str(protos.BUF):
            options["cwd"] = tmp_path
        return real_run(command, **options)

    monkeypatch.setattr(protos.subprocess, "run", elsewhere)
    assert any("fencing_token" in problem for problem in protos.against("HEAD"))


def test_stubs_are_those_of_the_protos(protos: ModuleType) -> None:
    assert protos.compare() == []


def test_settings_page_is_what_the_settings_say() -> None:
    page = run("python", "-m", "kvplane.cli", "config", "--docs")
    assert (ROOT / "docs" / "settings.md").read_text() == page, "run `make docs`"


def test_links_between_the_documents_lead_somewhere() -> None:
    broken = [
        f"{page.name}: {target}"
        for page in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
        for target in re.findall(r"\]\(([^)#\s]+)", page.read_text())
        if "://" not in target and not (page.parent / target).exists()
    ]
    assert broken == []
