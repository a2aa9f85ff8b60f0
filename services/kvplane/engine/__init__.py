"""The reference engine: vLLM's reuse semantics and real NIXL reads over a toy model.

Read `core` first (a request's life), then `matching` (what vLLM decides from
kv_transfer_params), `pool` (blocks and pins), `transfer` (reads), `model` (why a wrong
block always shows) and `http` (the face).
"""
