"""`python -m bench.serve`: the same as `gemma-jax bench serve`."""

import sys

from gemma_jax.cli import main

if __name__ == "__main__":
    sys.exit(main(["bench", "serve", *sys.argv[1:]]))
