"""Rules about the sources that no tool checks."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CODE = ["services", "connector"]
GENERATED = ROOT / "services/kvplane/api"
CLOCK = ROOT / "services/kvplane/kernel/clock.py"

# Whoever reads a clock or sleeps outside kernel/clock.py, and why.
ALLOWED = {
    ("connector/kvplane_vllm/scheduler.py", "time.perf_counter"): "NIXL's deadlines are on it",
    ("services/kvplane/gateway/edge.py", "loop.call_later"): "a protocol's timers are its loop's",
    ("services/kvplane/gateway/workers.py", "loop.time"): "asyncio.timeout is moved in its time",
}


def sources(*folders: str) -> Iterator[Path]:
    for folder in folders:
        for path in sorted((ROOT / folder).rglob("*.py")):
            if GENERATED not in path.parents:
                yield path


def clock_uses(path: Path) -> Iterator[str]:
    """Names of what reads a clock, sleeps or waits for a time."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module in {"time", "sched"}:
            yield from (f"time.{name.name}" for name in node.names)
        if not isinstance(node, ast.Attribute):
            continue
        base = ast.unparse(node.value)
        if base == "time":
            yield f"time.{node.attr}"
        elif base == "asyncio" and node.attr == "sleep":
            yield "asyncio.sleep"
        elif base.endswith(("datetime", "date")) and node.attr in {"now", "utcnow", "today"}:
            yield f"datetime.{node.attr}"
        elif node.attr in {"call_later", "call_at"}:
            yield f"loop.{node.attr}"
        elif node.attr == "time" and base.endswith(("loop", "loop()")):
            yield "loop.time"


def test_time_comes_from_the_clock_alone() -> None:
    found = {
        (str(path.relative_to(ROOT)), use)
        for path in sources(*CODE)
        if path != CLOCK
        for use in clock_uses(path)
    }
    assert found == ALLOWED.keys()


def test_the_search_for_clocks_finds_them(tmp_path: Path) -> None:
    everything = tmp_path / "all.py"
    everything.write_text(
        "time.time(); time.sleep(1); asyncio.sleep(1); loop.call_later(1, f)\n"
        "datetime.now(); datetime.date.today(); asyncio.get_running_loop().time()\n"
        "from time import monotonic\n"
    )
    assert set(clock_uses(everything)) == {
        "time.time", "time.sleep", "asyncio.sleep", "loop.call_later", "datetime.now",
        "datetime.today", "loop.time", "time.monotonic",
    }  # fmt: skip


REQUIREMENTS = [
    *(ROOT / "requirements").glob("*"),
    ROOT / "pyproject.toml",
    *ROOT.glob("*.lock"),
    *ROOT.glob("pip.conf"),
    *ROOT.glob("*.in"),
]
# A lock must install from whatever index its user has.
HOST = re.compile(
    r"\w+://|--(extra-)?index-url|--find-links|--trusted-host|\s@\s|git\+"
    r"|\b[\w-]+\.(org|com|io|net|dev|ai|co)\b(?!\.)",
)


@pytest.mark.parametrize("path", REQUIREMENTS, ids=lambda path: path.name)
def test_requirements_name_no_registry(path: Path) -> None:
    # A comment may say where something is explained, in a file of this repository.
    lines = [line for line in path.read_text().splitlines() if HOST.search(line)]
    assert lines == []


TEXTS = {".py", ".pyi", ".toml", ".md", ".yml", ".yaml", ".txt", ".proto", ".mako", ".jinja", ""}
FOLDERS = [
    "services", "connector", "protos", "examples", "bench", "tests", "tools", "docs",
    "requirements", ".ci", "migrations",
]  # fmt: skip
# Folders of one person's or one machine's; containers' own are everybody's.
MACHINE = re.compile(r"(?<![\w.~$}/-])/(home|root|work|Users|mnt|media)/\w")


def repository() -> Iterator[Path]:
    yield from (path for path in ROOT.iterdir() if path.is_file() and path.suffix in TEXTS)
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*")):
            # Caches are hidden folders, or __pycache__.
            inside = path.relative_to(ROOT / folder).parts
            if any(part.startswith(".") or part == "__pycache__" for part in inside):
                continue
            if path.is_file() and path.suffix in TEXTS:
                yield path


def test_no_path_of_one_machine() -> None:
    found = [
        f"{path.relative_to(ROOT)}: {line.strip()[:100]}"
        for path in repository()
        if path != Path(__file__) and path.name != ".git"
        for line in path.read_text(errors="replace").splitlines()
        if MACHINE.search(line)
    ]
    assert found == []


def test_files_stay_short_enough_to_read() -> None:
    """400 lines. A migration is written once and is as long as its tables."""
    long = {
        str(path.relative_to(ROOT)): count
        for path in sources(*CODE, "examples", "bench", "tools")
        if "versions" not in path.parts and (count := len(path.read_text().splitlines())) > 400
    }
    assert long == {}


def test_every_package_says_that_it_is_typed() -> None:
    for package in ("services/kvplane", "connector/kvplane_vllm"):
        assert (ROOT / package / "py.typed").exists()


def test_nothing_is_left_to_do() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{number}"
        for path in sources(*CODE, "examples", "bench", "tools")
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if re.search(r"\b(TODO|FIXME|XXX|HACK)\b|breakpoint\(\)|\bpdb\b", line)
    ]
    assert found == []
