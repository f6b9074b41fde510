"""The prompt as a completion repeats it: its text, and where each of its tokens is in it."""

import codecs
import itertools
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from gemma_jax.outputs import Logprob
from gemma_jax.serve.bodies import TextOrIds
from gemma_jax.tokenizer import Tokenizer, require_tokenizer

_NO_TOKEN = Logprob(0.0)


@dataclass(frozen=True)
class Echo:
    """What precedes a completion.

    Attributes:
      text: of the prompt; "" where it is not repeated.
      token_ids: its tokens, BOS included; none where their log-probabilities are not asked for.
      offsets: where each of them begins in `text`; one without text stands before the next.
      first: the first of them, which has no log-probability.
    """

    text: str = ""
    token_ids: Sequence[int] = ()
    offsets: Sequence[int] = ()
    first: Logprob = _NO_TOKEN


def echo(
    prompt: TextOrIds, token_ids: Sequence[int], tokenizer: Tokenizer | None, tokens: bool
) -> Echo:
    """Return the echo of a prompt.

    Args:
      prompt: as it was sent.
      token_ids: what the model reads.
      tokenizer: of the model.
      tokens: also say where each token is.

    Raises:
      RequestError: there is no tokenizer.
    """
    tokenizer = require_tokenizer(tokenizer, "echo")
    text = prompt if isinstance(prompt, str) else tokenizer.decode(prompt)
    if not tokens:
        return Echo(text)
    offsets = _offsets(prompt, token_ids, tokenizer)
    first = Logprob(0.0, decoded_token=tokenizer.id_to_token(token_ids[0]))
    return Echo(text, token_ids, offsets, first)


def _offsets(prompt: TextOrIds, token_ids: Sequence[int], tokenizer: Tokenizer) -> list[int]:
    """Where each token begins in the text; a byte inside a character begins where that does."""
    hidden: Collection[int] = () if isinstance(prompt, str) else tokenizer.special_ids
    offsets: list[int] = []
    offset = 0
    if isinstance(prompt, str) and token_ids[0] == tokenizer.bos_token_id:
        offsets, token_ids, offset = [0], token_ids[1:], _begin(prompt, token_ids[0], tokenizer)
    for is_byte, run in itertools.groupby(token_ids, lambda i: i in tokenizer.byte_ids):
        if is_byte:
            ids = list(run)
            text = tokenizer.decode(ids)
            offsets += (offset + begun for begun in _characters_before(ids, text, tokenizer))
            offset += len(text)
            continue
        for token in run:
            offsets.append(offset)
            offset += 0 if token in hidden else len(tokenizer.id_to_token(token) or "")
    return offsets


def _begin(text: str, bos: int, tokenizer: Tokenizer) -> int:
    """Where a text begins after the BOS that it spells itself: however many, they are one token."""
    spelled = tokenizer.id_to_token(bos) or ""
    rest = text
    while spelled and rest.startswith(spelled):
        rest = rest.removeprefix(spelled)
    return len(text) - len(rest)


def _characters_before(ids: Sequence[int], text: str, tokenizer: Tokenizer) -> Sequence[int]:
    """Characters that have ended before each of some byte tokens, which together are `text`."""
    if len(text) == len(ids):  # ASCII, or no UTF-8: each byte is a character or a U+FFFD
        return range(len(ids))
    decoder = codecs.getincrementaldecoder("utf-8")(errors="ignore")
    spellings = [tokenizer.id_to_token(i) or "" for i in ids]  # <0xE2>
    ended = [len(decoder.decode(bytes([int(s[3:5], 16)]))) for s in spellings]
    return [0, *itertools.accumulate(ended)][:-1]
