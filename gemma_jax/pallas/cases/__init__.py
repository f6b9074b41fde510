"""Shape cases of the kernels, one file an op: tests and benchmarks run the same list."""

import importlib
import math
import pkgutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import ArrayLike


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
      baselines: other programs of the same arrays and results, by name, only to be timed against.
      sizes: the same shape as the op's file describes it, for who times another program at it.
      flops, bytes: work counted once: unmasked products, each input read and output written once.
    """

    op: str
    name: str
    inputs: Callable[[int], dict[str, Any]]
    call: Callable[..., Any]
    bench: bool = False
    in_place: bool = False
    baselines: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    sizes: Any = None
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


def array(values: ArrayLike, dtype: str) -> jax.Array:
    """The array on the device; unlike `jnp.asarray` this compiles no conversion of its shape."""
    return jax.device_put(np.asarray(values).astype(jnp.dtype(dtype)))


def normal(seed: int) -> Callable[..., jax.Array]:
    """draw(shape, dtype, scale=1.0, used=None): small arrays by numpy, which compiles nothing.

    `used`, one bool for each index of the first axis, has NaN in all others.
    """
    generator = np.random.default_rng(seed)

    def draw(
        shape: tuple[int, ...], dtype: str, scale: float = 1.0, used: np.ndarray | None = None
    ) -> jax.Array:
        mask = True if used is None else used.reshape(-1, *(1,) * (len(shape) - 1))
        if math.prod(shape) < 1 << 20:
            small = np.float32(scale) * generator.standard_normal(shape, np.float32)
            return array(np.where(mask, small, np.nan), dtype)
        key = jax.random.key(generator.integers(1 << 31))
        large = scale * jax.random.normal(key, shape, dtype)
        return large if used is None else jnp.where(mask, large, jnp.nan)

    return draw
