"""Shape cases of the kernels, one file an op: tests and benchmarks run the same list."""

import importlib
import math
import pkgutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


@dataclass(frozen=True)
class Case:
    """One op at one shape.

    Attributes:
      op: the public function's name.
      name: unique within the op; states the shape and what is special about it.
      inputs: from a seed, fresh random arrays as keyword arguments of `call`.
      call: runs the op; takes those arrays and `implementation`, returns arrays.
      bench: a shape of a published model, worth timing; the others only test edges.
      in_place: the op updates one of its inputs.
      flops, bytes: work counted once: unmasked products, each input read and output written once.
    """

    op: str
    name: str
    inputs: Callable[[int], dict[str, Any]]
    call: Callable[..., Any]
    bench: bool = False
    in_place: bool = False
    flops: float = 0.0
    bytes: float = 0.0


def all_cases(file: str | None = None) -> list[Case]:
    """The `CASES` of one file of this folder, which may hold two related ops, or of all files."""
    names = [file] if file else sorted(m.name for m in pkgutil.iter_modules(__path__))
    modules = (importlib.import_module(f"{__name__}.{name}") for name in names)
    cases: list[Case] = []
    for module in modules:
        listed: Sequence[Case] = module.CASES
        cases.extend(listed)
    return cases


def normal(seed: int) -> Callable[..., jax.Array]:
    """draw(shape, dtype, scale=1.0): small arrays by numpy, which compiles nothing, or by jax."""
    generator = np.random.default_rng(seed)

    def draw(shape: tuple[int, ...], dtype: str, scale: float = 1.0) -> jax.Array:
        if math.prod(shape) < 1 << 20:
            small = np.float32(scale) * generator.standard_normal(shape, np.float32)
            return jnp.asarray(small, dtype)
        key = jax.random.key(generator.integers(1 << 31))
        return scale * jax.random.normal(key, shape, dtype)

    return draw
