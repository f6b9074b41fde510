"""Tokenizer: one BOS, special ids, decoding while tokens arrive, stop strings."""

import itertools
import json

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from gemma_jax.errors import CheckpointError, RequestError
from gemma_jax.tokenizer import (
    IncrementalDetokenizer,
    StopChecker,
    Tokenizer,
    require_tokenizer,
)

SPECIAL = ["<pad>", "<eos>", "<bos>", "<unk>", "<|turn>", "<turn|>"]
WORDS = ["▁t", "he", "▁the", "ab", "▁▁"]


def byte_fallback_backend(strip_leading_space=False):
    """A small BPE tokenizer built as Gemma's is: metaspace, byte fallback, fused decoder."""
    vocab = {token: i for i, token in enumerate(SPECIAL)}
    for token in [f"<0x{b:02X}>" for b in range(256)] + list("▁abehtüé.!<>") + WORDS:
        vocab.setdefault(token, len(vocab))
    merges = [("▁", "t"), ("h", "e"), ("▁t", "he"), ("a", "b"), ("▁", "▁")]
    backend = tokenizers.Tokenizer(
        models.BPE(vocab, merges, byte_fallback=True, unk_token="<unk>", fuse_unk=True)
    )
    backend.normalizer = normalizers.Replace(" ", "▁")
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if strip_leading_space:
        steps.append(decoders.Strip(" ", 1, 0))
    backend.decoder = decoders.Sequence(steps)
    backend.add_special_tokens(SPECIAL)
    return backend


