"""Shapes of `prefill_attention`: prompts of the published models, and the edges of the tiling.

Padding rows of q, k and v hold NaN in all of them.
"""

import functools
from dataclasses import dataclass
from typing import Any, Literal

import jax
import numpy as np
from numpy.typing import ArrayLike

from gemma_jax.numerics import Numerics
from gemma_jax.pallas.cases import Case, normal
from gemma_jax.pallas.prefill_attention import prefill_attention
from gemma_jax.pallas.segments import Segments

OP = "prefill_attention"
Layout = Literal["packed", "padded", "uniform"]


@dataclass(frozen=True)
class Batch:
    """Sequences of a batch: queries, context before them, and where they lie.

    Attributes:
      lengths: queries of each sequence.
      past: keys before the first query of each; none by default.
      layout: packed back to back, padded to the longest, or padded without past ("uniform").
      spare: padding rows after the last sequence of a packed batch.
      bound: `max_q_len`; the longest sequence by default.
    """

    lengths: tuple[int, ...]
    past: tuple[int, ...] = ()
    layout: Layout = "packed"
    spare: int = 0
    bound: int = 0

    @property
    def k_lengths(self) -> tuple[int, ...]:
        past = self.past or (0,) * len(self.lengths)
        return tuple(n + p for n, p in zip(self.lengths, past, strict=True))

    @property
    def max_q_len(self) -> int:
        return self.bound or max(self.lengths)

    def rows(self) -> tuple[int, int]:
        """Rows of q and of k."""
        if self.layout == "packed":
            return sum(self.lengths) + self.spare, sum(self.k_lengths) + self.spare
        return len(self.lengths) * self.max_q_len, len(self.lengths) * self._k_stride()

    def segments(self) -> Segments:
        lengths, k_lengths = (np.array(x, np.int32) for x in (self.lengths, self.k_lengths))
        if self.layout == "packed":
            return Segments.packed(lengths, k_lengths)
        return Segments.padded(lengths, self.max_q_len, self._k_stride(), k_lengths)

    def _k_stride(self) -> int:
        return max(self.max_q_len, *self.k_lengths)

    def visible(self, window: int | None) -> int:
        """Pairs of a query and a key that it sees."""
        total = 0
        for length, keys in zip(self.lengths, self.k_lengths, strict=True):
            seen = np.arange(keys - length, keys) + 1
            total += int(np.sum(seen if window is None else np.minimum(seen, window)))
        return total


@dataclass(frozen=True)
class Sizes:
    """Heads, window and sequences of a case."""

    num_kv: int
    groups: int
    head_dim: int
    window: int | None
    batch: Batch


def attention_case(
    name: str,
    heads: tuple[int, int, int],
    window: int | None,
    batch: Batch,
    numerics: Numerics = Numerics(),  # noqa: B008 (frozen)
    bench: bool = False,
) -> Case:
    """A case of (key heads, query heads of each, head width) `heads`."""
    num_kv, groups, head_dim = heads
    q_rows, k_rows = batch.rows()

    def inputs(seed: int) -> dict[str, Any]:
        draw = functools.partial(normal(seed), dtype=numerics.dtype)
        with jax.ensure_compile_time_eval():
            segments = batch.segments()
        q_used = _used(q_rows, segments.q_offsets, segments.q_lengths)
        k_used = _used(k_rows, segments.k_offsets, segments.k_lengths)
        kv = (k_rows, num_kv, head_dim)
        scale = head_dim**-0.25
        return {
            "q": draw((q_rows, num_kv, groups, head_dim), scale=scale, used=q_used),
            "k": draw(kv, scale=scale, used=k_used),
            "v": draw(kv, used=k_used),
            "segments": segments,
        }

    def call(q, k, v, segments, implementation=None):
        return prefill_attention(
            q,
            k,
            v,
            segments,
            window=window,
            max_q_len=batch.max_q_len,
            numerics=numerics,
            max_k_len=max(batch.k_lengths),
            uniform=batch.layout == "uniform",
            implementation=implementation,
        )

    size = numerics.jnp_dtype.itemsize
    elements = 2 * q_rows * num_kv * groups * head_dim + 2 * k_rows * num_kv * head_dim
    flops = 4.0 * batch.visible(window) * num_kv * groups * head_dim
    return Case(
        OP, name, inputs, call, bench, sizes=Sizes(*heads, window, batch), flops=flops,
        bytes=float(elements * size),
    )  # fmt: skip


