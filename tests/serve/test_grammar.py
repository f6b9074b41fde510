"""Grammars of response_format: what a constrained model can write, and what is refused."""

import json

import jsonschema
import numpy as np
import pytest

from gemma_jax.errors import RequestError, UnsupportedError
from gemma_jax.model_source import bundled_model
from gemma_jax.serve.grammar import GrammarCompiler, response_grammar
from gemma_jax.tokenizer import Tokenizer

VOCAB, EOS = 4096, (1, 106, 50)
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["old", "new"]}, "maxItems": 3},
        "home": {"$ref": "#/$defs/place"},
    },
    "required": ["name", "age", "home"],
    "additionalProperties": False,
    "$defs": {
        "place": {
            "type": "object",
            "properties": {"zip": {"type": "string", "pattern": "^[0-9]{5}$"}},
            "required": ["zip"],
            "additionalProperties": False,
        }
    },
}


def schema_format(schema, **fields):
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, **fields}}


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.from_dir(bundled_model("nano"))


@pytest.fixture(scope="module")
def compiler(tokenizer):
    return GrammarCompiler(tokenizer, VOCAB, EOS)


def allowed(state, vocab=VOCAB):
    mask = state.mask()
    assert mask.dtype == np.uint32
    assert mask.shape == (-(-vocab // 32),)
    return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))


def accepts(compiler, tokenizer, grammar, text):
    state = compiler.start(grammar)
    for token in tokenizer.encode(text, add_bos=False):
        if token not in allowed(state):
            return False
        state.accept(token)
    return bool(set(allowed(state)) & set(EOS))


@pytest.mark.parametrize("seed", range(8))
def test_random_ids_under_the_mask_satisfy_the_schema(compiler, tokenizer, seed):
    rng = np.random.default_rng(seed)
    state, ids = compiler.start(response_grammar(schema_format(PERSON, strict=True))), []
    while not state.finished:
        ids.append(int(rng.choice(allowed(state))))
        state.accept(ids[-1])
    assert set(allowed(state)) == set(EOS)
    jsonschema.validate(json.loads(tokenizer.decode(ids)), PERSON)


def test_a_model_stuck_on_white_space_is_led_on(compiler, tokenizer):
    texts = [tokenizer.decode([token], skip_special_tokens=False) for token in range(VOCAB)]
    spaces = {token for token, text in enumerate(texts) if text and not text.strip()}
    state, count = compiler.start(response_grammar({"type": "json_object"})), 0
    state.accept(tokenizer.encode("{", add_bos=False)[0])
    while found := spaces & set(allowed(state)):
        state.accept(int(min(found, key=lambda token: len(texts[token]))))
        count += 1
        assert count < 40
    assert count


@pytest.mark.parametrize(
    ("options", "text", "expected"),
    [
        ({}, '{"a": true}', True),
        ({}, '{\n  "a": true\n}', True),
        ({}, '{"a": 1}', False),
        ({}, '{"a": true, "b": 1}', False),
        ({}, "<|channel>thought\nHm.<channel|>{\"a\": true}", False),
        ({"thinking": True}, "<|channel>thought\nHm {.\n<channel|>{\"a\": true}", True),
        ({"thinking": True}, "<|channel>thought\n<channel|>{\"a\": true}", True),
        ({"thinking": True}, '{"a": true}', True),
        ({"thinking": True}, "<|channel>thought\nHm.<channel|>Yes", False),
        ({"tools": True}, '<|tool_call>call:f{x:<|"|>y<|"|>}<tool_call|>', True),
        ({"tools": True}, '{"a": true}', True),
        ({"tools": True}, "call", False),
    ],
)  # fmt: skip
def test_a_turn_may_think_and_call_where_that_was_allowed(
    compiler, tokenizer, options, text, expected
):
    schema = {
        "type": "object",
        "properties": {"a": {"type": "boolean"}},
        "required": ["a"],
        "additionalProperties": False,
    }
    grammar = response_grammar(schema_format(schema), **options)
    assert accepts(compiler, tokenizer, grammar, text) is expected


def test_completions_of_one_grammar_do_not_share_their_state(compiler):
    grammar = response_grammar({"type": "json_object"})
    first, second = compiler.start(grammar), compiler.start(grammar)
    before = list(allowed(second))
    first.accept(int(allowed(first)[0]))
    assert list(allowed(second)) == before != list(allowed(first))


def test_an_id_outside_the_mask_is_refused(compiler):
    state = compiler.start(response_grammar({"type": "json_object"}))
    with pytest.raises(RequestError, match="response_format cannot be followed"):
        state.accept(300)


def test_a_vocabulary_larger_than_the_tokenizer_is_never_allowed(tokenizer):
    compiler = GrammarCompiler(tokenizer, VOCAB + 40, EOS)
    state = compiler.start(response_grammar({"type": "json_object"}))
    assert max(allowed(state, VOCAB + 40)) < VOCAB


def test_text_needs_no_grammar():
    assert response_grammar({"type": "text"}) is None


@pytest.mark.parametrize(
    ("response_format", "error", "message"),
    [
        ("json", RequestError, "response_format is 'json'"),
        ({}, RequestError, "response_format.type is None"),
        ({"type": "regex"}, UnsupportedError, "response_format.type is 'regex'"),
        ({"type": "json_object", "x": 1}, RequestError, "has the unknown field 'x'"),
        ({"type": "json_schema"}, RequestError, "response_format.json_schema is None"),
        (
            {"type": "json_schema", "json_schema": {"name": "a"}},
            RequestError,
            "json_schema.schema is None",
        ),
        (schema_format({}, strict=1), RequestError, "json_schema.strict is 1"),
        (schema_format({}, more=1), RequestError, "json_schema has the unknown field 'more'"),
        (schema_format({"type": "foo"}), RequestError, "schema cannot be used: Invalid type: foo"),
        (schema_format({"$ref": "#/x"}), RequestError, "schema cannot be used: Pointer '/x'"),
        (schema_format({"not": {}}), UnsupportedError, r"Unimplemented keys: \[\"not\"\]"),
    ],
)  # fmt: skip
def test_a_bad_format_is_refused_by_field(response_format, error, message):
    with pytest.raises(error, match=message):
        response_grammar(response_format)


def test_a_schema_nested_too_deeply_is_refused():
    schema = {"type": "object"}
    for _ in range(5000):
        schema = {"properties": {"a": schema}}
    with pytest.raises(RequestError, match="schema cannot be used"):
        response_grammar(schema_format(schema))
