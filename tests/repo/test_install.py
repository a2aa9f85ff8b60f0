"""tools/install.py: what it runs, what it repeats, what it says when it fails."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script, on a copy of what it reads, with pip replaced by a recorder."""
    spec = importlib.util.spec_from_file_location("install", ROOT / "tools" / "install.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    (tmp_path / "requirements").mkdir()
    for path in (ROOT / "requirements").glob("*.txt"):
        (tmp_path / "requirements" / path.name).write_text(path.read_text())
    (tmp_path / "pyproject.toml").write_text((ROOT / "pyproject.toml").read_text())
    monkeypatch.setattr(module, "ROOT", tmp_path)
    monkeypatch.setattr(module, "REQUIREMENTS", tmp_path / "requirements")
    monkeypatch.setattr(module, "works", lambda python: True)
    monkeypatch.setattr(module, "status", 0, raising=False)
    monkeypatch.setattr(module, "commands", [], raising=False)

    def run(what: str, command: list[str], log: object) -> int:
        (tmp_path / "venv").mkdir(exist_ok=True)
        module.commands.append(command)
        return module.status

    monkeypatch.setattr(module, "run", run)
    return module


def test_a_second_call_does_nothing(install: ModuleType, tmp_path: Path) -> None:
    install.install("full", tmp_path / "venv")
    first = len(install.commands)
    install.install("full", tmp_path / "venv")
    assert first == 3
    assert len(install.commands) == first


def test_a_changed_requirement_installs_again(install: ModuleType, tmp_path: Path) -> None:
    install.install("full", tmp_path / "venv")
    constraints = tmp_path / "requirements" / "constraints.txt"
    constraints.write_text(constraints.read_text() + "six==1.17.0\n")
    install.install("full", tmp_path / "venv")
    assert len(install.commands) == 6


def test_a_changed_lint_rule_installs_nothing(install: ModuleType, tmp_path: Path) -> None:
    install.install("full", tmp_path / "venv")
    with (tmp_path / "pyproject.toml").open("a") as project:
        project.write("\n[tool.other]\nx = 1\n")
    install.install("full", tmp_path / "venv")
    assert len(install.commands) == 3


def test_torch_index_goes_to_torch_alone(
    install: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_INDEX", "file:///somewhere")
    install.install("full", tmp_path / "venv")
    with_index = [c for c in install.commands if "file:///somewhere" in c]
    assert len(with_index) == 1
    assert "requirements/torch-cpu.txt" in with_index[0]


def test_a_failed_step_is_explained_and_tried_again(install: ModuleType, tmp_path: Path) -> None:
    install.status = 1
    with pytest.raises(install.Failed, match="TORCH_INDEX"):
        install.install("full", tmp_path / "venv")
    install.status = 0
    install.install("full", tmp_path / "venv")
    assert len(install.commands) == 4


def test_an_old_python_gets_a_sentence(
    install: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "version_info", (3, 9, 2))
    with pytest.raises(install.Failed, match=r"3\.11 or newer is needed and .* is 3\.9"):
        install.install("full", tmp_path / "venv")


def test_requirements_name_no_index() -> None:
    for path in (ROOT / "requirements").glob("*.txt"):
        assert "://" not in path.read_text(), path.name
