"""What an engine is told at its start."""

from dataclasses import dataclass

ENGINE_VERSION = "kvplane-reference-1"
KV_LAYOUT = "token-chain"
KV_DTYPE = "uint8x32"


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Settings of one engine; the command line's help explains each."""

    model: str = "toy"
    revision: str = "1"
    role: str = "both"
    host: str = "127.0.0.1"
    port: int = 0
    kv_host: str = "127.0.0.1"
    kv_port: int = 0
    block_size: int = 32
    num_blocks: int = 4096
    max_model_len: int = 65536
    default_max_tokens: int = 64
    prefill_us_per_token: float = 20.0
    decode_us_per_token: float = 500.0
    prefix_caching: bool = False
    bidirectional: bool = True
    kv_lease_duration_s: float = 30.0
    decoder_kv_blocks_ttl_s: float = 480.0
    kv_recompute_threshold: int = 64
    recompute_on_load_failure: bool = False
    stream_kv_params: bool = False
    debug: bool = False
