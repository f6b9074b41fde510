"""For tests and benchmarks: tiny configs, seeded random weights and checkpoints, tolerances."""
