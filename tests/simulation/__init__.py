"""The product in one process on virtual time, under every fault that a seed can think of."""
