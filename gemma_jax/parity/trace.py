"""Where we first part company: each sub-block of ours on the reference's own inputs.

A sub-block's input is the reference's stored tensor, so one wrong rounding shows where it is made
and is not carried on. The functions are those of the model; fast prefill does not apply.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from flax import nnx

from gemma_jax.config import FULL, SLIDING, LayerConfig, ModelConfig
from gemma_jax.errors import RecordError
from gemma_jax.kernels import AUTO, Kernels
from gemma_jax.model.attention import KeyBlock, attend
from gemma_jax.model.layers import softcap
from gemma_jax.model.residual import Ops, Residual, matmul, project, project_gate, project_gelu_mul
from gemma_jax.model.rope import rope_tables
from gemma_jax.model.transformer import DecoderLayer, Gemma4, abstract_model
from gemma_jax.numerics import Numerics, Rounding
from gemma_jax.parity.trace_file import TraceFile
from gemma_jax.sharding import named_parameters
from gemma_jax.testing.tolerance import ulp

MAX_SHARE = 0.005
"""Largest share of bfloat16 values that may differ. One wrong rounding changes a per cent or more;
with nano on one CPU no sub-block has as much as 0.1 %."""
MAX_FEW = 3
"""Values of a small tensor that may differ."""
MAX_STEPS = 2.0
"""Largest difference in bfloat16 steps, of a value or of the tensor's RMS, whichever is larger."""
NEGLIGIBLE = 1e-5
"""Differences below this share of the tensor's RMS do not count: float32 itself is no better, for
instance where gelu goes to 0."""
FLOAT32_LIMIT = 1e-4
"""Largest |difference| of a float32 sub-block, as a share of the tensor's RMS; 2.3e-5 on nano."""


@dataclass(frozen=True)
class SubBlock:
    """One comparison.

    Attributes:
      layer: index; `None` for what lies outside the layers.
      name: for instance "attention".
      size: elements compared.
      differing: elements that are not equal, by more than a negligible amount.
      steps: largest difference, in bfloat16 steps of the reference's value or of the tensor's RMS,
        whichever is larger; float32: in units of the RMS.
      failed: more than rounding explains.
    """

    layer: int | None
    name: str
    size: int
    differing: int
    steps: float
    failed: bool

    @property
    def place(self) -> str:
        return self.name if self.layer is None else f"layer {self.layer}, {self.name}"

    @property
    def share(self) -> float:
        return self.differing / max(self.size, 1)


@dataclass(frozen=True)
class Trace:
    """All sub-blocks in the order of computation."""

    dtype: str
    blocks: list[SubBlock]

    @property
    def first(self) -> SubBlock | None:
        """The first that differs by more than rounding."""
        return next((block for block in self.blocks if block.failed), None)

    @property
    def failed(self) -> bool:
        return self.first is not None

    def as_json(self) -> dict[str, Any]:
        bad = [block for block in self.blocks if block.failed]
        unit = "bfloat16 steps" if self.dtype == "bfloat16" else "of the RMS"
        lines = ["", "sub-blocks that differ on the reference's own inputs:"] if bad else []
        lines += [
            f"  {x.place}: {x.share:.2%} of {x.size} values, by up to {x.steps:.3g} {unit}"
            for x in bad
        ]
        first = self.first
        verdict = "none differs" if first is None else f"we part company at {first.place}"
        return {
            "summary": f"{len(self.blocks)} sub-blocks in {self.dtype}: {verdict}",
            "first": None if first is None else {"layer": first.layer, "name": first.name},
            "lines": lines,
            "blocks": [vars(block) for block in self.blocks],
        }


def trace(
    file: TraceFile,
    config: ModelConfig,
    leaves: Mapping[str, jax.Array],
    rounding: Rounding = "hf",
    kernels: Kernels = AUTO,
) -> Trace:
    """Runs every sub-block of our model on the inputs stored in `file`, in the file's dtype.

    Args:
      config: of our model.
      leaves: path → weight in the file's dtype, as `load_checkpoint` gives them.
      rounding: whose bfloat16 rounding points to reproduce.
      kernels: the implementation of each op.

    Raises:
      RecordError: the file is of another model.
    """
    numerics = Numerics(file.dtype, rounding)
    tracer = _Tracer(file, config, leaves, Ops(numerics, kernels, config.rms_norm_eps))
    return Trace(file.dtype, list(tracer.blocks()))


