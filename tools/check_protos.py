"""Lint the protos, look for breaking changes, and compare the checked-in stubs.

python tools/check_protos.py            check; the exit status says
python tools/check_protos.py --write    regenerate services/kvplane/api
"""

import filecmp
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
STUBS = ROOT / "services" / "kvplane" / "api"
BUF = Path(sys.executable).parent / "buf"


def main() -> int:
    """Return the exit status."""
    if "--write" in sys.argv[1:]:
        generate(ROOT / "services")
        return 0
    problems = lint() + breaking() + compare()
    for problem in problems:
        print(problem, file=sys.stderr)
    return 1 if problems else 0


def generate(target: Path) -> None:
    """Write the stubs of all protos under `target`/kvplane/api."""
    protos = sorted(str(p.relative_to(ROOT)) for p in (ROOT / "protos").rglob("*.proto"))
    subprocess.run(
        [
            *(sys.executable, "-m", "grpc_tools.protoc", "-Iprotos"),
            *(f"--{kind}={target}" for kind in ("python_out", "pyi_out", "grpc_python_out")),
            *protos,
        ],
        cwd=ROOT,
        check=True,
    )
    api = target / "kvplane" / "api"
    for folder in [api, *(p for p in api.rglob("*") if p.is_dir() and p.name != "__pycache__")]:
        (folder / "__init__.py").touch()


def compare() -> list[str]:
    """Return what differs between the checked-in stubs and fresh ones."""
    with tempfile.TemporaryDirectory() as temporary:
        generate(Path(temporary))
        fresh = Path(temporary) / "kvplane" / "api"
        names = {
            path.relative_to(base)
            for base in (fresh, STUBS)
            for pattern in ("*.py", "*.pyi")
            for path in base.rglob(pattern)
        }
        return [
            f"{STUBS / name}: not what the protos give; run `make protos`"
            for name in sorted(names)
            if not ((fresh / name).is_file() and (STUBS / name).is_file())
            or not filecmp.cmp(fresh / name, STUBS / name, shallow=False)
        ]


def lint() -> list[str]:
    """Return what buf's STANDARD rules find."""
    return buf("lint")


def breaking() -> list[str]:
    """Return breaking changes since the main branch, or since the last commit."""
    for reference in ("origin/main", "main", "HEAD"):
        known = ["git", "rev-parse", "--verify", "--quiet", f"{reference}:protos"]
        if subprocess.run(known, cwd=ROOT, stdout=subprocess.DEVNULL, check=False).returncode == 0:
            return against(reference)
    return []


def against(reference: str) -> list[str]:
    """Compare with a commit, from a plain copy of its files."""
    with tempfile.TemporaryDirectory() as temporary:
        archive = subprocess.run(
            ["git", "archive", reference, "buf.yaml", "protos"],
            cwd=ROOT,
            check=True,
            stdout=subprocess.PIPE,
        )
        subprocess.run(["tar", "-x", "-C", temporary], input=archive.stdout, check=True)
        return buf("breaking", "--against", temporary)


def buf(*arguments: str) -> list[str]:
    """Run buf and return its complaints."""
    result = subprocess.run(
        [str(BUF), *arguments],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    return result.stdout.splitlines() or [f"buf failed: {arguments}"] if result.returncode else []


if __name__ == "__main__":
    sys.exit(main())
