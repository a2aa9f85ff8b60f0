"""The demo: a multi-turn conversation through kvplane, with and without KV reuse."""
