"""`python -m bench.load`: the same as `gemma-jax bench load`."""

import sys

from gemma_jax.cli import main

if __name__ == "__main__":
    sys.exit(main(["bench", "load", *sys.argv[1:]]))