def byte_level_backend():
    """A BPE tokenizer whose tokens are single bytes of UTF-8, spelt in the byte-level alphabet."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate(SPECIAL + alphabet)}
    backend = tokenizers.Tokenizer(models.BPE(vocab, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(SPECIAL)
    return backend


BYTE_FALLBACK = Tokenizer(byte_fallback_backend())
TOKENIZERS = {
    "byte fallback": BYTE_FALLBACK,
    "stripped": Tokenizer(byte_fallback_backend(strip_leading_space=True)),
    "byte level": Tokenizer(byte_level_backend()),
}
TEXTS = st.text(alphabet=st.sampled_from(" abhet.ü€😀👩🏽\u200d🚀日\n"), max_size=30)
each_tokenizer = pytest.mark.parametrize("tokenizer", TOKENIZERS.values(), ids=TOKENIZERS.keys())


def in_pieces(ids, cuts):
    bounds = sorted({0, len(ids), *(cut % (len(ids) + 1) for cut in cuts)})
    return [ids[a:b] for a, b in itertools.pairwise(bounds)]


# --- encoding and special ids ---------------------------------------------------------------


@pytest.mark.parametrize("text", ["the ab", "<bos>the ab", "<bos><bos>the ab"])
def test_encoding_gives_exactly_one_bos(text):
    ids = BYTE_FALLBACK.encode(text)
    assert ids[0] == 2
    assert ids.count(2) == 1
    assert BYTE_FALLBACK.decode(ids) == "the ab"


def test_a_post_processor_that_adds_bos_does_not_double_it():
    backend = byte_fallback_backend()
    backend.post_processor = processors.TemplateProcessing(
        single="<bos> $A <eos>", special_tokens=[("<bos>", 2), ("<eos>", 1)]
    )
    tokenizer = Tokenizer(backend)
    assert tokenizer.encode("ab") == BYTE_FALLBACK.encode("ab")
    assert tokenizer.encode("ab", add_bos=False) == BYTE_FALLBACK.encode("ab", add_bos=False)


def test_without_add_bos_the_text_is_encoded_as_it_is():
    assert BYTE_FALLBACK.encode("ab", add_bos=False)[0] != 2
    assert BYTE_FALLBACK.encode("<bos>ab", add_bos=False).count(2) == 1
    assert BYTE_FALLBACK.encode("", add_bos=False) == []
    assert BYTE_FALLBACK.encode("") == [2]


def test_truncation_and_padding_stored_in_the_file_are_ignored():
    backend = byte_fallback_backend()
    backend.enable_truncation(4)
    backend.enable_padding(length=64)
    assert Tokenizer(backend).encode("ab" * 10) == BYTE_FALLBACK.encode("ab" * 10)


@pytest.mark.parametrize("text", [None, 5, b"ab", "\ud800"])
def test_text_that_is_no_unicode_string_is_refused(text):
    with pytest.raises(RequestError, match="text is"):
        BYTE_FALLBACK.encode(text)


def test_special_ids_come_from_the_config_then_from_the_usual_names():
    assert BYTE_FALLBACK.bos_token_id == 2
    assert BYTE_FALLBACK.eos_token_id == 1
    assert BYTE_FALLBACK.pad_token_id == 0
    assert BYTE_FALLBACK.turn_end_token_id == 5
    config = {"bos_token": {"content": "<|turn>"}, "eos_token": "<turn|>", "pad_token": None}
    configured = Tokenizer(byte_fallback_backend(), config)
    assert configured.bos_token_id == 4
    assert configured.eos_token_id == 5
    assert configured.pad_token_id == 0
    assert configured.encode("ab")[0] == 4


def test_a_vocabulary_without_special_tokens_has_no_special_ids():
    tokenizer = Tokenizer(tokenizers.Tokenizer(models.BPE({"a": 0}, [])))
    assert tokenizer.bos_token_id is None
    assert tokenizer.turn_end_token_id is None
    assert tokenizer.encode("a") == [0]


def test_ids_and_tokens_map_both_ways():
    assert BYTE_FALLBACK.id_to_token(2) == "<bos>"
    assert BYTE_FALLBACK.token_to_id("<bos>") == 2
    assert BYTE_FALLBACK.id_to_token(BYTE_FALLBACK.vocab_size) is None
    assert BYTE_FALLBACK.token_to_id("nothing like it") is None
    with pytest.raises(RequestError, match="token id is -1"):
        BYTE_FALLBACK.id_to_token(-1)


def test_decode_hides_special_tokens_unless_asked():
    ids = BYTE_FALLBACK.encode("ab<turn|>")
    assert BYTE_FALLBACK.decode(ids) == "ab"
    assert BYTE_FALLBACK.decode(ids, skip_special_tokens=False) == "<bos>ab<turn|>"
    with pytest.raises(RequestError, match="out of range"):
        BYTE_FALLBACK.decode([-1])


# --- reading a folder -----------------------------------------------------------------------


def test_a_folder_is_read_with_its_tokenizer_config(tmp_path):
    byte_fallback_backend().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<turn|>"}))
    tokenizer = Tokenizer.from_dir(tmp_path)
    assert tokenizer is not None
    assert tokenizer.eos_token_id == 5
    assert tokenizer.encode("the ab") == BYTE_FALLBACK.encode("the ab")


def test_without_a_tokenizer_file_text_names_the_remedy(tmp_path):
    tokenizer = Tokenizer.from_dir(tmp_path)
    assert tokenizer is None
    with pytest.raises(RequestError, match=r"a text prompt needs a tokenizer.*prompt_token_ids"):
        require_tokenizer(tokenizer, "a text prompt")
    assert require_tokenizer(BYTE_FALLBACK, "a text prompt") is BYTE_FALLBACK


def test_a_broken_tokenizer_file_is_named(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json is not a readable tokenizer"):
        Tokenizer.from_dir(tmp_path)


# --- decoding while tokens arrive -----------------------------------------------------------


@each_tokenizer
@settings(max_examples=150, deadline=None)
@given(text=TEXTS, cuts=st.lists(st.integers(0, 200), max_size=12))
def test_pieces_join_to_the_whole_text_and_hold_no_half_character(tokenizer, text, cuts):
    ids = tokenizer.encode(text)
    stream = IncrementalDetokenizer(tokenizer)
    pieces = [stream.push(piece) for piece in in_pieces(ids, cuts)]
    assert "\ufffd" not in "".join(pieces)
    assert "".join(pieces) + stream.finish() == tokenizer.decode(ids)


@each_tokenizer
@pytest.mark.parametrize("skip_special_tokens", [True, False])
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_any_ids_decode_to_the_same_text_in_pieces(tokenizer, skip_special_tokens, data):
    # One id past the vocabulary too: decoding drops it, even between the bytes of a character.
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size), max_size=25))
    cuts = data.draw(st.lists(st.integers(0, 200), max_size=12))
    stream = IncrementalDetokenizer(tokenizer, skip_special_tokens)
    text = "".join(stream.push(piece) for piece in in_pieces(ids, cuts)) + stream.finish()
    assert text == tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)


@settings(max_examples=100, deadline=None)
@given(
    data=st.lists(st.sampled_from(["😀".encode(), "é".encode(), b"\xff", b"\xf0\x9f"]), max_size=6),
    between=st.sampled_from(["", "<turn|>", "ab"]),
)
def test_runs_of_raw_bytes_decode_as_the_whole_does(data, between):
    ids = [
        token
        for chunk in data
        for token in [
            *(BYTE_FALLBACK.token_to_id(f"<0x{byte:02X}>") for byte in chunk),
            *BYTE_FALLBACK.encode(between, add_bos=False),
        ]
    ]
    stream = IncrementalDetokenizer(BYTE_FALLBACK)
    text = "".join(stream.push([token]) for token in ids) + stream.finish()
    assert text == BYTE_FALLBACK.decode(ids)


def test_an_emoji_appears_whole_once_a_settled_token_follows():
    ids = BYTE_FALLBACK.encode("😀ab", add_bos=False)
    stream = IncrementalDetokenizer(BYTE_FALLBACK)
    assert [stream.push([token]) for token in ids] == ["", "", "", "", "😀ab"]
    assert stream.finish() == ""


def test_a_character_cut_off_at_the_end_becomes_replacement_characters():
    ids = BYTE_FALLBACK.encode("ab😀", add_bos=False)[:-1]
    stream = IncrementalDetokenizer(BYTE_FALLBACK)
    assert stream.push(ids) == "ab"
    assert stream.finish() == "\ufffd" * 3


def test_each_token_is_decoded_a_bounded_number_of_times():
    class Counting(Tokenizer):
        decoded = 0

        def decode(self, ids, skip_special_tokens=True):
            self.decoded += len(ids)
            return super().decode(ids, skip_special_tokens)

    tokenizer = Counting(byte_fallback_backend())
    stream = IncrementalDetokenizer(tokenizer)
    ids = tokenizer.encode("the ab 😀 " * 50)
    for token in ids:
        stream.push([token])
    assert tokenizer.decoded <= 3 * len(ids)


# --- stop strings ---------------------------------------------------------------------------


def run(checker, pieces):
    shown = []
    for piece in pieces:
        text, hit = checker.push(piece)
        shown.append(text)
        if hit is not None:
            return "".join(shown), hit
    return "".join(shown) + checker.finish(), None


def first_to_complete(text, stop):
    """The reference: read the text character by character and look at its end."""
    for end in range(1, len(text) + 1):
        ending = [s for s in stop if text[:end].endswith(s)]
        if ending:
            hit = max(ending, key=len)
            return text[: end - len(hit)], hit
    return text, None


@settings(max_examples=300, deadline=None)
@given(
    text=st.text(alphabet="ab\n", max_size=20),
    stop=st.lists(st.text(alphabet="ab\n", min_size=1, max_size=4), max_size=3),
    cuts=st.lists(st.integers(0, 40), max_size=8),
    include=st.booleans(),
)
def test_stop_strings_are_found_however_the_text_is_cut(text, stop, cuts, include):
    before, hit = first_to_complete(text, stop)
    expected = before + hit if include and hit else before
    assert run(StopChecker(stop, include), in_pieces(text, cuts)) == (expected, hit)


@settings(max_examples=200, deadline=None)
@given(
    text=st.text(alphabet="ab", max_size=20),
    stop=st.text(alphabet="ab", min_size=1, max_size=4),
)
def test_exactly_what_may_begin_a_stop_string_is_held_back(text, stop):
    checker, shown = StopChecker([stop]), ""
    for end in range(1, len(text) + 1):
        piece, hit = checker.push(text[end - 1])
        shown += piece
        if hit is not None:
            break
        may_begin = max(n for n in range(len(stop)) if text[:end].endswith(stop[:n]))
        assert shown == text[: end - may_begin]


def test_after_a_hit_nothing_more_is_shown():
    checker = StopChecker(["END"])
    assert checker.push("a EN") == ("a ", None)
    assert checker.push("D more") == ("", "END")
    assert checker.push("even more") == ("", "END")
    assert checker.finish() == ""
    assert checker.hit == "END"


def test_held_text_comes_out_at_the_end_when_no_stop_completed():
    checker = StopChecker(["END"])
    assert checker.push("a EN") == ("a ", None)
    assert checker.finish() == "EN"


@pytest.mark.parametrize("stop", ["END", [""], [3]])
def test_stop_strings_must_be_a_list_of_non_empty_strings(stop):
    with pytest.raises(RequestError, match="expected a list of non-empty strings"):
        StopChecker(stop)
