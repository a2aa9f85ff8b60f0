"""The reference engine: vLLM's HTTP face and real NIXL reads over a toy model."""
