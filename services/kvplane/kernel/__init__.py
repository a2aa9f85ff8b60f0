"""What everything may import: clock, errors, ids, digests. Standard library only."""
