"""Where the tokens of an echoed prompt are in its text."""

import pytest

from gemma_jax.serve.echo import echo
from gemma_jax.text_side import TextSide


@pytest.fixture(scope="module")
def tokenizer():
    return TextSide.load("nano").tokenizer


@pytest.mark.parametrize("text", ["Hello<bos>x<|turn>user", "<bos><bos>x", "<bos>Hi", "Hi é🙂 you"])
def test_every_token_is_where_the_text_spells_it(text, tokenizer):
    ids = tokenizer.encode(text)
    found = echo(text, ids, tokenizer, tokens=True)
    assert found.text == text
    assert len(found.offsets) == len(ids)
    for token, at in zip(ids[1:], found.offsets[1:], strict=True):
        spelled = tokenizer.id_to_token(token).replace("▁", " ")
        if token not in tokenizer.byte_ids:
            assert text[at : at + len(spelled)] == spelled
