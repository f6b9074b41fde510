"""ModelConfig: what a config.json means, defaults, contradictions, and the published sizes."""

import json
import math

import pytest

from gemma_jax.checkpoint.names import hf_shapes, leaf_shapes, unused_shapes
from gemma_jax.config import FULL, FULL_ROPE, PRESETS, SLIDING, SLIDING_ROPE, ModelConfig
from gemma_jax.errors import ConfigError
from gemma_jax.model.transformer import abstract_model
from gemma_jax.numerics import Numerics
from gemma_jax.sharding import named_parameters
from gemma_jax.testing.configs import TINY_CONFIGS

pytestmark = pytest.mark.fast


def e2b_file(**changes):
    """A text-only config.json of the E2B."""
    return PRESETS["e2b"].to_hf() | changes


# --- places and defaults -----------------------------------------------------------------------


@pytest.mark.parametrize("name", [*PRESETS, *TINY_CONFIGS])
def test_a_written_config_reads_back_the_same(name):
    config = (PRESETS | TINY_CONFIGS)[name]
    data = json.loads(json.dumps(config.to_hf()))
    # The 12B is written under the type of the text-only class, which is the same network.
    assert ModelConfig.from_hf(data) == config.replace(model_type="gemma4_text")


@pytest.mark.parametrize(
    ("outer", "inner"), [("gemma4", "gemma4_text"), ("gemma4_unified", "gemma4_unified_text")]
)
def test_nested_and_top_level_files_give_the_same_text_config(outer, inner):
    text = e2b_file(model_type=inner)
    nested = {"model_type": outer, "text_config": text, "vision_config": {"hidden_size": 7}}
    assert ModelConfig.from_hf(nested) == ModelConfig.from_hf(text)
    assert ModelConfig.from_hf(text).model_type == inner


def test_absent_keys_have_the_defaults_of_transformers():
    config = ModelConfig.from_hf({"model_type": "gemma4_text"})
    assert config.hidden_size_per_layer_input == 256
    assert config.global_head_dim == 512
    assert config.sliding_window == 512
    assert config.num_global_key_value_heads is None
    assert config.num_kv_shared_layers == 0
    assert config.final_logit_softcapping is None
    assert config.sliding_rope == SLIDING_ROPE
    assert config.full_rope == FULL_ROPE
    assert not any((config.attention_k_eq_v, config.use_double_wide_mlp, config.enable_moe_block))
    full = [i for i, kind in enumerate(config.layer_types) if kind == FULL]
    assert full == [5, 11, 17, 23, 29]


def test_null_means_the_default_except_where_it_has_a_meaning():
    config = ModelConfig.from_hf(
        e2b_file(sliding_window=None, final_logit_softcapping=None, eos_token_id=None)
    )
    assert config.sliding_window == 512
    assert config.final_logit_softcapping is None
    assert config.eos_token_id is None


def test_partial_rotary_factor_absent_from_a_proportional_entry_is_one():
    ropes = {FULL: {"rope_type": "proportional", "rope_theta": 1e6}}
    config = ModelConfig.from_hf(e2b_file(rope_parameters=ropes))
    assert config.full_rope.partial_rotary_factor == 1.0
    assert config.sliding_rope == SLIDING_ROPE


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
@pytest.mark.parametrize("nested", [False, True])
def test_dtype_is_found_under_both_spellings_and_beside_a_nested_text_config(key, nested):
    text = e2b_file()
    del text["dtype"]
    data = {"model_type": "gemma4", "text_config": text} if nested else text
    assert ModelConfig.from_hf(data | {key: "float16"}).dtype == "float16"


def test_the_last_layer_is_full_attention_whatever_the_file_says():
    config = ModelConfig.from_hf(
        {
            "model_type": "gemma4_text",
            "num_hidden_layers": 3,
            "layer_types": [FULL, SLIDING, SLIDING],
        }
    )
    assert config.layer_types == (FULL, SLIDING, FULL)


def test_a_file_saved_by_transformers_has_its_global_heads_in_per_layer_config():
    data = TINY_CONFIGS["12b-tiny"].to_hf()
    heads = {
        "head_dim": data.pop("global_head_dim"),
        "num_key_value_heads": data.pop("num_global_key_value_heads"),
    }
    data["per_layer_config"] = {"5": heads, "11": heads}
    assert ModelConfig.from_hf(data) == TINY_CONFIGS["12b-tiny"]


def test_several_eos_ids_are_kept():
    assert ModelConfig.from_hf(e2b_file(eos_token_id=[1, 106])).eos_token_id == (1, 106)


def test_unknown_keys_are_listed_and_change_nothing():
    config = ModelConfig.from_hf(e2b_file(a_new_key=3))
    assert config.ignored_fields == ("a_new_key",)
    assert config == PRESETS["e2b"]


