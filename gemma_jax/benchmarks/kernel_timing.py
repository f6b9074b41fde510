"""Device time of one kernel call: host dispatch, gaps and the L2 cache kept out of the figure.

A GPU's own clock, as the profiler records it, gives the time of every kernel of a call; their sum
is the time of the call. Inputs rotate through sets that together exceed the L2 cache. On a CPU,
which records no kernels, the wall clock stands in.
"""

import itertools
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from gemma_jax.benchmarks import profile
from gemma_jax.benchmarks.timing import Timing, measure

CALLS = 48
L2_BYTES = 60 << 20
_COPIES = ("Memcpy", "copy", "wrapped_copy")


def rotations(bytes_of_one: float, limit: int = 8) -> int:
    """Sets of inputs that together are several times the L2 cache."""
    return max(1, min(limit, int(4 * L2_BYTES // max(bytes_of_one, 1)) + 1))


def time_kernel(
    call: Callable[..., Any],
    inputs: Sequence[dict[str, Any]],
    calls: int = CALLS,
    in_place: bool = False,
) -> Timing:
    """Milliseconds of device time a call of `call(**inputs[i])`: one sample a call.

    Args:
      call: traceable; returns arrays.
      inputs: sets of arguments to rotate through.
      calls: samples.
      in_place: `call` updates an argument, which the benchmark keeps by copying it first: copies
        are not counted.
    Raises:
      RuntimeError: the profiler did not record the same number of kernels for each call.
    """
    program = jax.jit(call)

    def run(_: None) -> None:
        out = [program(**given) for given in inputs]
        jax.block_until_ready(out)

    first = measure(lambda: None, run, 1, 1)
    with tempfile.TemporaryDirectory() as folder:
        out = None
        with profile.record(Path(folder)):
            for i in range(calls):
                out = program(**inputs[i % len(inputs)])
            jax.block_until_ready(out)
        events = profile.newest_events(Path(folder))
    if in_place:
        events = [e for e in events if not e.name.startswith(_COPIES)]
    if not events:
        sets = itertools.cycle(inputs)
        wall = measure(
            lambda: next(sets), lambda given: jax.block_until_ready(program(**given)), 1, calls
        )
        return Timing(first.first_ms, wall.samples_ms, wall.warmup)
    durations = np.array([e.duration for e in events])
    if durations.size % calls:
        raise RuntimeError(f"{durations.size} kernels in {calls} calls: not the same in each call")
    samples = durations.reshape(calls, -1).sum(axis=1) / 1e6
    return Timing(first.first_ms, samples.tolist(), 1)
