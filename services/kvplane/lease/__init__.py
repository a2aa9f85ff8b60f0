"""The block-lease manager: who holds which KV blocks, and who may read them."""