def test_a_config_is_read_from_a_file_or_its_folder(tmp_path):
    file = tmp_path / "config.json"
    with pytest.raises(ConfigError, match=r"config\.json: no such file"):
        ModelConfig.from_file(tmp_path)
    file.write_text("{nope")
    with pytest.raises(ConfigError, match=r"not valid JSON"):
        ModelConfig.from_file(file)
    file.write_text(json.dumps(e2b_file()))
    assert ModelConfig.from_file(file) == ModelConfig.from_file(tmp_path) == PRESETS["e2b"]


# --- bad values --------------------------------------------------------------------------------

BAD_VALUES = {
    "model_type": ("gemma3", "'gemma4_text'"),
    "quantization_config": ({"bits": 4}, "not supported"),
    "hidden_size": (0, "from 1 to"),
    "num_hidden_layers": ("30", "integer"),
    "sliding_window": (-1, "from 1 to"),
    "max_position_embeddings": (10**40, "2147483647"),
    "layer_types": (["sliding_attention", "global"], "'full_attention'"),
    "num_kv_shared_layers": (35, "num_hidden_layers=35"),
    "num_key_value_heads": (3, "divide num_attention_heads=8"),
    "head_dim": (255, "even"),
    "hidden_activation": ("silu", "gelu_pytorch_tanh"),
    "attention_bias": (True, "False"),
    "attention_dropout": (0.1, "0"),
    "tie_word_embeddings": (False, "True"),
    "use_double_wide_mlp": ("yes", "True, False"),
    "use_bidirectional_attention": ("all", "'vision'"),
    "dtype": ("int8", "'bfloat16'"),
    "rms_norm_eps": (0.0, r"\(0, 1\)"),
    "final_logit_softcapping": (-30.0, "above 0"),
    "hidden_size_per_layer_input": (-1, "from 0 to"),
    "vocab_size_per_layer_input": (10, "from 262144 to"),
    "eos_token_id": (262_144, "vocab_size=262144"),
    "pad_token_id": (-1, "vocab_size=262144"),
    "rope_parameters": ([], "object"),
}


@pytest.mark.parametrize("name", BAD_VALUES)
def test_a_bad_value_raises_naming_field_value_and_what_is_allowed(name):
    value, allowed = BAD_VALUES[name]
    with pytest.raises(ConfigError, match=allowed) as info:
        ModelConfig.from_hf(e2b_file(**{name: value}))
    assert name in str(info.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layer_types": [FULL]}, "layer_types has 1 entries, but num_hidden_layers=35"),
        ({"num_kv_shared_layers": 34}, "leaves no full_attention layer"),
        ({"enable_moe_block": True}, "num_experts: missing"),
        (
            {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 5,
             "moe_intermediate_size": 8},
            "top_k_experts=5: at most num_experts=4",
        ),
        ({"rope_parameters": {"global": {}}}, "unknown key.*'global'"),
        ({"rope_parameters": {FULL: {"rope_type": "yarn"}}}, "full_attention.rope_type='yarn'"),
        ({"rope_parameters": {FULL: {"beta_fast": 2}}}, "unknown field.*beta_fast"),
        ({"rope_parameters": {FULL: {"rope_theta": math.inf}}}, "rope_theta=inf"),
        ({"per_layer_config": {"3": {"head_dim": 512}}}, "full-attention layers"),
        (
            {"per_layer_config": {str(i): {"num_key_value_heads": 1} for i in range(4, 35, 5)}},
            "needs attention_k_eq_v",
        ),
        (
            {"per_layer_config": {str(i): {"sliding_window": 1} for i in range(4, 35, 5)}},
            "unsupported override.*sliding_window",
        ),
        (
            {"global_head_dim": 512,
             "per_layer_config": {str(i): {"head_dim": 256} for i in range(4, 35, 5)}},
            "global_head_dim=512.*256",
        ),
    ],
)  # fmt: skip
def test_contradicting_values_raise_naming_both(changes, message):
    with pytest.raises(ConfigError, match=message):
        ModelConfig.from_hf(e2b_file(**changes))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ([], "expected a JSON object"),
        ({}, "model_type=None"),
        ({"model_type": "gemma4"}, "text_config: missing"),
        ({"model_type": "gemma4", "text_config": 1}, "text_config=1"),
        (
            {"model_type": "gemma4", "text_config": {"model_type": "gemma4_vision"}},
            "text_config.model_type='gemma4_vision'",
        ),
        (
            {"model_type": "gemma4", "text_config": {"quantization_config": {}}},
            "quantization_config",
        ),
    ],
)
def test_a_file_that_is_no_gemma_4_config_raises(data, message):
    with pytest.raises(ConfigError, match=message):
        ModelConfig.from_hf(data)


