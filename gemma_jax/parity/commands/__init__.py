"""The sub-commands of `gemma-jax parity`, one module each, imported when it runs."""
