"""SamplingParams: defaults, normalised values, and one clear error per way to get it wrong."""

import dataclasses
import pickle

import numpy as np
import pytest

from gemma_jax.errors import GemmaError, RequestError
from gemma_jax.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from gemma_jax.sampling_params import SamplingParams


def test_defaults_are_those_that_vllm_users_expect():
    assert dataclasses.asdict(SamplingParams()) == {
        "n": 1,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "seed": None,
        "stop": (),
        "stop_token_ids": (),
        "ignore_eos": False,
        "max_tokens": 16,
        "min_tokens": 0,
        "logprobs": None,
        "prompt_logprobs": None,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "repetition_penalty": 1.0,
        "logit_bias": None,
        "skip_special_tokens": True,
        "include_stop_str_in_output": False,
        "detokenize": True,
    }


def test_values_are_normalised_to_plain_python():
    params = SamplingParams(
        temperature=1,
        top_k=np.int64(5),
        top_p=np.float32(0.5),
        stop="END",
        stop_token_ids=[106, 50],
        logit_bias={"7": -100, 8: 1.5},
    )
    assert type(params.temperature) is float
    assert type(params.top_k) is int
    assert type(params.top_p) is float
    assert params.stop == ("END",)
    assert params.stop_token_ids == (106, 50)
    assert params.logit_bias == {7: -100.0, 8: 1.5}


def test_none_stands_for_no_stops_and_the_rest_of_the_context():
    params = SamplingParams.from_dict({"stop": None, "stop_token_ids": None, "max_tokens": None})
    assert params.stop == ()
    assert params.stop_token_ids == ()
    assert params.max_tokens is None


@pytest.mark.parametrize(("temperature", "greedy"), [(0, True), (0.0, True), (1e-3, False)])
def test_greedy_means_temperature_zero(temperature, greedy):
    assert SamplingParams(temperature=temperature).greedy is greedy


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("temperature", float("nan"), ">= 0"),
        ("temperature", float("inf"), "finite"),
        ("temperature", -0.1, ">= 0"),
        ("temperature", "hot", "number"),
        ("temperature", None, "number"),
        ("temperature", True, "number"),
        ("temperature", 10**400, "finite"),
        ("top_p", 0, "> 0 and <= 1"),
        ("top_p", 1.01, "> 0 and <= 1"),
        ("top_p", float("nan"), "> 0 and <= 1"),
        ("top_k", -2, "0 or -1 turns it off"),
        ("top_k", 1.5, "integer"),
        ("min_p", -0.1, ">= 0 and <= 1"),
        ("min_p", 1.1, ">= 0 and <= 1"),
        ("n", 0, ">= 1"),
        ("n", True, "integer"),
        ("seed", 1.0, "integer"),
        ("seed", 2**63, "9223372036854775807"),
        ("max_tokens", -1, ">= 1"),
        ("max_tokens", 0, ">= 1"),
        ("min_tokens", -1, ">= 0"),
        ("logprobs", 21, "<= 20"),
        ("logprobs", -1, ">= 0"),
        ("logprobs", True, "integer"),
        ("prompt_logprobs", 21, "<= 20"),
        ("presence_penalty", 2.5, ">= -2 and <= 2"),
        ("frequency_penalty", -2.5, ">= -2 and <= 2"),
        ("repetition_penalty", 0, "> 0"),
        ("stop", 5, "string or a list of strings"),
        ("stop", ["a", ""], "match everywhere"),
        ("stop", "", "match everywhere"),
        ("stop", [3], "string"),
        ("stop_token_ids", [1, -1], ">= 0"),
        ("stop_token_ids", [True], "integer"),
        ("stop_token_ids", 5, "list of token ids"),
        ("stop_token_ids", "5", "list of token ids"),
        ("logit_bias", {1: 100.5}, ">= -100 and <= 100"),
        ("logit_bias", {1: float("nan")}, "finite"),
        ("logit_bias", {-1: 1}, ">= 0"),
        ("logit_bias", {"x": 1}, "integer"),
        ("logit_bias", [1], "mapping"),
        ("ignore_eos", 1, "True or False"),
        ("skip_special_tokens", "no", "True or False"),
        ("include_stop_str_in_output", None, "True or False"),
        ("detokenize", 0, "True or False"),
    ],
)
def test_a_bad_value_names_argument_and_what_is_allowed(name, value, allowed):
    with pytest.raises(RequestError) as caught:
        SamplingParams(**{name: value})
    assert name in str(caught.value)
    assert allowed in str(caught.value)
    assert isinstance(caught.value, ValueError)
    assert isinstance(caught.value, GemmaError)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"n": 2, "temperature": 0}, ["n is 2", "temperature"]),
        ({"min_tokens": 17}, ["min_tokens is 17", "max_tokens (16)"]),
        ({"stop": "x", "detokenize": False}, ["stop", "detokenize=True"]),
    ],
)
def test_contradicting_fields_are_both_named(fields, words):
    with pytest.raises(RequestError) as caught:
        SamplingParams(**fields)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("max_new_tokens", "use max_tokens"),
        ("num_return_sequences", "use n"),
        ("temprature", "did you mean temperature?"),
        ("best_of", "allowed: n, temperature"),
    ],
)
def test_an_unknown_field_lists_the_allowed_ones(name, hint):
    with pytest.raises(RequestError, match="unknown sampling field") as caught:
        SamplingParams.from_dict({name: 1})
    assert hint in str(caught.value)
    assert "repetition_penalty" in str(caught.value)


def test_replace_returns_a_validated_copy():
    params = SamplingParams(seed=3)
    assert params.replace(max_tokens=2) == SamplingParams(seed=3, max_tokens=2)
    assert params.max_tokens == 16
    with pytest.raises(RequestError, match="top_p"):
        params.replace(top_p=2)
    with pytest.raises(RequestError, match="unknown sampling field"):
        params.replace(nonsense=1)


def test_params_are_frozen_and_survive_pickling():
    params = SamplingParams(stop=["a"], logit_bias={1: 2})
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.n = 2
    assert pickle.loads(pickle.dumps(params)) == params


def test_ids_outside_the_vocabulary_are_named():
    SamplingParams(stop_token_ids=[9], logit_bias={9: 1}).check_vocab(10)
    with pytest.raises(RequestError, match="stop_token_ids holds 10; allowed are 0 to 9"):
        SamplingParams(stop_token_ids=[10]).check_vocab(10)
    with pytest.raises(RequestError, match="logit_bias has the key 10; allowed are 0 to 9"):
        SamplingParams(logit_bias={10: 1}).check_vocab(10)


def test_outputs_carry_the_documented_fields():
    completion = CompletionOutput(index=0, text="a", token_ids=[5])
    assert not completion.finished
    completion.finish_reason = "length"
    assert completion.finished
    output = RequestOutput("r", None, [2, 3], outputs=[completion])
    assert [field.name for field in dataclasses.fields(output)] == [
        "request_id",
        "prompt",
        "prompt_token_ids",
        "prompt_logprobs",
        "outputs",
        "finished",
        "metrics",
        "num_cached_tokens",
        "error",
    ]
    assert Logprob(-0.5, 1, "a").rank == 1


def test_metrics_are_durations_once_the_moment_came():
    waiting = RequestMetrics(arrival_time=10.0)
    assert waiting.time_to_first_token is None
    assert waiting.latency is None
    done = RequestMetrics(arrival_time=10.0, first_token_time=10.5, finished_time=12.0)
    assert done.time_to_first_token == 0.5
    assert done.latency == 2.0
