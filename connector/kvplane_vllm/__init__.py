"""The vLLM connector plug-in. Importing this package does not import vLLM."""