def _used(rows: int, offsets: ArrayLike, lengths: ArrayLike) -> np.ndarray:
    """Whether each row belongs to a sequence."""
    row, first = np.arange(rows)[:, None], np.asarray(offsets)
    return ((row >= first) & (row < first + np.asarray(lengths))).any(axis=1)


_PROMPTS = Batch((2048,) * 8, layout="uniform")
_RAGGED = Batch((2048, 37, 1500, 999, 1, 3000, 515, 2048), spare=188)
_CHUNK = Batch((2048, 2048), past=(14336, 6144))
_SHORT_CHUNKS = Batch((256,) * 8, past=(8192, 4096, 2048, 1024, 512, 256, 128, 0))

# model: (key heads, query heads of each) of sliding and of full layers, window
_MODELS = {
    "e2b": ((1, 8), (1, 8), 512),
    "e4b": ((2, 4), (2, 4), 512),
    "12b": ((8, 2), (1, 16), 1024),
    "26b": ((8, 2), (2, 8), 1024),
    "31b": ((16, 2), (4, 8), 1024),
}


def _bench_cases() -> list[Case]:
    cases = []
    for model, (sliding, full, window) in _MODELS.items():
        kinds = {"sliding": ((*sliding, 256), window), "full": ((*full, 512), None)}
        batches = {"8x2048": _PROMPTS, "ragged": _RAGGED, "chunk": _CHUNK}
        batches["short chunks"] = _SHORT_CHUNKS
        for kind, (heads, kind_window) in kinds.items():
            for label, batch in batches.items():
                if label == "8x2048" or model == "e2b":
                    name = f"{model} {kind} {label}"
                    cases.append(attention_case(name, heads, kind_window, batch, bench=True))
    return cases


_FLOAT32 = Numerics("float32")
_VLLM = Numerics(rounding="vllm")

# Interpreted tiles are 32 rows by 32 keys: 4 tokens of 8 heads.
_EDGE_CASES = [
    attention_case("one token, e2b full", (1, 8, 512), None, Batch((1,))),
    attention_case("one past a tile, e2b sliding", (1, 8, 256), 8, Batch((33, 5))),
    attention_case("one short of a tile, float32", (3, 1, 64), None, Batch((31, 7)), _FLOAT32),
    attention_case("window wider than the sequences", (2, 4, 256), 512, Batch((9, 4))),
    attention_case("window 1", (1, 8, 32), 1, Batch((9, 40)), _FLOAT32),
    attention_case("empty sequences", (1, 4, 32), 20, Batch((0, 33, 0, 2, 0), spare=7, bound=60)),
    attention_case("padded, unequal", (2, 2, 32), None, Batch((12, 0, 40), layout="uniform")),
    attention_case("padded, with context", (1, 2, 64), 16, Batch((12, 5), (70, 0), "padded")),
    attention_case("chunk in a context, e2b full", (1, 8, 512), None, Batch((6, 3), (35, 90))),
    attention_case("chunk in a context, window", (2, 8, 32), 24, Batch((6, 30), (100, 3))),
    attention_case("padding longer than the bound", (1, 16, 16), 5, Batch((3, 2), spare=90)),
    attention_case("three heads a group, float32", (2, 3, 16), 11, Batch((30, 8)), _FLOAT32),
    attention_case("vllm, sliding", (2, 4, 32), 40, Batch((50, 9), (0, 77)), _VLLM),
]

CASES: list[Case] = [*_bench_cases(), *_EDGE_CASES]
