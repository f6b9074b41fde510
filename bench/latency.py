"""`python -m bench.latency`: the same as `gemma-jax bench latency`."""

import sys

from gemma_jax.cli import main

if __name__ == "__main__":
    sys.exit(main(["bench", "latency", *sys.argv[1:]]))
