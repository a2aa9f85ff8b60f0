"""tools/spin.py: what it installs, and what it says where it cannot."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# Installs by putting the packages' names into its own directory, or fails.
APT_GET = """#!/bin/sh
echo "$*" >> "$0.log"
case "$1 $APT_WORKS" in
  "install yes")
    cd "${0%/*}"
    for name; do
      case $name in spin|gcc) : > $name; /bin/chmod +x $name;; esac
    done;;
  "install "*) echo no such package; exit 100;;
esac
"""


@pytest.fixture
def programs(tmp_path: Path) -> Path:
    """A directory that is all of PATH, with an apt-get."""
    (tmp_path / "apt-get").write_text(APT_GET)
    (tmp_path / "apt-get").chmod(0o755)
    return tmp_path


def run(programs: Path, *, works: bool = True, user: int = 0) -> subprocess.CompletedProcess[str]:
    # As that user, without the need to be root.
    code = "import os, runpy, sys; os.geteuid = lambda: int(sys.argv[2]); "
    code += "runpy.run_path(sys.argv[1], run_name='__main__')"
    command = [sys.executable, "-c", code, str(ROOT / "tools" / "spin.py"), str(user)]
    environment = {"PATH": str(programs), "APT_WORKS": "yes" if works else ""}
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def asked(programs: Path) -> list[str]:
    log = programs / "apt-get.log"
    return [line.split()[0] for line in log.read_text().splitlines()] if log.exists() else []


def test_root_gets_what_is_missing_once(programs: Path) -> None:
    assert run(programs).returncode == 0
    assert os.access(programs / "spin", os.X_OK)
    assert os.access(programs / "gcc", os.X_OK)
    assert run(programs).returncode == 0
    assert asked(programs) == ["install"]


def test_an_unknown_package_is_looked_up_and_a_failure_is_shown(programs: Path) -> None:
    done = run(programs, works=False)
    assert done.returncode != 0
    assert "no such package" in done.stderr
    assert asked(programs) == ["install", "update", "install"]


def test_another_user_is_told_what_to_install(programs: Path) -> None:
    done = run(programs, user=1000)
    assert done.returncode == 1
    assert "apt-get install spin gcc" in done.stderr
    assert asked(programs) == []


def test_without_apt_get_root_is_told_too(programs: Path) -> None:
    (programs / "apt-get").unlink()
    done = run(programs)
    assert done.returncode == 1
    assert "spin and gcc" in done.stderr
