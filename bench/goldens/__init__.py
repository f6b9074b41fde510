"""Scripts that record what transformers computes; only they need the `parity` extra."""
