"""Thin entry point over `gemma_jax.checkpoint`, for use from a checkout."""
