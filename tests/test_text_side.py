"""The text side of a model makes checked requests, and does so without JAX."""

import subprocess
import sys

import pytest

from gemma_jax.errors import ConfigError, RequestError
from gemma_jax.sampling_params import SamplingParams
from gemma_jax.text_side import TextSide, prompt_text


@pytest.fixture(scope="module")
def text_side():
    return TextSide.load("nano", max_model_len=64)


def test_the_text_side_does_not_import_jax():
    code = (
        "import sys; from gemma_jax.text_side import TextSide\n"
        "from gemma_jax.sampling_params import SamplingParams\n"
        "TextSide.load('nano').make_request('hi', SamplingParams(), 'a')\n"
        "sys.exit('jax' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_request_is_cut_to_the_context(text_side):
    request = text_side.make_request("Once", SamplingParams(max_tokens=None), "r1")
    assert request.request_id == "r1"
    assert request.prompt_token_ids[0] == text_side.tokenizer.bos_token_id
    assert request.max_tokens == 64 - len(request.prompt_token_ids)
    assert request.eos_ids == (1, 106, 50)
    short = text_side.make_request("Once", SamplingParams(max_tokens=3, ignore_eos=True), "r2")
    assert (short.max_tokens, short.eos_ids) == (3, ())
    with pytest.raises(RequestError, match="64 tokens leave no room in a context of 64"):
        text_side.make_request([5] * 64, SamplingParams(), "r3")


def test_a_given_seed_is_kept_and_others_are_drawn_from_the_text_sides_seed():
    def seeds(seed):
        side = TextSide.load("nano", seed=seed)
        return [side.make_request("a", SamplingParams(), "r").seed for _ in range(2)]

    assert seeds(1) == seeds(1) != seeds(2)
    assert len(set(seeds(1))) == 2
    side = TextSide.load("nano")
    assert side.make_request("a", SamplingParams(seed=7), "r").seed == 7


def test_a_chat_ends_with_the_opening_of_the_models_turn(text_side):
    text = text_side.chat_prompt([{"role": "user", "content": "hello"}])
    assert text.startswith("<bos>")
    assert text.rstrip().endswith("<|turn>model")


def test_a_context_beyond_the_models_is_refused(text_side):
    with pytest.raises(ConfigError, match="max_model_len=9999999"):
        TextSide.load("nano", max_model_len=9_999_999)


def test_the_text_of_a_prompt_is_that_of_its_form():
    assert prompt_text("a") == prompt_text({"prompt": "a"}) == "a"
    assert prompt_text([1]) is prompt_text({"prompt_token_ids": [1]}) is None
