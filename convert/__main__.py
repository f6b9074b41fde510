"""`python -m convert`: the same command as `gemma-jax convert`."""

import sys

from gemma_jax.checkpoint.cli import main

if __name__ == "__main__":
    sys.exit(main(prog="python -m convert"))
