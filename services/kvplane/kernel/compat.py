"""What two workers must share before one may read the other's KV."""

import json


def compatibility_key(
    *,
    model: str,
    revision: str,
    block_size: int,
    kv_layout: str,
    kv_dtype: str,
    engine_version: str,
) -> str:
    """Return one canonical string; equal strings mean readable KV."""
    return json.dumps(
        {
            "model": model,
            "revision": revision,
            "block_size": block_size,
            "kv_layout": kv_layout,
            "kv_dtype": kv_dtype,
            "engine_version": engine_version,
        },
        sort_keys=True,
        separators=(",", ":"),
    )
