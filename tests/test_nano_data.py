"""The bundled nano model's files, and the code that builds its text and trains it."""

import json
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.nano.config import GENERATION, NANO, parameter_count
from bench.nano.forward import logits
from bench.nano.pieces import pieces, sentences
from bench.nano.sources import Section
from bench.nano.tokenizer import PACKAGE_FOLDER, SPECIAL_TOKENS, VOCAB_SIZE
from bench.nano.train import initial_weights, merge
from bench.nano.turns import conversation, exchange, verse_exchange
from gemma_jax.config import FULL, ModelConfig
from gemma_jax.generation_config import GenerationDefaults
from gemma_jax.kernels import Kernels
from gemma_jax.model.cache import CacheLayout, init_cache
from gemma_jax.model.context import PrefillContext
from gemma_jax.numerics import Numerics
from gemma_jax.testing.configs import TINY_CONFIGS
from gemma_jax.tokenizer import Tokenizer

STORY = Section(
    "novel",
    "A Book",
    "1",
    (
        'Mr. Bell came in at last. "Where is the lamp?" he asked. The servant had no answer.',
        "The rain fell on the roof of the old house. Nobody in the house spoke of the lamp.",
    )
    * 20,
)


@pytest.fixture(scope="module")
def backend():
    return tokenizers.Tokenizer.from_file(str(PACKAGE_FOLDER / "tokenizer.json"))


@pytest.fixture(scope="module")
def tokenizer():
    found = Tokenizer.from_dir(PACKAGE_FOLDER)
    assert found is not None
    return found


# --- tokenizer ------------------------------------------------------------------------------------


def _round_trip(tokenizer, text):
    return tokenizer.decode(tokenizer.encode(text, add_bos=False), skip_special_tokens=False)


@pytest.mark.parametrize(
    "text",
    [
        "Once upon a time, there was a king.",
        "  two spaces before and after  ",
        "\n\nlines\r\nand\ttabs\n",
        "emoji 😀 and a family 👩‍👩‍👧, flags 🇫🇷",
        "naïve café, 日本語, العربية, \u0000\u0007",
        "<bos><|turn>user\nHi<turn|>\n<|turn>model\n",
        "",
        " ",
    ],
)
def test_every_byte_of_a_text_comes_back(tokenizer, text):
    assert _round_trip(tokenizer, text) == text


@settings(max_examples=200, deadline=None)
@given(text=st.text(st.characters(exclude_characters="▁", exclude_categories=["Cs"])))
def test_any_unicode_text_round_trips(tokenizer, text):
    assert _round_trip(tokenizer, text) == text


def test_the_space_mark_itself_decodes_to_a_space(tokenizer):
    assert _round_trip(tokenizer, "a▁b") == "a b"


def test_special_tokens_have_the_published_ids(backend):
    assert {i: backend.id_to_token(i) for i in SPECIAL_TOKENS} == SPECIAL_TOKENS
    assert backend.get_vocab_size() == VOCAB_SIZE == NANO.vocab_size


def test_special_tokens_written_in_text_become_their_ids(tokenizer):
    ids = tokenizer.encode("<|turn>user\nHi<turn|>", add_bos=False)
    assert (ids[0], ids[-1]) == (105, 106)
    assert not tokenizer.special_ids.intersection(ids[1:-1])


def test_plain_text_never_gives_a_special_token(tokenizer):
    ids = tokenizer.encode("turn | bos > <b o s> <|tur n>", add_bos=False)
    assert not tokenizer.special_ids.intersection(ids)


def test_the_tokenizer_adds_no_bos_of_its_own(backend):
    assert 2 not in backend.encode("Hello", add_special_tokens=True).ids


def test_no_space_is_added_in_front(tokenizer):
    first = tokenizer.encode("king", add_bos=False)
    assert tokenizer.decode(first) == "king"
    assert first != tokenizer.encode(" king", add_bos=False)


def test_every_byte_has_a_token(tokenizer):
    assert len(tokenizer.byte_ids) == 256


def test_english_takes_fewer_than_one_token_for_two_characters(tokenizer):
    text = "The king went out of the city with all his people, and they were glad."
    assert len(tokenizer.encode(text, add_bos=False)) < len(text) / 2


# --- config ---------------------------------------------------------------------------------------


