"""A planted bug is caught and located: as unexplained flips, or by the sub-block trace."""

import dataclasses

import jax.numpy as jnp
import planted
import pytest

from gemma_jax.config import SLIDING, ModelConfig
from gemma_jax.model import transformer
from gemma_jax.model.layers import widen
from gemma_jax.numerics import Numerics
from gemma_jax.parity import trace as trace_module
from gemma_jax.testing.checkpoint import write_checkpoint
from gemma_jax.testing.configs import TINY_CONFIGS

NANO_HIDDEN = "nano-bfloat16-hidden.npz"
MOE_HIDDEN = "26b-a4b-tiny-float32-hidden.npz"
MOE_SEED = 5


@pytest.fixture(scope="module")
def reference():
    return planted.nano_record()


@pytest.fixture(scope="module")
def nano():
    return planted.load(planted.NANO, "bfloat16")


def flips(reference, config, leaves):
    record, noise = reference
    comparison = planted.compare_planted(record, config, leaves, noise=noise)
    print(*map(str, comparison.unexplained[:3]), sep="\n")
    return comparison


def place(name, config, leaves):
    """Layer and name of the first sub-block that differs."""
    first = planted.trace_planted(name, config, leaves).first
    return None if first is None else (first.layer, first.name)


def another(config, **changes):
    """A config that no cached program was compiled for."""
    return config.replace(max_position_embeddings=8190, **changes)


def test_the_right_model_has_no_unexplained_flip_and_no_sub_block_that_differs(reference, nano):
    comparison = flips(reference, *nano)
    assert len(comparison.positions.token) > 700
    assert comparison.unexplained == []
    assert not comparison.failed
    assert place(NANO_HIDDEN, *nano) is None


def test_norm_weights_with_one_added_are_caught_as_flips_and_found_in_the_first_norm(
    reference, nano
):
    config, leaves = nano
    bad = planted.one_plus(leaves, ("norm", "layernorm"))
    assert flips(reference, config, bad).failed
    assert place(NANO_HIDDEN, config, bad) == (None, "per_layer_inputs")


def test_one_norm_with_one_added_is_found_in_its_layer(nano):
    config, leaves = nano
    bad = planted.one_plus(leaves, "layers/6/pre_feedforward_layernorm")
    assert place(NANO_HIDDEN, config, bad) == (6, "pre_feedforward_norm")


def wrong_window(config, change=1):
    return another(config, sliding_window=config.sliding_window + change)


def swapped_rope_bases(config):
    full, sliding = config.full_rope, config.sliding_rope
    return another(
        config,
        full_rope=dataclasses.replace(full, rope_theta=sliding.rope_theta),
        sliding_rope=dataclasses.replace(sliding, rope_theta=full.rope_theta),
    )


@pytest.fixture
def donors_shifted_by_one(monkeypatch):
    """Plants the bug where layers are derived, and returns what makes a config of its own."""
    donor = ModelConfig._donor
    monkeypatch.setattr(
        ModelConfig, "_donor", lambda self, kind: donor(self, kind) - (kind == SLIDING)
    )
    return lambda config: config.replace(max_position_embeddings=8189)


@pytest.mark.parametrize("change", [-1, 1])
def test_window_off_by_one_is_found_in_the_attention_of_the_first_sliding_layer(nano, change):
    config, leaves = nano
    assert place(NANO_HIDDEN, wrong_window(config, change), leaves) == (0, "attention")


def test_swapped_rope_bases_are_found_in_the_first_rotation(nano):
    config, leaves = nano
    assert place(NANO_HIDDEN, swapped_rope_bases(config), leaves) == (0, "q_norm_rope")


def test_donor_shifted_by_one_is_found_in_the_first_shared_layer(nano, donors_shifted_by_one):
    config, leaves = nano
    assert place(NANO_HIDDEN, donors_shifted_by_one(config), leaves) == (5, "attention")


@pytest.mark.slow
def test_window_off_by_one_is_caught_as_flips_past_the_window(reference, nano):
    config, leaves = nano
    comparison = flips(reference, wrong_window(config), leaves)
    assert comparison.failed
    assert min(flip.position for flip in comparison.unexplained) >= config.sliding_window


@pytest.mark.slow
def test_swapped_rope_bases_are_caught_as_flips(reference, nano):
    config, leaves = nano
    assert len(flips(reference, swapped_rope_bases(config), leaves).unexplained) > 100


@pytest.mark.slow
def test_donor_shifted_by_one_is_caught_as_flips(reference, nano, donors_shifted_by_one):
    config, leaves = nano
    assert flips(reference, donors_shifted_by_one(config), leaves).failed


def test_rounded_per_layer_input_scale_is_found_by_the_trace(nano, monkeypatch):
    monkeypatch.setattr(Numerics, "scalar", Numerics.constant)
    assert place(NANO_HIDDEN, *nano) == (None, "per_layer_inputs")


def test_softcap_in_one_rounding_is_found_by_the_trace(nano, monkeypatch):
    def softcap(logits, cap, numerics):
        return numerics.round(jnp.tanh(widen(logits) / cap) * cap)

    for module in (trace_module, transformer):
        monkeypatch.setattr(module, "softcap", softcap)
    assert place(NANO_HIDDEN, *nano) == (None, "softcap")


@pytest.fixture(scope="module")
def moe(tmp_path_factory):
    folder = tmp_path_factory.mktemp("moe") / "model"
    write_checkpoint(TINY_CONFIGS["26b-a4b-tiny"], folder, MOE_SEED, "float32")
    return planted.load(folder, "float32")


@pytest.mark.slow
def test_lost_expert_scale_is_caught_in_float32_and_found_in_its_layer(moe):
    config, leaves = moe
    assert place(MOE_HIDDEN, config, leaves) is None
    name = "layers/2/moe/per_expert_scale"
    bad = leaves | {name: leaves[name].at[0].set(1.0)}
    assert place(MOE_HIDDEN, config, bad) == (2, "experts")
