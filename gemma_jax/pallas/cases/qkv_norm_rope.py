"""Cases of `qkv_norm_rope`: the layers of the presets, then edges."""

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from gemma_jax.model.layers import rms_norm
from gemma_jax.model.rope import apply_rope
from gemma_jax.numerics import Numerics, Rounding
from gemma_jax.pallas.cases import Case, array, normal
from gemma_jax.pallas.qkv_norm_rope import CacheWrite, QkvOutput, qkv_norm_rope, write_slots

EPS = 1e-6


@dataclass(frozen=True)
class Heads:
    """Sizes of one case; the letters are those of `qkv_norm_rope`.

    `rotated` is the share of the channel pairs that RoPE turns; `page` > 0 writes a cache, whose
    slots are shuffled and every third is none.
    """

    tokens: int
    kv_heads: int
    groups: int
    head_dim: int
    owner: bool = True
    has_v: bool = True
    page: int = 0
    rotated: float = 1.0
    dtype: str = "bfloat16"
    rounding: Rounding = "hf"

    @property
    def heads(self) -> int:
        return self.groups + (1 + self.has_v if self.owner else 0)

    @property
    def pages(self) -> int:
        return -(-self.tokens // self.page) + 1

    @property
    def bytes(self) -> int:
        """The projection, the tables, q, and k and v as often as they are written."""
        copies = 2 * (1 + (self.page > 0)) if self.owner else 0
        elements = self.kv_heads * (self.heads + self.groups + copies) + 1
        return self.tokens * elements * self.head_dim * jnp.dtype(self.dtype).itemsize

    def inputs(self, seed: int) -> dict[str, Any]:
        n, h = self.tokens, self.head_dim
        draw = functools.partial(normal(seed), dtype=self.dtype)
        generator = np.random.default_rng(seed + 1)
        angles = generator.uniform(0.0, 6.3, (n, h // 2))
        angles = np.where(np.arange(h // 2) < self.rotated * (h // 2), angles, 0.0)
        arrays = {
            "qkv": draw((n, self.kv_heads, self.heads, h)),
            "q_weight": draw((h,)),
            "k_weight": draw((h,)) if self.owner else None,
            "cos": array(np.cos(angles), self.dtype),
            "sin": array(np.sin(angles), self.dtype),
        }
        if self.page:
            shape = (self.pages, self.page, self.kv_heads, h)
            slots = generator.permutation(self.pages * self.page)[:n]
            slots[::3] = -1
            arrays["k_cache"], arrays["v_cache"] = draw(shape), draw(shape)
            arrays["slots"] = array(slots, "int32")
        return arrays

    def call(
        self,
        qkv: jax.Array,
        q_weight: jax.Array,
        k_weight: jax.Array | None,
        cos: jax.Array,
        sin: jax.Array,
        k_cache: jax.Array | None = None,
        v_cache: jax.Array | None = None,
        slots: jax.Array | None = None,
        implementation: Any = None,
    ) -> QkvOutput:
        cache = None
        if k_cache is not None and v_cache is not None and slots is not None:
            cache = CacheWrite(k_cache, v_cache, slots)
        return qkv_norm_rope(
            qkv, q_weight, k_weight, cos, sin, num_groups=self.groups, has_v=self.has_v, eps=EPS,
            numerics=Numerics(self.dtype, self.rounding), cache=cache,
            implementation=implementation,
        )  # fmt: skip

    def unfused(
        self,
        qkv: jax.Array,
        q_weight: jax.Array,
        k_weight: jax.Array | None,
        cos: jax.Array,
        sin: jax.Array,
        k_cache: jax.Array | None = None,
        v_cache: jax.Array | None = None,
        slots: jax.Array | None = None,
    ) -> QkvOutput:
        """The op as a framework runs it eagerly: every step a kernel that XLA may not fuse."""
        numerics = Numerics(self.dtype, self.rounding)

        def norm(x: jax.Array, weight: jax.Array | None) -> jax.Array:
            return lax.optimization_barrier(rms_norm(x, weight, EPS, numerics))

        def rope(x: jax.Array) -> jax.Array:
            return lax.optimization_barrier(apply_rope(x, (cos, sin), numerics))

        q = lax.optimization_barrier(qkv[:, :, : self.groups])
        if k_weight is None:
            return QkvOutput(rope(norm(q, q_weight)))
        k, v = lax.optimization_barrier((qkv[:, :, self.groups], qkv[:, :, -1]))
        q, k, v = rope(norm(q, q_weight)), rope(norm(k, k_weight)), norm(v, None)
        if k_cache is None or v_cache is None or slots is None:
            return QkvOutput(q, k, v)
        return QkvOutput(q, k, v, write_slots(k_cache, k, slots), write_slots(v_cache, v, slots))


def heads_case(name: str, heads: Heads, bench: bool = False) -> Case:
    return Case(
        "qkv_norm_rope", name, heads.inputs, heads.call, bench,
        in_place=heads.page > 0, baselines={"unfused": heads.unfused}, sizes=heads,
        bytes=float(heads.bytes),
    )  # fmt: skip


_shared = functools.partial(Heads, owner=False, has_v=False)
_cached = functools.partial(Heads, page=128)

CASES = [
    heads_case("e2b sliding, 16384 tokens", _cached(16_384, 1, 8, 256), bench=True),
    heads_case("e2b full, 16384 tokens", _cached(16_384, 1, 8, 512, rotated=0.25), bench=True),
    heads_case("e2b sliding shared, 16384 tokens", _shared(16_384, 1, 8, 256), bench=True),
    heads_case("e2b sliding, 1 token", _cached(1, 1, 8, 256), bench=True),
    heads_case("e2b full, 1 token", _cached(1, 1, 8, 512, rotated=0.25), bench=True),
    heads_case("e2b sliding shared, 1 token", _shared(1, 1, 8, 256), bench=True),
    heads_case("e2b sliding, 64 tokens", _cached(64, 1, 8, 256), bench=True),
    heads_case("e4b sliding, 8192 tokens", _cached(8192, 2, 4, 256), bench=True),
    heads_case("31b sliding, 4096 tokens", _cached(4096, 16, 2, 256), bench=True),
    heads_case(
        "31b full, 4096 tokens", _cached(4096, 4, 8, 512, has_v=False, rotated=0.25), bench=True
    ),
    heads_case("one token, e2b sliding", Heads(1, 1, 8, 256, page=4)),
    heads_case("e2b full", Heads(2, 1, 8, 512, page=4, rotated=0.25)),
    heads_case("e2b full shared", _shared(3, 1, 8, 512, rotated=0.25)),
    heads_case("e4b full", Heads(2, 2, 4, 512, rotated=0.25)),
    heads_case("12b full, k = v", Heads(2, 1, 16, 512, has_v=False, page=2, rotated=0.25)),
    heads_case("26b sliding", Heads(2, 8, 2, 256, page=4)),
    heads_case("31b full, k = v", Heads(3, 4, 8, 512, has_v=False, page=4)),
    heads_case("two key heads", Heads(7, 2, 4, 32, page=4)),
    heads_case("no cache", Heads(7, 2, 4, 32)),
    heads_case("vllm", Heads(5, 1, 8, 64, page=4, rotated=0.25, rounding="vllm")),
    heads_case("vllm shared", _shared(5, 1, 2, 64, rounding="vllm")),
    heads_case("float32", Heads(5, 2, 4, 32, page=4, dtype="float32")),
    heads_case("float32, vllm", Heads(5, 1, 4, 32, has_v=False, dtype="float32", rounding="vllm")),
]