class _Tracer:
    def __init__(
        self, file: TraceFile, config: ModelConfig, leaves: Mapping[str, jax.Array], ops: Ops
    ):
        self.file, self.config, self.ops, self.numerics = file, config, ops, ops.numerics
        if len(config.layers) != sum(name.endswith("/input") for name in file.arrays):
            raise RecordError(f"{file.name}: has another number of layers than the model")
        abstract = abstract_model(config, ops.numerics)
        graphdef, state = nnx.split(abstract)
        ordered = [leaves[name] for name in named_parameters(abstract)]
        weights = jax.tree.unflatten(jax.tree.structure(state), ordered)
        self.model: Gemma4 = nnx.merge(graphdef, weights)
        self.positions = jnp.asarray(file.positions)[None]
        self.tables = {
            SLIDING: self._rope(self.config.sliding_rope, self.config.head_dim),
            FULL: self._rope(self.config.full_rope, self.config.global_head_dim),
        }

    def _rope(self, rope, head_dim: int):
        return rope_tables(self.positions, rope, head_dim, self.numerics)

    def __call__(self, name: str) -> jax.Array:
        return jnp.asarray(self.file[name])

    def compare(self, layer: int | None, name: str, ours: jax.Array, theirs: jax.Array) -> SubBlock:
        return compare_values(layer, name, np.asarray(ours), np.asarray(theirs), self.file.dtype)

    def blocks(self) -> Iterator[SubBlock]:
        """Every sub-block, in the order of computation."""
        ids = jnp.asarray(self.file.token_ids)[self.positions[0]]
        embed = self.model.embed(ids, self.numerics)
        yield self.compare(None, "embed", embed, self("embed"))
        if self.model.ple is not None:
            count = self.config.num_hidden_layers
            inputs = self.model.ple(ids, self("embed"), 0, count, self.ops)
            theirs = jnp.stack([self(f"layers.{i}/per_layer_input") for i in range(count)], axis=1)
            yield self.compare(None, "per_layer_inputs", inputs, theirs)
        for layer in self.model.layers:
            yield from self.layer(layer)
        last = f"layers.{self.config.num_hidden_layers - 1}/output"
        _, normed = Residual(self(last)).norm(self.model.norm[...], self.ops)
        yield self.compare(None, "final_norm", normed, self("final_norm"))
        head = self.model.embed.logits(self("final_norm"), self.numerics)[:, self.file.columns]
        yield self.compare(None, "head", head, self("head"))
        capped = softcap(self("head"), self.config.final_logit_softcapping, self.numerics)
        yield self.compare(None, "softcap", capped, self("softcap"))

    def layer(self, layer: DecoderLayer) -> Iterator[SubBlock]:
        i, name, ops = layer.layer.index, f"layers.{layer.layer.index}", self.ops
        yield from self.attention(layer)
        stream = Residual(
            self(f"{name}/input"), self(f"{name}/o_proj"), layer.post_attention_layernorm[...]
        )
        yield self.compare(
            i, "post_attention_norm", stream.settle(ops), self(f"{name}/after_attention")
        )
        yield from self.feed_forward(layer)
        after = Residual(
            self(f"{name}/after_attention"), self(f"{name}/mlp"),
            layer.post_feedforward_layernorm[...],
        )  # fmt: skip
        if layer.ple is None:
            out = after._replace(scalar=layer.layer_scalar[...]).settle(ops)
            yield self.compare(i, "post_feedforward_norm", out, self(f"{name}/output"))
            return
        yield self.compare(i, "post_feedforward_norm", after.settle(ops), self(f"{name}/after_mlp"))
        yield from self.per_layer_input(layer)

    def attention(self, layer: DecoderLayer) -> Iterator[SubBlock]:
        at, attention = layer.layer, layer.attention
        i, name = at.index, f"layers.{at.index}"
        stream, weight = Residual(self(f"{name}/input")), layer.input_layernorm[...]
        _, normed = stream.norm(weight, self.ops)
        yield self.compare(i, "input_norm", normed, self(f"{name}/input_norm"))
        qkv = attention.qkv[...]
        _, raw = project(stream, weight, qkv.reshape(-1, qkv.shape[-1]), self.ops)
        expected = self.raw_heads(at)
        rows = self.equal_rows(normed, self(f"{name}/input_norm"))
        yield self.compare(i, "qkv_proj", raw.reshape(expected.shape)[rows], expected[rows])
        q, k, v = attention.split(expected[None], self.tables[at.kind], self.numerics)
        chosen = self.file.positions
        yield self.compare(i, "q_norm_rope", q[0], self(f"{name}/q").reshape(q[0].shape))
        if k is not None and v is not None:
            yield self.compare(i, "k_norm_rope", k[0], self(f"{name}/k")[chosen])
            yield self.compare(i, "v_norm", v[0], self(f"{name}/v")[chosen])
        heads = self.attend(at, self(f"{name}/q").reshape(q.shape))
        theirs = self(f"{name}/attention")
        yield self.compare(i, "attention", heads.reshape(theirs.shape), theirs)
        yield self.compare(i, "o_proj", attention.output(theirs, self.ops), self(f"{name}/o_proj"))

    def equal_rows(self, normed: jax.Array, theirs: jax.Array) -> np.ndarray:
        """Rows to judge a product by that begins with a norm: those whose norm is bit-equal.

        One value of a norm that is rounded the other way moves a whole row of the product. In
        float32 no bit need be equal, and every row counts.
        """
        equal = np.asarray((normed == theirs).all(-1))
        return equal if self.file.dtype == "bfloat16" else np.ones_like(equal)

    def raw_heads(self, layer: LayerConfig) -> jax.Array:
        """The reference's projections in our order: [C, K, G + k and v heads, H]."""
        name, k, h = f"layers.{layer.index}", layer.num_kv_heads, layer.head_dim
        parts = [self(f"{name}/q_raw").reshape(-1, k, layer.num_groups, h)]
        for part in ("k_raw", "v_raw"):
            if layer.owns_kv and f"{name}/{part}" in self.file:
                parts.append(self(f"{name}/{part}").reshape(-1, k, 1, h))
        return jnp.concatenate(parts, axis=2)

    def attend(self, layer: LayerConfig, q: jax.Array) -> jax.Array:
        source = f"layers.{layer.kv_source}"
        k, v = self(f"{source}/k")[None], self(f"{source}/v")[None]
        keys = KeyBlock(k, v, jnp.arange(k.shape[1])[None])
        return attend(q, keys, self.positions, layer.window, self.numerics)

    def feed_forward(self, layer: DecoderLayer) -> Iterator[SubBlock]:
        i, name, ops = layer.layer.index, f"layers.{layer.layer.index}", self.ops
        stream, weight = Residual(self(f"{name}/after_attention")), layer.pre_feedforward_layernorm
        _, normed = stream.norm(weight[...], ops)
        yield self.compare(i, "pre_feedforward_norm", normed, self(f"{name}/mlp_norm"))
        _, active = project_gelu_mul(stream, weight[...], layer.mlp.gate_up[...], ops)
        rows = self.equal_rows(normed, self(f"{name}/mlp_norm"))
        yield self.compare(i, "gate_up", active[rows], self(f"{name}/gate_up")[rows])
        dense = matmul(self(f"{name}/gate_up"), layer.mlp.down[...], ops)
        yield self.compare(i, "down_proj", dense, self(f"{name}/down_proj"))
        if layer.moe is not None:
            both = layer.moe(stream.h, self(f"{name}/down_proj"), self.numerics)
            yield self.compare(i, "experts", both, self(f"{name}/mlp"))

    def per_layer_input(self, layer: DecoderLayer) -> Iterator[SubBlock]:
        i, name, ops, ple = layer.layer.index, f"layers.{layer.layer.index}", self.ops, layer.ple
        assert ple is not None
        stream = Residual(self(f"{name}/after_mlp"))
        inputs = self(f"{name}/per_layer_input")[:, None]
        _, gated = project_gate(stream, ple.gate[...], inputs, 0, ops)
        yield self.compare(i, "per_layer_gate", gated, self(f"{name}/gated"))
        y = matmul(self(f"{name}/gated"), ple.projection[...], ops)
        yield self.compare(i, "per_layer_projection", y, self(f"{name}/ple_projection"))
        out = Residual(
            stream.h, self(f"{name}/ple_projection"), ple.norm[...], layer.layer_scalar[...]
        )
        yield self.compare(i, "layer_output", out.settle(ops), self(f"{name}/output"))


def compare_values(
    layer: int | None, name: str, ours: np.ndarray, theirs: np.ndarray, dtype: str
) -> SubBlock:
    """Counts elements that differ, and judges whether rounding explains them."""
    a, b = ours.astype(np.float64), theirs.astype(np.float64)
    if not a.size:  # no row of it can be judged
        return SubBlock(layer, name, 0, 0, 0.0, False)
    if a.shape != b.shape:
        raise RecordError(f"{name}: our shape {a.shape}, the reference's {b.shape}")
    rms = max(float(np.sqrt(np.mean(b**2))), 1e-30)
    differing = int((~(np.abs(a - b) <= NEGLIGIBLE * rms)).sum())
    if dtype == "float32":
        worst = float(np.abs(a - b).max() / rms)
        return SubBlock(layer, name, a.size, differing, worst, not worst <= FLOAT32_LIMIT)
    step = ulp(np.maximum(np.abs(b), rms), ml_dtypes.bfloat16)
    worst = float((np.abs(a - b) / step).max())
    few = differing <= max(MAX_FEW, MAX_SHARE * a.size)
    return SubBlock(layer, name, a.size, differing, worst, not (few and worst <= MAX_STEPS))
