"""The worker registry, and the decision where a turn goes."""
