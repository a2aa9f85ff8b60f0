"""kvplane: a control plane for KV-cache reuse in prefill/decode serving."""
