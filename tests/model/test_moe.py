"""Mixture of experts: both ways to run it, and the roundings of both settings in numpy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from model_helpers import BF16, F32, VLLM, as_bf16, as_f32, bf, gelu, mismatch, norm, random_leaves

from gemma_jax.model.moe import MixtureOfExperts
from gemma_jax.testing.configs import TINY_CONFIGS

pytestmark = pytest.mark.fast

CONFIG = TINY_CONFIGS["26b-a4b-tiny"]
D, E, X = CONFIG.hidden_size, 16, 4


def experts(numerics):
    """A module with the recipe's weights, and the weights in float32."""
    module = MixtureOfExperts(CONFIG, numerics)
    prefix = "layers/0/moe/"
    leaves = random_leaves(CONFIG.replace(num_hidden_layers=1, layer_types=()), numerics.dtype)
    weights = {}
    for path, value in leaves.items():
        if path.startswith(prefix):
            name = path.removeprefix(prefix)
            getattr(module, name)[...] = value
            weights[name] = as_f32(value)
    return module, weights


def stream(rows, seed=5):
    rng = np.random.default_rng(seed)
    return bf(2 * rng.standard_normal((1, rows, D))), bf(rng.standard_normal((1, rows, D)))


def top(scores):
    return np.argsort(-scores, axis=-1, kind="stable")[:, :X]


def route_hf(w, r):
    u = norm(r)
    u = bf(bf(u * w["router_scale"]) * np.float32(D**-0.5))
    logits = bf(u @ w["router"].T)
    p = np.exp(logits - logits.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    chosen = top(p)
    g = np.take_along_axis(p, chosen, -1)
    return g / g.sum(-1, keepdims=True) * w["per_expert_scale"][chosen], chosen


def route_vllm(w, r):
    u = bf(bf(norm(r) * bf(D**-0.5)) * w["router_scale"])
    logits = u @ w["router"].T
    chosen = top(logits)
    e = np.take_along_axis(logits, chosen, -1)
    e = np.exp(e - e.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True) * w["per_expert_scale"][chosen], chosen


def emulated(w, r, dense, vllm):
    """One row and one expert at a time, rounded as docs/numerics.md says."""
    gates, chosen = (route_vllm if vllm else route_hf)(w, r)
    x = norm(r, w["pre_norm"])
    out = []
    for row in range(len(r)):
        total = np.zeros(D, np.float32)
        for gate, e in zip(gates[row], chosen[row], strict=True):
            a, b = (bf(w["gate_up"][e, i] @ x[row]) for i in (0, 1))
            y = w["down"][e] @ bf(bf(gelu(a)) * b)
            total += bf(y * gate) if vllm else bf(y) * gate
        out.append(bf(total))
    b = norm(np.stack(out), w["post_norm"])
    return bf(norm(dense, w["dense_post_norm"]) + b)


@pytest.mark.parametrize("rows", [3, 24])  # gathered experts, scanned experts
@pytest.mark.parametrize("numerics", [BF16, VLLM], ids=["hf", "vllm"])
def test_experts_match_a_loop_in_both_settings(numerics, rows):
    module, w = experts(numerics)
    r, dense = stream(rows)
    y = jax.jit(lambda r, d: module(r, d, numerics))(as_bf16(r), as_bf16(dense))
    vllm = numerics is VLLM
    assert mismatch(y, emulated(w, r[0], dense[0], vllm)[None]) < 0.02
    assert mismatch(y, emulated(w, r[0], dense[0], not vllm)[None]) > 0.05


@pytest.mark.parametrize("numerics", [F32, BF16, VLLM], ids=["f32", "hf", "vllm"])
def test_gathered_and_scanned_experts_agree(numerics):
    module, _ = experts(numerics)
    r, _ = stream(8)
    x = jnp.asarray(r[0]).astype(numerics.dtype)
    gates, chosen = module._route(x, numerics)
    gathered = module._gathered(x, gates, chosen, numerics)
    scanned = module._scanned(x, gates, chosen, numerics)
    if numerics is F32:
        np.testing.assert_allclose(gathered, scanned, atol=1e-5)
    else:
        assert mismatch(gathered, as_f32(scanned)) < 0.02
    assert len(np.unique(chosen)) > X


def test_a_tie_goes_to_the_lower_expert():
    module, _ = experts(VLLM)
    module.router[...] = jnp.zeros_like(module.router[...])
    _, chosen = module._route(as_bf16(stream(2)[0][0]), VLLM)
    assert chosen.tolist() == [[0, 1, 2, 3]] * 2


def test_gates_are_shares_times_the_scale_of_the_expert():
    module, w = experts(F32)
    r = stream(5)[0][0]
    gates, chosen = module._route(jnp.asarray(r), F32)
    shares = np.asarray(gates) / w["per_expert_scale"][np.asarray(chosen)]
    np.testing.assert_allclose(shares.sum(-1), 1, rtol=1e-5)
    assert (np.diff(shares, axis=-1) <= 0).all()
