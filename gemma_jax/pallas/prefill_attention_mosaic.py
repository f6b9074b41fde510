"""Prefill attention on Hopper: wgmma and TMA through Pallas' Mosaic GPU back end (sm_90).

    out[i] = sum_j softmax_j(q[i] · k[j]) v[j]   over keys j <= p_i, and j > p_i - window

with p_i = k_length - q_length + i, no scale, float32 scores, softmax and accumulation, weights
rounded to bf16 before the second product. Shapes: q [N, K, G, H], k and v [M, K, H], bf16, H 256 or
512. `prefill_attention.py` has the reference and the public op.

A block owns tiles of 64 rows (`mosaic_work.py`). Two designs, made of the steps in
`mosaic_steps.py`:

- `split` (H = 512, `mosaic_split.py`): one warpgroup computes scores and softmax, H/256 others each
  accumulate 256 output columns (64x256 float32 is half of a warpgroup's registers). Scores are
  computed once although the output needs two warpgroups.
- `joined` (H = 256, `mosaic_joined.py`): each warpgroup does both for its own 64 rows, two of them
  sharing keys.

One more warpgroup issues the loads. In a cluster of two blocks each loads half of every key tile
for both: at 64 rows a block L2 bandwidth would otherwise bound the kernel.

Limits: N and M are multiples of 8 and at least 64, G divides 64, jax below 0.12 on a GPU. Rows of
no sequence are written as zeros, except those before the first sequence, which are undefined.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from gemma_jax.errors import UnsupportedError
from gemma_jax.numerics import Numerics
from gemma_jax.pallas import mosaic_joined, mosaic_split
from gemma_jax.pallas.device import SHARED_MEMORY, Device, current_device
from gemma_jax.pallas.mosaic_work import ALIGN, HALF, ROWS, Config, Shape, meta_of
from gemma_jax.pallas.segments import Segments


def default_config(head_dim: int) -> Config:
    if head_dim == 512:
        return Config("split", cluster=2)
    return Config("joined", groups=2)


def unsupported(
    q: jax.Array, k: jax.Array, v: jax.Array, window: int | None, device: Device
) -> str | None:
    """Why this kernel cannot take these inputs; None if it can. A CPU interprets it."""
    rows, _, group, head_dim = q.shape
    if device.is_gpu and device.capability != (9, 0):
        return f"needs compute capability 9.0, {device.kind} has another"
    if device.is_gpu and jax.__version_info__ >= (0, 12):
        return f"jax {jax.__version__} does not find its layouts in minutes; 0.11.2 does in seconds"
    if any(x.dtype != jnp.bfloat16 for x in (q, k, v)):
        return f"needs bfloat16, got {q.dtype}, {k.dtype}, {v.dtype}"
    if head_dim not in (256, 512):
        return f"needs a head width of 256 or 512, got {head_dim}"
    if ROWS % group:
        return f"needs query heads per key head that divide {ROWS}, got {group}"
    if rows % ALIGN or k.shape[0] % ALIGN:
        return f"needs multiples of {ALIGN} query and key rows, got {rows} and {k.shape[0]}"
    if min(rows, k.shape[0]) < ROWS:
        return f"needs {ROWS} query and key rows, got {rows} and {k.shape[0]}"
    if window is not None and window < 1:
        return f"needs a positive window, got {window}"
    return None


# --- call -----------------------------------------------------------------------------------------


def _check_config(shape: Shape) -> None:
    c, problem = shape.config, None
    if c.design == "joined" and shape.head_dim != HALF:
        problem = f"the joined design takes a head width of {HALF}, not {shape.head_dim}"
    elif c.design == "joined" and c.groups != 2:
        problem = f"the joined design has two groups, not {c.groups}"
    elif c.design == "split" and c.k_slots * c.k_columns < shape.head_dim:
        problem = f"{c.k_slots} slots of {c.k_columns} columns do not hold {shape.head_dim}"
    elif c.block_kv % ROWS or HALF % c.k_columns or c.k_columns % 64:
        problem = f"{c.block_kv} keys and {c.k_columns} columns: not whole 64x64 tiles of {HALF}"
    elif HALF % c.v_columns or c.v_columns % 64:
        problem = f"{c.v_columns} columns of values are not whole 64x64 tiles of {HALF}"
    elif _shared_bytes(shape) > SHARED_MEMORY[9, 0]:
        problem = f"needs {_shared_bytes(shape)} bytes of shared memory"
    if problem is not None:
        raise UnsupportedError(f"prefill_attention: mosaic config: {problem}")


def _shared_bytes(shape: Shape) -> int:
    """Shared memory of the large buffers, and 5 KB for the rest."""
    c = shape.config
    rows = c.groups * ROWS * shape.head_dim
    if c.design == "joined":
        rows += 2 * c.stages * c.block_kv * shape.head_dim
    else:
        rows += c.k_slots * c.block_kv * c.k_columns + c.groups * c.p_slots * ROWS * c.block_kv
        rows += shape.halves * c.v_slots * ROWS * c.v_columns
    return 2 * rows + 5 * 1024


def prefill_attention_mosaic(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segments: Segments,
    *,
    window: int | None,
    max_q_len: int,
    numerics: Numerics,
    config: Config | None = None,
) -> jax.Array:
    """Attention of packed or padded sequences, [N, K, G, H] bf16; see the module.

    Args:
      q, k, v: [N, K, G, H], [M, K, H] and [M, K, H] bf16.
      segments: rows of each sequence, in ascending order.
      window: keys a query sees, itself included; None for all before it.
      max_q_len: static bound of `q_lengths`; sets the grid.
      numerics: bf16; both rounding rules agree on this op.
      config: how the work is cut; None takes `default_config`.
    """
    device = current_device()
    reason = unsupported(q, k, v, window, device)
    if reason is not None or numerics.is_float32:
        raise UnsupportedError(f"prefill_attention: mosaic {reason or 'needs bfloat16 numerics'}")
    rows, kv_heads, group, head_dim = q.shape
    fold = max(1, group // ALIGN)
    shape = Shape(
        batch=segments.q_offsets.shape[0], kv_heads=kv_heads, group=group // fold, fold=fold,
        head_dim=head_dim, window=window, max_q_len=max_q_len,
        config=config or default_config(head_dim),
    )  # fmt: skip
    _check_config(shape)
    if shape.config.design == "split":
        kernel, scratch = mosaic_split.kernel, mosaic_split.scratch(shape)
    else:
        kernel, scratch = mosaic_joined.kernel, mosaic_joined.scratch(shape)
    cluster = {"cluster": (2,), "cluster_names": ("block",)} if shape.config.cluster > 1 else {}
    out = plgpu.kernel(
        functools.partial(kernel, shape=shape, interpret=not device.is_gpu),
        out_type=jax.ShapeDtypeStruct((rows, kv_heads * group, head_dim), q.dtype),
        scratch_types=scratch,
        grid=(shape.clusters,),
        grid_names=("tile",),
        num_threads=shape.warpgroups,
        thread_name="wg",
        kernel_name="prefill_attention_mosaic",
        interpret=None if device.is_gpu else plgpu.InterpretGPUParams(),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        **cluster,
    )(meta_of(segments, rows), q.reshape(rows, kv_heads * group, head_dim), k, v)
    return out.reshape(q.shape)
