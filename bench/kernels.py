"""`python -m bench.kernels`: the kernels alone, at the shapes of published models, against XLA."""

import sys

from gemma_jax.benchmarks.kernels import main

if __name__ == "__main__":
    sys.exit(main())
