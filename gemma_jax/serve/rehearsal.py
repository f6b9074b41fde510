"""Compiles the programs of coming requests side by side, before they run.

An engine whose runner calls a `Rehearsal` goes through the requests without a device: each call is
traced and lowered here, compiled in a thread of a pool (XLA does not hold Python's lock) and
answered with made-up tokens. JAX keeps what was traced, lowered and compiled, so that the same call
later starts at once.
"""

import logging
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import numpy as np

from gemma_jax.call_arrays import Chunk, DecodeRows, StepOutput
from gemma_jax.sampling import NO_ID

logger = logging.getLogger(__name__)

THREADS = 6
"""Programs compiled at a time; each takes memory on the host and, to try out products, the GPU."""

TOKEN = 0
"""What every row draws: a request that stops at this id ends early."""


class Rehearsal:
    """Stands for the device in a runner's prefill and decode; see `Runner.calling`."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(THREADS, "gemma-jax-compile")
        self._compiling: dict[Any, Future[Any]] = {}
        self._outputs: dict[Any, Any] = {}

    def call(self, program: Any, static: tuple[Any, ...], arrays: tuple[Any, ...]) -> Any:
        """Has the program compiled; gives the cache, the row state and an output of its shapes."""
        _, cache, state, rows, *_ = arrays
        key = program, static, _signature(arrays[1:])
        if key not in self._outputs:
            traced = program.trace(*static, *arrays)
            self._outputs[key] = traced.out_info[2]
            self._compiling[key] = self._pool.submit(traced.lower().compile)
        return cache, state, _made_up(self._outputs[key], rows)

    def finish(self) -> int:
        """Waits for the pool; the number of programs.

        One that could not be compiled here is logged and left to its first call.
        """
        self._pool.shutdown()
        for future in self._compiling.values():
            if (problem := future.exception()) is not None:
                logger.warning("compiling ahead failed: %s", str(problem)[:300])
        return len(self._compiling)


def _signature(tree: Any) -> tuple[Any, ...]:
    """What a program is compiled for, apart from its static arguments and the weights."""
    leaves, structure = jax.tree.flatten(tree)
    return structure, *((x.shape, str(x.dtype)) for x in leaves)


def _made_up(shapes: StepOutput | None, rows: Chunk | DecodeRows) -> StepOutput | None:
    """An output of these shapes with `TOKEN` wherever a call would have drawn one."""
    if shapes is None:
        return None
    output = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), shapes)
    steps = np.asarray(rows.ends if isinstance(rows, Chunk) else rows.limits).astype(np.int32)
    drawn = np.arange(output.tokens.shape[1]) < steps[:, None]
    output.tokens = np.where(drawn, TOKEN, NO_ID).astype(np.int32)
    return jax.device_put(output)
