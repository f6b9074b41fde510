"""`python -m gemma_jax.cli` is `gemma-jax`."""

import sys

from gemma_jax.cli import main

sys.exit(main())
