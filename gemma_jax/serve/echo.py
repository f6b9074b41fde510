"""The prompt as a completion repeats it: its text, and where each of its tokens is in it."""

from collections.abc import Sequence
from dataclasses import dataclass

from gemma_jax.outputs import Logprob
from gemma_jax.serve.bodies import TextOrIds
from gemma_jax.tokenizer import IncrementalDetokenizer, Tokenizer, require_tokenizer

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
    """Where each token begins in the text; one inside a character begins with that."""
    is_text = isinstance(prompt, str)
    bos = tokenizer.id_to_token(token_ids[0]) or ""
    added_bos = is_text and token_ids[0] == tokenizer.bos_token_id and not prompt.startswith(bos)
    detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens=not is_text)
    offsets, offset = [], 0
    for index, token in enumerate(token_ids):
        offsets.append(offset)
        if index > 0 or not added_bos:
            offset += len(detokenizer.push([token]))
    return offsets
