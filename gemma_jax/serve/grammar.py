"""Constrained output: `response_format` to a grammar, and which ids the grammar allows next.

llguidance (extra `serve`) parses grammars and computes masks; it needs no torch.
"""

import functools
import json
import reprlib
from collections.abc import Mapping, Sequence
from typing import Any

import llguidance
import numpy as np

from gemma_jax.errors import RequestError, UnsupportedError
from gemma_jax.tokenizer import Tokenizer

WHITESPACE = r"(\n[ ]{0,32}|[ ])"
"""JSON whitespace that is allowed between two tokens: a space, or a line end and an indent.

Without a bound a small model may go on with spaces for ever.
"""
_JSON_OPTIONS = {
    "whitespace_flexible": True,
    "whitespace_pattern": WHITESPACE,
    # A discriminated union is written with oneOf; its branches exclude each other anyway.
    "coerce_one_of": True,
}
_TYPES = ("text", "json_object", "json_schema")
_SCHEMA_FIELDS = ("name", "description", "schema", "strict")
_MAX_CACHED_GRAMMARS = 64


def response_grammar(
    response_format: Any, *, thinking: bool = False, tools: bool = False
) -> str | None:
    """Return the llguidance grammar of a chat's `response_format`, or None for free text.

    Args:
      response_format: {"type": "text" | "json_object"}, or {"type": "json_schema",
        "json_schema": {"name", "schema", "strict"}}; the schema is kept to with and without
        `strict`.
      thinking: a thought may come before the answer.
      tools: tool calls may come in place of the answer.

    Raises:
      RequestError: a field is missing or wrong, or the schema is invalid; names the field.
      UnsupportedError: another type of format, or a keyword that cannot be enforced.
    """
    schema = _schema(response_format)
    if schema is None:
        return None
    try:
        text = json.dumps(schema | {"x-guidance": _JSON_OPTIONS})
        answer = llguidance.LLMatcher.grammar_from_json_schema(text)
    except (ValueError, RecursionError) as error:
        raise _schema_error(str(error)) from error
    is_error, messages = llguidance.LLMatcher.validate_grammar_with_warnings(answer)
    if is_error:
        raise _schema_error(messages[0])
    return _turn_grammar(text, thinking, tools)


def _schema(response_format: Any) -> dict[str, Any] | None:
    if not isinstance(response_format, Mapping):
        raise RequestError(
            f"response_format is {reprlib.repr(response_format)}; expected an object with a type"
        )
    kind = response_format.get("type")
    if kind not in _TYPES:
        error = UnsupportedError if isinstance(kind, str) else RequestError
        raise error(
            f"response_format.type is {reprlib.repr(kind)}; supported are {', '.join(_TYPES)}"
        )
    unknown = set(response_format) - {"type", "json_schema"}
    if unknown:
        raise RequestError(
            f"response_format has the unknown field {sorted(map(str, unknown))[0]!r}"
        )
    if kind == "text":
        return None
    if kind == "json_object":
        return {"type": "object"}
    return _named_schema(response_format.get("json_schema"))


def _named_schema(named: Any) -> dict[str, Any]:
    where = "response_format.json_schema"
    if not isinstance(named, Mapping):
        raise RequestError(f"{where} is {reprlib.repr(named)}; expected an object with a schema")
    for name in named:
        if name not in _SCHEMA_FIELDS:
            raise RequestError(f"{where} has the unknown field {reprlib.repr(name)}")
    if not isinstance(named.get("name", ""), str):
        raise RequestError(f"{where}.name is {reprlib.repr(named['name'])}; expected a string")
    if not isinstance(named.get("strict") or False, bool):
        raise RequestError(
            f"{where}.strict is {reprlib.repr(named['strict'])}; expected true or false"
        )
    schema = named.get("schema")
    if not isinstance(schema, Mapping):
        raise RequestError(f"{where}.schema is {reprlib.repr(schema)}; expected a JSON schema")
    return dict(schema)


def _schema_error(problem: str) -> RequestError | UnsupportedError:
    reason = " ".join(problem.split())[:500]
    unsupported = "Unimplemented" in reason or "not supported" in reason
    error = UnsupportedError if unsupported else RequestError
    return error(f"response_format.json_schema.schema cannot be used: {reason}")


def _turn_grammar(schema: str, thinking: bool, tools: bool) -> str:
    """Return the grammar of a whole model turn in which `schema` is the answer."""
    rules = [
        f"start: {'thought? ' if thinking else ''}{'(answer | calls)' if tools else 'answer'}",
        f"answer: %json {schema}",
    ]
    if thinking:
        rules.append('thought: <|channel> "thought\\n" TEXT? <channel|>')
    if tools:
        rules.append('calls: (<|tool_call> "call:" (TEXT | <|"|>)+ <tool_call|>)+')
    if thinking or tools:
        rules.append("TEXT: /(.|\\n)+/")
    return json.dumps({"grammars": [{"lark_grammar": "\n".join(rules)}]})


class GrammarCompiler:
    """Starts grammars on one tokenizer; the first one of each text is compiled, others copied.

    Building it takes some two seconds of one core for a vocabulary of 262,144.

    Args:
      tokenizer: of the model.
      vocab_size: of the model, which may be larger than the tokenizer's.
      eos_ids: the ids that may end a finished output.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_ids: Sequence[int]):
        self._tokenizer = llguidance.LLTokenizer(
            tokenizer.to_json(),
            n_vocab=vocab_size,
            eos_token=list(eos_ids),
            slices=llguidance.LLTokenizer.json_slices(),
        )
        self._vocab_size = vocab_size
        self._compiled = functools.lru_cache(maxsize=_MAX_CACHED_GRAMMARS)(self._compile)

    def start(self, grammar: str) -> "GrammarState":
        """Return the state of one completion before its first token.

        Raises:
          RequestError: the grammar is invalid or too large.
        """
        return GrammarState(self._compiled(grammar).deep_copy(), self._vocab_size)

    def _compile(self, grammar: str) -> llguidance.LLMatcher:
        matcher = llguidance.LLMatcher(self._tokenizer, grammar, log_level=0)
        _raise_error(matcher)
        return matcher


class GrammarState:
    """How far one completion has come in its grammar."""

    def __init__(self, matcher: llguidance.LLMatcher, vocab_size: int):
        self._matcher = matcher
        self._words = -(-vocab_size // 32)

    def mask(self) -> np.ndarray:
        """Return which ids may come next: uint32 [ceil(V / 32)].

        Id i is bit i % 32 of word i // 32. Once the output is complete the EOS ids are left.

        Raises:
          RequestError: the grammar has become too complex to follow.
        """
        mask = np.frombuffer(self._matcher.compute_bitmask(), np.uint32)
        _raise_error(self._matcher)
        return mask[: self._words]

    def accept(self, token: int) -> None:
        """Take the token that was generated.

        Raises:
          RequestError: `mask` did not allow it.
        """
        self._matcher.consume_token(token)
        _raise_error(self._matcher)

    @property
    def finished(self) -> bool:
        """Whether the output is complete and cannot go on: only an EOS may follow."""
        return self._matcher.is_stopped()


def _raise_error(matcher: llguidance.LLMatcher) -> None:
    if matcher.is_error():
        reason = " ".join(matcher.get_error().split())[:500]
        raise RequestError(f"response_format cannot be followed: {reason}")