def test_unknown_presets_and_fields_raise_with_the_known_ones():
    with pytest.raises(ConfigError, match=r"preset='e3b'.*'e2b', 'e4b', '12b', '26b-a4b', '31b'"):
        ModelConfig.from_preset("e3b")
    with pytest.raises(ConfigError, match=r"width"):
        PRESETS["e2b"].replace(width=3)
    with pytest.raises(ConfigError, match=r"head_dim=3"):
        PRESETS["e2b"].replace(head_dim=3)


# --- the published sizes -----------------------------------------------------------------------

# Elements of the language model without and with the unused K and V, and of `layers.*`.
ELEMENTS = {
    "e2b": (4_628_569_379, 4_647_449_891, 1_863_341_603),
    "e4b": (7_463_013_418, 7_518_069_034, 3_945_824_554),
    "12b": (11_907_350_320, 11_907_350_320, 10_900_713_520),
    "26b-a4b": (25_233_141_790, 25_233_141_790, 24_494_941_470),
    "31b": (30_697_345_340, 30_697_345_340, 29_288_053_820),
}


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_has_the_published_number_of_parameters(name):
    config = ModelConfig.from_preset(name)
    used, unused = hf_shapes(config), unused_shapes(config)
    elements = sum(map(math.prod, used.values()))
    in_layers = sum(math.prod(s) for n, s in used.items() if n.startswith("layers."))
    all_elements = elements + sum(map(math.prod, unused.values()))
    assert (elements, all_elements, in_layers) == ELEMENTS[name]


@pytest.mark.parametrize("name", PRESETS)
def test_the_model_of_a_preset_has_the_leaves_of_its_checkpoint(name):
    config = ModelConfig.from_preset(name)
    model = named_parameters(abstract_model(config, Numerics()))
    assert {path: p.get_value().shape for path, p in model.items()} == leaf_shapes(config)
    assert sum(p.get_value().size for p in model.values()) == ELEMENTS[name][0]


def test_e2b_has_sixty_unused_tensors_and_the_published_tables():
    e2b = hf_shapes(PRESETS["e2b"])
    assert len(unused_shapes(PRESETS["e2b"])) == 60
    assert math.prod(e2b["embed_tokens_per_layer.weight"]) == 2_348_810_240
    assert math.prod(e2b["embed_tokens.weight"]) == 402_653_184


def test_shared_layers_read_the_last_owner_of_their_kind():
    e2b = [layer.kv_source for layer in PRESETS["e2b"].layers]
    assert e2b == [*range(15), *[13, 13, 13, 13, 14] * 4]
    e4b = PRESETS["e4b"].layers
    assert [x.kv_source for x in e4b[:24]] == list(range(24))
    assert {(x.kind, x.kv_source) for x in e4b[24:]} == {(SLIDING, 22), (FULL, 23)}
    for name in ("12b", "26b-a4b", "31b"):
        assert all(layer.owns_kv for layer in PRESETS[name].layers)


@pytest.mark.parametrize(
    ("name", "elements"),
    [("e2b", 9_216), ("e4b", 28_672), ("12b", 172_032), ("26b-a4b", 112_640), ("31b", 450_560)],
)
def test_cache_elements_a_token_are_the_published_ones(name, elements):
    owners = PRESETS[name].owner_layers
    assert sum(2 * x.num_kv_heads * x.head_dim for x in owners) == elements


def test_only_k_eq_v_full_layers_take_the_global_head_count():
    full = PRESETS["12b"].layers[5]
    assert (full.num_kv_heads, full.num_groups, full.head_dim, full.k_eq_v) == (1, 16, 512, True)
    sliding = PRESETS["12b"].layers[4]
    assert (sliding.num_kv_heads, sliding.head_dim, sliding.k_eq_v) == (8, 256, False)
    ignored = PRESETS["e4b"].replace(num_global_key_value_heads=1).layers[5]
    assert (ignored.num_kv_heads, ignored.k_eq_v) == (2, False)


def test_only_kv_shared_layers_of_e2b_are_double_wide():
    widths = [layer.intermediate_size for layer in PRESETS["e2b"].layers]
    assert widths == [6144] * 15 + [12_288] * 20
    assert {layer.intermediate_size for layer in PRESETS["e4b"].layers} == {10_240}


@pytest.mark.parametrize("text", ["[" * 100_000, '{"hidden_size": ' + "9" * 5000 + "}"])
def test_json_that_python_cannot_hold_raises_and_names_the_file(tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=r"config\.json: not valid JSON"):
        ModelConfig.from_file(tmp_path)


def test_a_config_that_cannot_be_read_raises_and_names_the_file(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"config\.json: cannot be read"):
        ModelConfig.from_file(tmp_path / "file" / "config.json")
