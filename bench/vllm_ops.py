"""vLLM's own kernels at the sizes of our cases: random inputs, the call, and what it should give.

torch and vLLM (0.25.1) are imported inside the functions that need them. Arguments are those of
vLLM's Triton attention backend and of its Gemma 4 model:

- `unified_attention` reads a paged cache. Its 3-D kernel, which cuts the keys into 16 segments,
  runs where each sequence has one query and there are at most 128 / key heads of them, as in vLLM.
- "vllm" of `qkv_norm_rope` is RMSNorm of q and of k, rotary embedding, RMSNorm of v and the cache
  write, each a kernel; "vllm-fused" takes the kernel of both norms and the rotation instead. Their
  q|k|v has all heads also where a layer uses q only, because vLLM's has.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from gemma_jax.errors import UnsupportedError
from gemma_jax.pallas.cases import Case
from gemma_jax.pallas.cases.qkv_norm_rope import EPS

DEVICE = "cuda"
PAGE = 16
"""Tokens of a page: vLLM's default on NVIDIA GPUs."""
SEGMENTS = 16
LAUNCHES_2D = 128
"""vLLM's constants (v1/attention/backends/triton_attn.py)."""
ROPE_POSITIONS = 32_768
SAMPLE = 48
"""Query rows or tokens whose result is compared with the formula."""
OPS = ("prefill_attention", "decode_attention", "qkv_norm_rope")
VLLM, FUSED = "vllm", "vllm-fused"


@dataclass(frozen=True)
class Program:
    """One call on inputs of its own.

    Attributes:
      run: queues the kernels; returns the result, [rows, heads, H].
      expected: float32 formula for some rows; to be called before `run`, which may overwrite.
      rows: which rows of the result those are.
    """

    run: Callable[[], Any]
    expected: Callable[[], Any]
    rows: Any

    def error(self) -> float:
        """‖result − formula‖ / ‖formula‖ over the sampled rows; runs the call."""
        expected = self.expected()
        found = self.run()[self.rows].float().reshape(expected.shape)
        return float((found - expected).norm() / expected.norm())


def implementations(op: str) -> tuple[str, ...]:
    """Names of vLLM's ways to compute an op."""
    return (VLLM, FUSED) if op == "qkv_norm_rope" else (VLLM,)


def program(case: Case, implementation: str, seed: int) -> Program:
    """The call of `case` on fresh random inputs.

    Raises:
      UnsupportedError: vLLM has no such kernel for these sizes.
    """
    s = case.sizes
    if case.op == "prefill_attention":
        heads = s.num_kv, s.groups, s.head_dim
        return attention(s.batch.lengths, s.batch.k_lengths, heads, s.window, seed)
    if case.op == "decode_attention":
        heads = s.kv_heads, s.groups, s.head_dim
        return attention((s.queries,) * s.batch, s.lengths, heads, s.window, seed)
    if case.op == "qkv_norm_rope":
        return qkv(s, implementation == FUSED, seed)
    raise UnsupportedError(f"{case.op}: no kernel of vLLM to compare with")


def _normal(seed: int) -> Callable[..., Any]:
    """draw(*shape, scale=1): bfloat16 on the device."""
    import torch

    generator = torch.Generator(DEVICE).manual_seed(seed)

    def draw(*shape: int, scale: float = 1.0) -> Any:
        out = torch.empty(shape, device=DEVICE, dtype=torch.bfloat16)
        return out.normal_(0.0, scale, generator=generator)

    return draw


# --- attention ------------------------------------------------------------------------------------


def attention(
    q_lengths: Sequence[int],
    k_lengths: Sequence[int],
    heads: tuple[int, int, int],
    window: int | None,
    seed: int,
) -> Program:
    """The newest q_lengths[i] tokens of each sequence over its k_lengths[i] keys.

    Args:
      heads: key heads, query heads of each, head width.
    """
    from vllm.v1.attention.ops.triton_unified_attention import unified_attention

    arguments = attention_arguments(q_lengths, k_lengths, heads, window, seed)

    def run() -> Any:
        unified_attention(**arguments)
        return arguments["out"]

    rows = _sampled(sum(q_lengths), seed)
    expected = functools.partial(attention_formula, arguments, q_lengths, k_lengths, window, rows)
    return Program(run, expected, rows)


