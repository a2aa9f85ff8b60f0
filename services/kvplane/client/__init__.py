"""Typed async clients of the services: the same interface over the wire or in one process."""
