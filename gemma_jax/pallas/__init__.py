"""Pallas GPU kernels, one concept a file. None yet: `kernels="auto"` is plain jax.numpy."""
