"""Outputs of other tools as rows of a record: vLLM `RequestOutput` dumps, OpenAI-API completions.

Both are read from their JSON form. Token ids are needed, not only text: vLLM's server gives them
with `"return_token_ids": true` or, one by one, with `"return_tokens_as_token_ids": true`.
"""

import re
from typing import Any

from gemma_jax.errors import RecordError

_TOKEN_ID = re.compile(r"token_id:(\d+)")
_IDS_REMEDY = (
    'ask the server for ids: "return_token_ids": true and "return_tokens_as_token_ids": true'
)

Row = dict[str, Any]


def is_foreign(value: Row) -> bool:
    """Whether this is an output of vLLM or of an OpenAI-API server."""
    return "outputs" in value or "choices" in value or "response" in value


def foreign_row(value: Row, number: int, where: str) -> tuple[str, str | None, Row]:
    """Engine, model name where it is given, and the row of a record.

    Raises:
      RecordError: a field that the row needs is missing.
    """
    if "outputs" in value:
        return "vllm", None, _vllm_row(value, number, where)
    body, row_id = value, value.get("id", number)
    if "response" in value:  # a line of a batch file
        row_id = value.get("custom_id", number)
        response = value["response"] or {}
        body = response.get("body") if isinstance(response, dict) else None
        if value.get("error") or not isinstance(body, dict) or "choices" not in body:
            return "openai", None, {"id": row_id, "error": str(value.get("error") or body)}
    model = body.get("model")
    if model is not None and not isinstance(model, str):
        raise RecordError(f"{where}: model={model!r:.60}: expected a string")
    return "openai", model, {"id": row_id} | completion_row(body, where)


def _vllm_row(value: Row, number: int, where: str) -> Row:
    outputs = value["outputs"]
    if not isinstance(outputs, list) or not outputs or not isinstance(outputs[0], dict):
        raise RecordError(f"{where}: outputs={outputs!r:.60}: expected a list of completions")
    first = outputs[0]
    row = {
        "id": value.get("request_id", number),
        "prompt_token_ids": value.get("prompt_token_ids"),
        "token_ids": first.get("token_ids"),
    }
    steps = first.get("logprobs")
    if steps is None:
        return row
    if not isinstance(steps, list):
        raise RecordError(f"{where}: logprobs={steps!r:.60}: expected a list, one entry a token")
    return row | {"top": [_vllm_step(step, f"{where}, token {t}") for t, step in enumerate(steps)]}


def _vllm_step(step: Any, where: str) -> list[list[Any]]:
    try:
        return [
            [int(token), entry["logprob"] if isinstance(entry, dict) else entry]
            for token, entry in step.items()
        ]
    except (AttributeError, KeyError, ValueError):
        raise RecordError(f"{where}: logprobs: expected a mapping id → {{logprob, …}}") from None


def completion_row(body: Row, where: str, ids_of: dict[str, int] | None = None) -> Row:
    """Tokens and candidates of the first choice of a completion, or of a chat completion.

    Args:
      body: the response.
      where: words for messages.
      ids_of: text of a token → id, for servers that give only texts.

    Raises:
      RecordError: no choice, no logprobs, or a text that is no token of its own.
    """
    choices = body.get("choices")
    if not isinstance(choices, list) or not choices or not isinstance(choices[0], dict):
        raise RecordError(f"{where}: choices={choices!r:.60}: expected a completion")
    choice = choices[0]
    logprobs = choice.get("logprobs")
    if not isinstance(logprobs, dict):
        raise RecordError(f'{where}: no logprobs; ask for "logprobs": 2 or more')
    token_ids, top = _positions(logprobs, _Lookup(where, ids_of or {}), where)
    prompt = choice.get("prompt_token_ids") or body.get("prompt_token_ids")
    token_ids = choice.get("token_ids") or token_ids
    return {"prompt_token_ids": prompt, "token_ids": token_ids, "top": top}


def _positions(logprobs: Row, lookup: "_Lookup", where: str) -> tuple[list[int], list[Any]]:
    """Ids and candidates, of either kind of completion."""
    content = logprobs.get("content")
    try:
        if isinstance(content, list):
            return _chat_positions(content, lookup)
        return _completion_positions(logprobs, lookup)
    except RecordError:
        raise
    except (AttributeError, KeyError, TypeError, ValueError):
        raise RecordError(
            f"{where}: logprobs={logprobs!r:.60}: expected those of a completion (tokens,"
            " token_logprobs, top_logprobs) or of a chat completion (content)"
        ) from None


class _Lookup:
    """Token texts to ids."""

    def __init__(self, where: str, ids_of: dict[str, int]):
        self._where, self._ids_of = where, ids_of

    def __call__(self, text: Any) -> int:
        match = _TOKEN_ID.fullmatch(str(text))
        if match:
            return int(match[1])
        if text not in self._ids_of:
            raise RecordError(f"{self._where}: token {text!r} has no known id; {_IDS_REMEDY}")
        return self._ids_of[text]

    def pairs(self, texts: dict[Any, Any]) -> list[list[Any]]:
        return [[self(text), logprob] for text, logprob in texts.items()]


def _completion_positions(logprobs: Row, lookup: _Lookup) -> tuple[list[int], list[Any]]:
    tokens, top = logprobs.get("tokens") or [], logprobs.get("top_logprobs") or []
    ids = [lookup(token) for token in tokens]
    steps = []
    for text, value, step in zip(tokens, logprobs.get("token_logprobs") or [], top, strict=False):
        # The first position of an echoed prompt has neither.
        steps.append([] if step is None else lookup.pairs({text: value} | step))
    return ids, steps


def _chat_positions(content: list[Row], lookup: _Lookup) -> tuple[list[int], list[Any]]:
    ids = [lookup(entry.get("token")) for entry in content]
    steps = [
        lookup.pairs(
            {entry["token"]: entry.get("logprob")}
            | {x["token"]: x.get("logprob") for x in entry.get("top_logprobs") or []}
        )
        for entry in content
    ]
    return ids, steps
