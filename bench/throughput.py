"""`python -m bench.throughput`: the same as `gemma-jax bench throughput`."""

import sys

from gemma_jax.cli import main

if __name__ == "__main__":
    sys.exit(main(["bench", "throughput", *sys.argv[1:]]))
