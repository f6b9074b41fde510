"""Device time of one kernel call, with host dispatch and the L2 cache kept out of the figure.

A jitted program calls the kernel `CALLS` times in a row on rotating sets of inputs, each call
ordered after the one before; XLA runs such a program as one CUDA graph. What remains besides the
kernel is the gap between two nodes of the graph, about a microsecond.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax

from gemma_jax.benchmarks.timing import Timing, measure

CALLS = 24
L2_BYTES = 60 << 20


def rotations(bytes_of_one: float, limit: int = 8) -> int:
    """Sets of inputs that together are several times the L2 cache."""
    return max(1, min(limit, int(4 * L2_BYTES // max(bytes_of_one, 1)) + 1))


def time_kernel(
    call: Callable[..., Any], inputs: Sequence[dict[str, Any]], calls: int = CALLS, iters: int = 10
) -> Timing:
    """Milliseconds a call of `call(**inputs[i])`, as samples of a queue of `calls`."""

    def chain(sets):
        outs = []
        for i in range(calls):
            arguments = sets[i % len(sets)]
            if outs:
                # A result that nobody used would be dead code, and its call with it.
                arguments, outs[-1] = lax.optimization_barrier((arguments, outs[-1]))
            outs.append(call(**arguments))
        return outs

    program = jax.jit(chain)
    timing = measure(lambda: None, lambda _: jax.block_until_ready(program(list(inputs))), 3, iters)
    return Timing(timing.first_ms, [x / calls for x in timing.samples_ms], timing.warmup)
