"""Cases of `decode_attention`; what was never written into a cache is NaN in the small ones."""

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gemma_jax.numerics import Numerics
from gemma_jax.pallas.cases import Case, array, normal
from gemma_jax.pallas.decode_attention import decode_attention


@dataclass(frozen=True)
class Geometry:
    """Sizes of one case; the letters are those of `decode_attention`."""

    lengths: tuple[int, ...]
    kv_heads: int
    groups: int
    head_dim: int
    slots: int
    page: int
    window: int | None = None
    queries: int = 1
    paged: bool = False
    dtype: str = "bfloat16"
    batch_invariant: bool = False

    @property
    def batch(self) -> int:
        return len(self.lengths)

    @property
    def key_bytes(self) -> int:
        """Bytes of the keys and values that must be read."""
        live = (min(n, (self.window or n) + self.queries - 1) for n in self.lengths)
        width = self.kv_heads * self.head_dim * jnp.dtype(self.dtype).itemsize
        return 2 * width * sum(live)

    @property
    def flops(self) -> int:
        live = sum(min(n, self.window or n) for n in self.lengths)
        return 4 * live * self.queries * self.kv_heads * self.groups * self.head_dim

    def cache(self, seed: int, holes: bool) -> dict[str, jax.Array]:
        """lengths, k_cache, v_cache, and page_table if paged; `holes`: NaN where never written."""
        draw = normal(seed)
        lengths = array(self.lengths, "int32")
        own, spare = self.batch * self.slots // self.page, 3
        heads = (self.page, self.kv_heads, self.head_dim)
        if not holes:
            k, v = (draw((own, *heads), self.dtype) for _ in range(2))
            return {"k_cache": k, "v_cache": v, "lengths": lengths}
        order = np.random.default_rng(seed).permutation(own + spare)[:own]
        if not self.paged:
            order, spare = np.arange(own), 0
        last = np.asarray(self.lengths)[:, None] - 1
        written = last - (last - np.arange(self.slots)) % self.slots >= 0
        pages = []
        for _ in range(2):
            pages.append(np.full((own + spare, *heads), np.nan, np.float32))
            values = np.asarray(draw((own, *heads), "float32"))
            pages[-1][order] = np.where(written.reshape(own, self.page, 1, 1), values, np.nan)
        k, v = (array(x, self.dtype) for x in pages)
        found = {"k_cache": k, "v_cache": v, "lengths": lengths}
        if self.paged:
            found["page_table"] = array(order.reshape(self.batch, -1), "int32")
        return found


def _inputs(geometry: Geometry, holes: bool, seed: int) -> dict[str, Any]:
    g = geometry
    shape = (g.batch, g.queries, g.kv_heads, g.groups, g.head_dim)
    q = np.random.default_rng(seed + 1).standard_normal(shape, np.float32) * 2 * g.head_dim**-0.5
    return {"q": array(q, g.dtype), **g.cache(seed, holes)}


def attention_case(name: str, geometry: Geometry, bench: bool = False) -> Case:
    g = geometry
    heads = g.batch * g.queries * g.kv_heads * g.groups * g.head_dim
    return Case(
        op="decode_attention",
        name=name,
        inputs=functools.partial(_inputs, geometry, not bench),
        call=functools.partial(
            decode_attention,
            slots=g.slots,
            window=g.window,
            numerics=Numerics(g.dtype, batch_invariant=g.batch_invariant),
        ),
        bench=bench,
        sizes=g,
        flops=g.flops,
        bytes=g.key_bytes + 2 * heads * jnp.dtype(g.dtype).itemsize,
    )


E2B = {"kv_heads": 1, "groups": 8, "page": 128}
_SLIDING = {"head_dim": 256, "window": 512, "slots": 2560}
_FULL = {"head_dim": 512}


def _bench(name: str, rows: int, length: int, **sizes: Any) -> Case:
    sizes = {"slots": -(-length // 128) * 128, **sizes}
    return attention_case(f"{name}, {rows} x {length}", Geometry((length,) * rows, **sizes), True)


CASES: list[Case] = [
    *(
        attention_case(name, Geometry(lengths, *sizes, **more))
        for name, lengths, sizes, more in [
            ("length 1, empty row, full row", (1, 0, 64), (1, 8, 32, 64, 16), {}),
            ("one past a tile, float32", (65, 17), (2, 4, 32, 96, 16), {"dtype": "float32"}),
            ("pages of 16, shuffled", (100, 33, 0), (1, 4, 32, 112, 16), {"paged": True}),
            ("pages of 64, shuffled", (100, 64), (2, 2, 32, 128, 64), {"paged": True}),
            ("pages of 128, shuffled", (130, 5), (1, 2, 32, 256, 128), {"paged": True}),
            ("window beyond the sequence", (20, 7), (1, 4, 32, 96, 16), {"window": 64}),
            ("window across the ring's end", (203, 100), (2, 2, 32, 96, 16), {"window": 40}),
            ("ring in pages", (203, 100, 3), (1, 2, 32, 96, 16), {"window": 40, "paged": True}),
            ("3 queries, one before 0", (40, 2, 0), (2, 3, 32, 64, 16), {"queries": 3}),
            ("8 queries in a window", (77, 300), (1, 4, 32, 96, 16), {"queries": 8, "window": 20}),
            ("2 queries, ring in pages", (77, 300), (1, 4, 32, 96, 16),
             {"queries": 2, "window": 33, "paged": True}),
            ("E2B sliding", (90,), (1, 8, 256, 96, 16), {"window": 64}),
            ("E4B full", (40,), (2, 4, 512, 64, 16), {}),
            ("12B full", (40,), (1, 16, 512, 64, 16), {}),
            ("batch-invariant, ring", (203, 100, 0), (2, 2, 32, 96, 32),
             {"queries": 4, "window": 40, "batch_invariant": True}),
            ("31B sliding", (70,), (4, 2, 256, 96, 16), {"window": 64}),
        ]
    ),
    _bench("E2B sliding", 1, 1024, **E2B, **_SLIDING),
    _bench("E2B sliding", 1, 32768, **E2B, **_SLIDING),
    _bench("E2B sliding", 64, 1024, **E2B, **_SLIDING),
    _bench("E2B sliding", 64, 32768, **E2B, **_SLIDING),
    _bench("E2B sliding", 256, 256, **E2B, **_SLIDING),
    _bench("E2B full", 1, 128, **E2B, **_FULL),
    _bench("E2B full", 1, 2048, **E2B, **_FULL),
    _bench("E2B full", 1, 32768, **E2B, **_FULL),
    _bench("E2B full", 8, 4096, **E2B, **_FULL),
    _bench("E2B full", 64, 2048, **E2B, **_FULL),
    _bench("E2B full", 64, 8192, **E2B, **_FULL),
    _bench("E2B full", 256, 256, **E2B, **_FULL),
    _bench("E2B full, 4 queries", 8, 2048, **E2B, **_FULL, queries=4),
    *(
        _bench(f"{name}, batch-invariant", 64, 2048, **E2B, **sizes, batch_invariant=True)
        for name, sizes in (("E2B sliding", _SLIDING), ("E2B full", _FULL))
    ),
    _bench("E4B full", 8, 4096, kv_heads=2, groups=4, page=128, **_FULL),
    _bench("31B full", 8, 4096, kv_heads=4, groups=8, page=128, **_FULL),
    _bench("31B sliding", 8, 4096, kv_heads=16, groups=2, page=128, head_dim=256, window=1024,
           slots=3072),
]  # fmt: skip
