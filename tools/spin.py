"""Install what `make model` needs and does not have: spin, and gcc for what it generates.

    python3 tools/spin.py

Uses apt-get, as root; else it says what to install.
"""

import os
import shutil
import subprocess
import sys


def main() -> int:
    """Return the exit status."""
    missing = [name for name in ("spin", "gcc") if shutil.which(name) is None]
    if not missing:
        return 0
    install = ["apt-get", "install", "-y", "-q", "--no-install-recommends", *missing]
    if shutil.which("apt-get") is None or os.geteuid() != 0:
        print(
            f"The protocol's model needs {' and '.join(missing)}. On Debian and Ubuntu, as root:\n"
            f"    apt-get install {' '.join(missing)}",
            file=sys.stderr,
        )
        return 1
    print(f"Installing {' and '.join(missing)} with apt-get", flush=True)
    if _quietly(install) == 0:
        return 0
    _quietly(["apt-get", "update", "-q"])
    done = subprocess.run(install, capture_output=True, text=True, check=False)
    if done.returncode:
        print(f"{' '.join(install)} failed:\n{done.stdout}{done.stderr}", file=sys.stderr)
    return done.returncode


def _quietly(command: list[str]) -> int:
    return subprocess.run(command, capture_output=True, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
