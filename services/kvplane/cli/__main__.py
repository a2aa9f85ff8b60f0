"""`python -m kvplane.cli`."""

from kvplane.cli import main

main()
