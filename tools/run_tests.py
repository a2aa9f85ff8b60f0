"""Run the tests: two folders at a time, then those on real vLLM, which need the whole machine.

    python tools/run_tests.py [--fast] [pytest's options...]

--fast leaves the tests on real vLLM out. The exit status is pytest's.
"""

import subprocess
import sys

NO_TESTS = 5  # pytest's status when it selected none


def main() -> int:
    """Return the exit status."""
    options = sys.argv[1:]
    fast = "--fast" in options
    options = [option for option in options if option != "--fast"]
    runs = [["-m", "not vllm", "-n", "2", "--no-loadscope-reorder"]]
    if not fast:
        runs.append(["-m", "vllm"])
    statuses = [
        subprocess.run([sys.executable, "-m", "pytest", *run, *options], check=False).returncode
        for run in runs
    ]
    if all(status == NO_TESTS for status in statuses):
        return NO_TESTS
    return next((status for status in statuses if status not in (0, NO_TESTS)), 0)


if __name__ == "__main__":
    sys.exit(main())
