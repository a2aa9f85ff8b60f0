"""The OpenAI-compatible gateway: the reference client of kvplane."""
