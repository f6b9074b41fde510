"""Benchmarks behind `gemma-jax bench`: latency, throughput, loading; one JSON row a measurement."""