def test_nano_is_wired_like_e2b():
    e2b = ModelConfig.from_preset("e2b")
    same = ("head_dim", "global_head_dim", "use_double_wide_mlp", "num_key_value_heads",
            "final_logit_softcapping", "sliding_rope", "full_rope", "attention_k_eq_v")  # fmt: skip
    assert {f: getattr(NANO, f) for f in same} == {f: getattr(e2b, f) for f in same}
    assert [layer.index for layer in NANO.layers if layer.kind == FULL] == [4, 9]
    assert NANO.sliding_window <= 128
    assert NANO.has_per_layer_inputs
    assert NANO.num_kv_shared_layers == 5


def test_nano_fits_in_twelve_mebibytes():
    assert 2 * parameter_count(NANO) < 12 * 2**20 - 64 * 2**10


def test_the_package_holds_the_config_of_the_training_script():
    stored = json.loads((PACKAGE_FOLDER / "config.json").read_text())
    assert ModelConfig.from_hf(stored) == NANO
    assert json.loads((PACKAGE_FOLDER / "generation_config.json").read_text()) == GENERATION


def test_generation_ends_at_end_of_text_and_end_of_turn():
    defaults = GenerationDefaults.from_dir(PACKAGE_FOLDER)
    assert set(defaults.eos_token_ids) == {1, 106, 50}
    assert defaults.do_sample


# --- training text --------------------------------------------------------------------------------


def test_an_abbreviation_ends_no_sentence():
    assert sentences("Mr. Bell spoke. Mrs. Bell left.") == ["Mr. Bell spoke.", "Mrs. Bell left."]


def test_pieces_begin_and_end_with_whole_sentences():
    cut = pieces(STORY, random.Random(0))
    assert len(cut) > 1
    for piece in cut:
        assert piece[0] in 'MTWN"'
        assert piece[-1] in '.?!"'


def test_pieces_lose_no_text():
    for seed in range(5):
        whole = " ".join(" ".join(STORY.paragraphs).split())
        cut = " ".join(" ".join(pieces(STORY, random.Random(seed))).split())
        assert whole.startswith(cut)


def test_a_conversation_ends_with_the_end_of_a_turn(tokenizer):
    rng = random.Random(1)
    piece = pieces(STORY, rng)[0]
    pair = None
    while pair is None:
        pair = exchange(STORY, piece, rng)
    ids = tokenizer.encode(conversation([pair], rng), add_bos=False)
    assert ids[0] == 2
    assert ids[-1] == 106
    assert ids.count(105) in (2, 3)


def test_a_verse_look_up_names_the_verses_it_answers():
    verses = tuple(f"Verse {i}." for i in range(1, 9))
    request, answer = verse_exchange(Section("verse", "Ruth", "2", verses), random.Random(3))
    place = request.split("2:")[1].split(" ")[0].rstrip("?.").split("-")
    assert answer == " ".join(verses[int(place[0]) - 1 : int(place[-1])])


# --- training forward -----------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def relaxed_rank_promotion():
    """The decoder broadcasts over leading axes."""
    with jax.numpy_rank_promotion("allow"):
        yield


@pytest.fixture(scope="module")
def tiny():
    config = TINY_CONFIGS["e2b-tiny"]
    numerics = Numerics("float32")
    return config, numerics, merge(config, initial_weights(config, 0), numerics)


def _document(seed, length):
    ids = np.random.default_rng(seed).integers(107, 1000, length).astype(np.int32)
    ids[0] = 2
    return ids


def test_the_training_forward_equals_prefill_past_the_window(tiny):
    config, numerics, model = tiny
    length = 2 * config.sliding_window
    ids = jnp.asarray(_document(0, length)[None])
    layout = CacheLayout.plan(config, 1, length, length, page_size=16)
    rows = jnp.arange(length, dtype=jnp.int32)[None]

    def inference(ids):
        cache = init_cache(config, layout, jnp.float32)
        start, lengths = jnp.zeros(1, jnp.int32), jnp.full(1, length, jnp.int32)
        context = PrefillContext(
            config, numerics, Kernels(), layout, cache, start, lengths, length, False
        )
        return model.logits(model.prefill(ids, context, rows, fast=False), context.ops)

    training = jax.jit(lambda ids: logits(model, ids, numerics))(ids)
    np.testing.assert_allclose(training, jax.jit(inference)(ids), atol=2e-5)


def test_packed_documents_do_not_see_each_other(tiny):
    _, numerics, model = tiny
    forward = jax.jit(lambda ids: logits(model, ids, numerics))
    first, second = _document(1, 50), _document(2, 78)
    packed = forward(jnp.asarray(np.concatenate([first, second])[None]))[0, 50:]
    alone = forward(jnp.asarray(np.pad(second, (0, 50))[None]))[0, :78]
    np.testing.assert_allclose(packed, alone, atol=2e-5)
