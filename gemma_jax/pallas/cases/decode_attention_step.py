"""Cases of `decode_attention_step`: owner, k_eq_v and shared layers."""

import functools
from typing import Any

import numpy as np

from gemma_jax.numerics import Numerics, Rounding
from gemma_jax.pallas.cases import Case, array
from gemma_jax.pallas.cases.decode_attention import E2B, Geometry
from gemma_jax.pallas.decode_attention import decode_attention_step

_EPS = 1e-6


def _inputs(geometry: Geometry, fresh: int, holes: bool, seed: int) -> dict[str, Any]:
    """`fresh`: raw heads besides the query heads, 2, 1 (k is v) or 0 (shared)."""
    g = geometry
    draw = np.random.default_rng(seed + 1).standard_normal
    qkv = draw((g.batch, g.kv_heads, g.groups + fresh, g.head_dim))
    q_weight = (1 + draw(g.head_dim)) * g.head_dim**-0.5
    k_weight = 1 + 0.1 * draw(g.head_dim)
    half = g.head_dim // 2
    rotated = np.arange(half) < half // 2
    angles = (np.asarray(g.lengths)[:, None] - 1) * rotated * 1e4 ** -(np.arange(half) / half)
    drawn = {"qkv": qkv, "q_weight": q_weight, "cos": np.cos(angles), "sin": np.sin(angles)}
    arrays: dict[str, Any] = {name: array(x, g.dtype) for name, x in drawn.items()}
    arrays["k_weight"] = array(k_weight, g.dtype) if fresh else None
    return {**arrays, **g.cache(seed, holes)}


def step_case(
    name: str,
    geometry: Geometry,
    fresh: int,
    rounding: Rounding = "hf",
    bench: bool = False,
) -> Case:
    g = geometry
    return Case(
        op="decode_attention_step",
        name=name,
        inputs=functools.partial(_inputs, geometry, fresh, not bench),
        call=functools.partial(
            decode_attention_step,
            groups=g.groups,
            eps=_EPS,
            slots=g.slots,
            window=g.window,
            numerics=Numerics(g.dtype, rounding),
        ),
        bench=bench,
        in_place=fresh > 0,
        flops=g.flops,
        bytes=g.key_bytes,
    )


def _bench(name: str, rows: int, length: int, fresh: int, **sizes: Any) -> Case:
    geometry = Geometry((length,) * rows, **{"slots": -(-length // 128) * 128, **sizes})
    return step_case(f"{name}, {rows} x {length}", geometry, fresh, bench=True)


_SLIDING = {"head_dim": 256, "window": 512, "slots": 2560}

CASES: list[Case] = [
    step_case("owner: first token, idle row", Geometry((1, 0, 33), 1, 8, 32, 64, 16), 2),
    step_case(
        "owner: ring wrapped, pages",
        Geometry((203, 97, 96), 2, 4, 32, 96, 16, window=40, paged=True),
        2,
    ),
    step_case("k is v", Geometry((64, 17), 2, 4, 32, 64, 16), 1),
    step_case("shared", Geometry((70, 0), 1, 8, 32, 96, 16, window=40), 0),
    step_case(
        "float32, vllm", Geometry((50, 0), 2, 2, 32, 64, 64, paged=True, dtype="float32"), 2, "vllm"
    ),
    step_case("E2B full owner", Geometry((40,), 1, 8, 512, 64, 16), 2),
    step_case("31B sliding owner", Geometry((70,), 2, 2, 256, 96, 16, window=64), 2),
    _bench("E2B sliding owner", 1, 1024, 2, **E2B, **_SLIDING),
    _bench("E2B sliding shared", 1, 1024, 0, **E2B, **_SLIDING),
    _bench("E2B full owner", 1, 512, 2, **E2B, head_dim=512),
    _bench("E2B full shared", 1, 512, 0, **E2B, head_dim=512),
    _bench("E2B sliding owner", 64, 1024, 2, **E2B, **_SLIDING),
    _bench("E2B full owner", 64, 2048, 2, **E2B, head_dim=512),
]
