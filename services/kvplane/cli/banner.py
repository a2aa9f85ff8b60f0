"""What `kvplane dev` says when it is up: what listens where, and what to do next."""

import json

from kvplane.cli.remote import DEFAULT_SERVER


def dev_banner(grpc: str, status: str, gateway: str, database: str) -> str:
    """Return the text; all but `database` are ``host:port``."""

    def vllm(role: str, port: int) -> str:
        transfer = {
            "kv_connector": "NixlConnector",
            "kv_connector_module_path": "kvplane_vllm.connector",
            "kv_role": role,
            "kv_connector_extra_config": {
                "bidirectional_kv_xfer": True,
                "kvplane": {"control_plane": grpc, "url": f"http://127.0.0.1:{port}"},
            },
        }
        return (
            f"  VLLM_NIXL_SIDE_CHANNEL_PORT={port - 2500} vllm serve MODEL --port {port} \\\n"
            f"    --kv-transfer-config '{json.dumps(transfer)}'"
        )

    server = "" if grpc == DEFAULT_SERVER else f" --server {grpc}"
    width = max(len(grpc), len(status) + 7, len(gateway) + 10)
    chat = {"model": "MODEL", "messages": [{"role": "user", "content": "Hello"}]}
    return f"""
kvplane dev, on {database}

  gateway   {f"http://{gateway}/v1":{width}}   OpenAI-compatible
  gRPC      {grpc:{width}}   sessions, leases, routing, workers, tenants
  status    {f"http://{status}":{width}}   /metrics /healthz /readyz

Start a prefill and a decode worker:
{vllm("kv_producer", 8100)}
{vllm("kv_consumer", 8200)}

Talk, twice, and see the second turn read its KV back:
  curl http://{gateway}/v1/chat/completions -H 'content-type: application/json' \\
    -H 'x-session-id: one' -d '{json.dumps(chat)}'
  kvplane workers list{server}
  kvplane sessions list{server}

Ctrl-C ends it.
"""
