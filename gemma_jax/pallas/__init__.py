"""Pallas GPU kernels, one concept a file; docs/kernels.md explains each and says how fast it is."""
