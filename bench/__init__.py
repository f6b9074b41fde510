"""Benchmarks for use from a checkout: thin entry points over `gemma_jax.benchmarks`."""
