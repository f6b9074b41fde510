"""One completion while the engine works on it: its request, its text, its scheduler entry."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from gemma_jax.errors import GemmaError
from gemma_jax.sequence import Sequence, TokenLogprobs
from gemma_jax.serve.entry import Entry
from gemma_jax.serve.request import CompletionDelta, EngineRequest
from gemma_jax.tokenizer import Tokenizer

if TYPE_CHECKING:  # its library is an extra
    from gemma_jax.serve.grammar import GrammarState

HOST_STOP_STEPS = 8
"""Decode steps a call for a row that a stop string may end, which only the host can see."""


@dataclass(eq=False)
class Running:
    """One completion that the engine works on."""

    request: EngineRequest
    completion: Sequence
    entry: Entry
    grammar: "GrammarState | None" = None

    def take(self, drawn: list[int], logprobs: list[TokenLogprobs] | None) -> CompletionDelta:
        """What the ids `drawn` by one call add; a failure of the grammar or the text ends it."""
        completion = self.completion
        before = len(completion.token_ids)
        text, error = "", None
        try:
            text = completion.extend(drawn, logprobs)
            if self.grammar is not None:
                for token in completion.token_ids[before:]:
                    self.grammar.accept(token)
        except GemmaError as problem:
            completion.finish_reason, error = "error", str(problem)
        return CompletionDelta(
            request_id=self.request.request_id,
            index=completion.index,
            text=text,
            token_ids=completion.token_ids[before:],
            logprobs=completion.output_logprobs(before),
            finish_reason=completion.finish_reason,
            stop_reason=completion.stop_reason,
            num_cached_tokens=self.entry.num_cached or 0,
            error=error,
        )


def start_completion(
    request: EngineRequest,
    index: int,
    entry_id: int,
    *,
    tokenizer: Tokenizer | None,
    grammar: "GrammarState | None",
    max_steps: int,
) -> Running:
    """Completion `index` of a request, not yet queued; `max_steps` decode steps a call at most."""
    prompt, params = request.prompt_token_ids, request.params
    completion = Sequence(
        prompt, params, index, _key(request.seed, index), request.max_tokens,
        request.eos_ids, tokenizer,
    )  # fmt: skip
    entry = Entry(
        entry_id=entry_id,
        tokens=list(prompt),
        prompt_len=len(prompt),
        max_total=len(prompt) + request.max_tokens,
        one_step=grammar is not None,
        max_steps=HOST_STOP_STEPS if params.stop else max_steps,
    )
    return Running(request, completion, entry, grammar)


def _key(seed: int, index: int) -> np.ndarray:
    """The random key of completion `index` of a request with `seed`: uint32 [2]."""
    return np.random.SeedSequence([seed % 2**64, index]).generate_state(2, np.uint32)
