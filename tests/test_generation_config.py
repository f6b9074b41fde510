"""generation_config.json: what is read, where missing ids come from, and what bad values say."""

import json

import pytest

from gemma_jax.errors import ConfigError, RequestError
from gemma_jax.generation_config import GenerationDefaults
from gemma_jax.sampling_params import SamplingParams


def write(folder, generation=None, config=None):
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_an_instruction_tuned_checkpoint_gives_its_ids_and_sampling_defaults(tmp_path):
    write(
        tmp_path,
        {
            "bos_token_id": 2,
            "pad_token_id": 0,
            "eos_token_id": [1, 106, 50],
            "suppress_tokens": [258883, 258882],
            "do_sample": True,
            "temperature": 1.0,
            "top_k": 64,
            "top_p": 0.95,
        },
        {"eos_token_id": 7},
    )
    defaults = GenerationDefaults.from_dir(tmp_path)
    assert defaults.eos_token_ids == (1, 106, 50)
    assert (defaults.bos_token_id, defaults.pad_token_id) == (2, 0)
    assert defaults.suppress_tokens == (258883, 258882)
    assert defaults.sampling_params() == SamplingParams(temperature=1.0, top_k=64, top_p=0.95)


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [
        ({"eos_token_id": 1}, {"eos_token_id": 7}, (1,)),
        ({}, {"eos_token_id": [1, 106], "text_config": {"eos_token_id": 9}}, (1, 106)),
        (None, {"text_config": {"eos_token_id": 9}}, (9,)),
        ({"eos_token_id": None}, {"eos_token_id": 7}, (7,)),
        (None, {"text_config": None}, ()),
        (None, None, ()),
    ],
)
def test_eos_falls_back_to_the_config_top_level_then_its_text_part(
    tmp_path, generation, config, expected
):
    write(tmp_path, generation, config)
    assert GenerationDefaults.from_dir(tmp_path).eos_token_ids == expected


def test_overrides_win_and_none_counts_as_unset(tmp_path):
    write(tmp_path, {"do_sample": True, "temperature": 0.7, "top_k": 64, "max_new_tokens": 256})
    params = GenerationDefaults.from_dir(tmp_path).sampling_params(
        temperature=0.2, top_k=None, seed=5, max_tokens=None
    )
    assert params == SamplingParams(temperature=0.2, top_k=64, seed=5, max_tokens=256)


@pytest.mark.parametrize("generation", [{"do_sample": False, "temperature": 1.0}, {}, None])
def test_without_do_sample_decoding_is_greedy_unless_asked_otherwise(tmp_path, generation):
    defaults = GenerationDefaults.from_dir(write(tmp_path, generation))
    assert defaults.sampling_params().greedy
    assert defaults.sampling_params(temperature=0.5).temperature == 0.5
    with pytest.raises(RequestError, match="n is 2 with temperature 0"):
        defaults.sampling_params(n=2)


def test_an_unknown_override_is_refused(tmp_path):
    with pytest.raises(RequestError, match="unknown sampling field 'max_new_tokens'"):
        GenerationDefaults.from_dir(tmp_path).sampling_params(max_new_tokens=3)


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("eos_token_id", "1", "token id"),
        ("eos_token_id", [1, -1], ">= 0"),
        ("eos_token_id", True, "token id"),
        ("bos_token_id", [2], "a token id"),
        ("suppress_tokens", [1.5], "integers"),
        ("do_sample", 1, "true or false"),
        ("temperature", -1, ">= 0"),
        ("temperature", "1.0", "number"),
        ("top_k", 6.5, "integer"),
        ("top_p", 0, "> 0 and <= 1"),
        ("top_p", 1.5, "> 0 and <= 1"),
        ("min_p", 2, "<= 1"),
        ("repetition_penalty", 0, "> 0"),
        ("max_new_tokens", 0, ">= 1"),
    ],
)
def test_a_bad_value_names_file_field_value_and_what_is_allowed(tmp_path, name, value, allowed):
    write(tmp_path, {name: value})
    with pytest.raises(ConfigError) as caught:
        GenerationDefaults.from_dir(tmp_path)
    message = str(caught.value)
    assert "generation_config.json" in message
    assert f"{name} is {value!r}" in message
    assert allowed in message


def test_a_bad_fallback_names_the_other_file_and_its_section(tmp_path):
    write(tmp_path, {}, {"text_config": {"eos_token_id": "x"}})
    with pytest.raises(ConfigError, match=r"config\.json: text_config\.eos_token_id is 'x'"):
        GenerationDefaults.from_dir(tmp_path)


@pytest.mark.parametrize(
    ("text", "words"), [("{", "not valid JSON"), ("[1]", "expected an object")]
)
def test_a_file_that_is_no_json_object_is_named(tmp_path, text, words):
    (tmp_path / "generation_config.json").write_text(text)
    with pytest.raises(ConfigError, match=words) as caught:
        GenerationDefaults.from_dir(tmp_path)
    assert "generation_config.json" in str(caught.value)


def test_json_nested_too_deeply_raises_and_names_the_file(tmp_path):
    (tmp_path / "generation_config.json").write_text("[" * 100_000)
    with pytest.raises(ConfigError, match=r"generation_config\.json is not valid JSON"):
        GenerationDefaults.from_dir(tmp_path)