def attention_arguments(
    q_lengths: Sequence[int],
    k_lengths: Sequence[int],
    heads: tuple[int, int, int],
    window: int | None,
    seed: int,
) -> dict[str, Any]:
    """Keyword arguments of `unified_attention`; pages lie in random order."""
    import torch

    kv_heads, groups, width = heads
    batch, draw = len(q_lengths), _normal(seed)
    integers = functools.partial(torch.tensor, dtype=torch.int32, device=DEVICE)
    pages = [-(-n // PAGE) for n in k_lengths]
    order = torch.randperm(sum(pages), device=DEVICE).to(torch.int32)
    table = torch.zeros((batch, max(pages)), dtype=torch.int32, device=DEVICE)
    for row, part in zip(table, order.split(pages), strict=True):
        row[: part.numel()] = part
    cache = draw(sum(pages), 2, PAGE, kv_heads, width)
    cache[:, 0] *= width**-0.25
    k_cache, v_cache = cache.unbind(1)
    q = draw(sum(q_lengths), kv_heads * groups, width, scale=width**-0.25)
    scales = torch.ones(1, device=DEVICE).expand(batch, kv_heads)
    return {
        "q": q,
        "k": k_cache,
        "v": v_cache,
        "out": torch.full_like(q, float("nan")),
        "cu_seqlens_q": integers([sum(q_lengths[:i]) for i in range(batch + 1)]),
        "max_seqlen_q": max(q_lengths),
        "seqused_k": integers(list(k_lengths)),
        "max_seqlen_k": max(k_lengths),
        "softmax_scale": 1.0,
        "causal": True,
        "window_size": (-1, -1) if window is None else (window - 1, 0),
        "block_table": table,
        "softcap": 0,
        "q_descale": None,
        "k_descale": scales,
        "v_descale": scales,
        **_segment_buffers(kv_heads, groups, width),
    }


@functools.cache
def _segment_buffers(kv_heads: int, groups: int, width: int) -> dict[str, Any]:
    """What the 3-D kernel needs, for as many sequences as it serves."""
    import torch

    rows = LAUNCHES_2D // kv_heads
    shape = (rows, kv_heads * groups, SEGMENTS)
    empty = functools.partial(torch.empty, dtype=torch.float32, device=DEVICE)
    return {
        "seq_threshold_3D": rows,
        "num_par_softmax_segments": SEGMENTS,
        "softmax_segm_output": empty((*shape, width)),
        "softmax_segm_max": empty(shape),
        "softmax_segm_expsum": empty(shape),
    }


def attention_formula(
    arguments: dict[str, Any],
    q_lengths: Sequence[int],
    k_lengths: Sequence[int],
    window: int | None,
    rows: Any,
) -> Any:
    """softmax(q kᵀ) v in float32 of the sampled query rows, [rows, heads, H]."""
    import torch

    k_cache, v_cache = arguments["k"], arguments["v"]
    kv_heads, width = k_cache.shape[2:]
    results = []
    for row in rows.tolist():
        sequence, first = 0, 0
        while row >= first + q_lengths[sequence]:
            first += q_lengths[sequence]
            sequence += 1
        position = k_lengths[sequence] - q_lengths[sequence] + row - first
        start = 0 if window is None else max(position - window + 1, 0)
        keys = torch.arange(start, position + 1, device=DEVICE)
        page, slot = arguments["block_table"][sequence][keys // PAGE].long(), keys % PAGE
        k, v = (cache[page, slot].float() for cache in (k_cache, v_cache))
        q = arguments["q"][row].float().reshape(kv_heads, -1, width)
        weights = torch.einsum("kgh,skh->kgs", q, k).softmax(-1)
        results.append(torch.einsum("kgs,skh->kgh", weights, v).reshape(-1, width))
    return torch.stack(results)


def _sampled(count: int, seed: int) -> Any:
    import torch

    generator = torch.Generator().manual_seed(seed)
    return torch.randperm(count, generator=generator)[:SAMPLE].to(DEVICE)


# --- norms, rotary embedding, cache write ---------------------------------------------------------


def qkv(sizes: Any, fused: bool, seed: int) -> Program:
    """From the projection's output to rotated q and the written cache, one layer.

    Args:
      sizes: of `gemma_jax.pallas.cases.qkv_norm_rope`.
    """
    arrays = qkv_arrays(sizes, seed)
    if fused and not sizes.owner:
        raise UnsupportedError("vLLM's fused kernel norms k too: not for a layer without one")
    run = functools.partial(_fused if fused else _unfused, sizes, arrays)
    rows = _sampled(sizes.tokens, seed)
    return Program(run, functools.partial(query_formula, sizes, arrays, rows), rows)


def qkv_arrays(sizes: Any, seed: int) -> dict[str, Any]:
    """qkv [tokens, heads · H], weights, the table of cosines and sines, cache and slots."""
    import torch

    draw, width, kv_heads = _normal(seed), sizes.head_dim, sizes.kv_heads
    half = width // 2
    frequencies = 1e4 ** (-torch.arange(half, device=DEVICE) / half)
    frequencies[int(sizes.rotated * half) :] = 0.0
    angles = torch.arange(ROPE_POSITIONS, device=DEVICE)[:, None] * frequencies
    arrays = {
        "qkv": draw(sizes.tokens, kv_heads * (sizes.groups + 2) * width),
        "q_weight": draw(width),
        "k_weight": draw(width),
        "table": torch.cat([angles.cos(), angles.sin()], dim=-1).to(torch.bfloat16),
        "positions": torch.randint(ROPE_POSITIONS, (sizes.tokens,), device=DEVICE),
    }
    if sizes.owner:
        pages = sizes.tokens // PAGE + 1
        slots = torch.randperm(pages * PAGE, device=DEVICE)[: sizes.tokens]
        slots[::3] = -1
        arrays |= {
            "cache": draw(pages, 2, PAGE, kv_heads, width),
            "slots": slots,
            "one": torch.ones((), device=DEVICE),
        }
    return arrays


def _parts(sizes: Any, x: Any) -> tuple[Any, Any, Any]:
    """Views of q, k and v, [tokens, heads, H]."""
    width = sizes.head_dim
    lengths = [n * sizes.kv_heads * width for n in (sizes.groups, 1, 1)]
    q, k, v = (part.unflatten(-1, (-1, width)) for part in x.split(lengths, dim=-1))
    return q, k, v


def _normed(x: Any, weight: Any) -> Any:
    import torch
    from vllm import _custom_ops as ops

    out = torch.empty(x.shape, device=x.device, dtype=x.dtype)
    ops.rms_norm(out, x, weight, EPS)
    return out


def _write(arrays: dict[str, Any], k: Any, v: Any) -> None:
    from vllm.v1.attention.ops.triton_reshape_and_cache_flash import triton_reshape_and_cache_flash

    caches, one = arrays["cache"].unbind(1), arrays["one"]
    triton_reshape_and_cache_flash(k, v, *caches, arrays["slots"], "auto", one, one)


def _unfused(sizes: Any, arrays: dict[str, Any]) -> Any:
    from vllm import _custom_ops as ops

    q, k, v = _parts(sizes, arrays["qkv"])
    q = _normed(q, arrays["q_weight"])
    if sizes.owner:
        k = _normed(k, arrays["k_weight"])
    flat = q.flatten(-2), k.flatten(-2)
    ops.rotary_embedding(arrays["positions"], *flat, sizes.head_dim, arrays["table"], True)
    if sizes.owner:
        _write(arrays, k, _normed(v, None))
    return q


def _fused(sizes: Any, arrays: dict[str, Any]) -> Any:
    from vllm import _custom_ops as ops

    heads = sizes.kv_heads * sizes.groups, sizes.kv_heads, sizes.kv_heads
    weights = arrays["q_weight"], arrays["k_weight"]
    ops.fused_qk_norm_rope(
        arrays["qkv"], *heads, sizes.head_dim, EPS, *weights, arrays["table"], True,
        arrays["positions"],
    )  # fmt: skip
    q, k, v = _parts(sizes, arrays["qkv"])
    _write(arrays, k, _normed(v, None))
    return q


def query_formula(sizes: Any, arrays: dict[str, Any], rows: Any) -> Any:
    """rope(rms_norm(q) · weight) in float32 of the sampled tokens, [tokens, heads, H]."""
    import torch

    q = _parts(sizes, arrays["qkv"])[0][rows].float()
    root = torch.rsqrt(q.square().mean(-1, keepdim=True) + EPS)
    a, b = (q * root * arrays["q_weight"].float()).chunk(2, dim=-1)
    cos, sin = arrays["table"][arrays["positions"][rows]].float()[:, None].chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)
