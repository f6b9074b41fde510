"""What our model gives the tokens of a record: teacher-forced candidates, and greedy runs."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from gemma_jax.errors import RecordError
from gemma_jax.outputs import PositionLogprobs
from gemma_jax.parity.records import Candidates, Stream
from gemma_jax.sampling_params import MAX_LOGPROBS, SamplingParams

if TYPE_CHECKING:
    from gemma_jax.llm import LLM

MIN_LOGPROBS = 2


def num_candidates(streams: Sequence[Stream]) -> int:
    """How many candidates to ask our model for, to meet those of a reference."""
    widest = max(stream.candidates.ids.shape[1] for stream in streams)
    return min(max(widest, MIN_LOGPROBS), MAX_LOGPROBS)


def teacher_forced(llm: "LLM", streams: Sequence[Stream], k: int) -> Iterator[Candidates]:
    """Our candidates at every token of each stream, from one prefill of the whole sequence.

    Fast prefill does not apply to it: every layer runs on every row.

    Args:
      k: best candidates a position; the token itself is listed too.

    Raises:
      RecordError: a sequence is longer than the model's context.
    """
    for stream in streams:
        length = len(stream.prompt) + len(stream.tokens)
        if length > llm.max_model_len:
            raise RecordError(
                f"{stream.where}: {length} tokens, but the context holds {llm.max_model_len};"
                " raise --max-model-len (up to the model's own) or leave the row out"
            )
    for stream in streams:
        scored = llm.score(stream.sequence, k)
        yield _candidates(scored[len(stream.prompt) :])


def greedy(
    llm: "LLM", streams: Sequence[Stream], k: int, max_tokens: int | None = None
) -> Iterator[tuple[list[int], Candidates]]:
    """Our greedy tokens for each prompt, with their candidates.

    All prompts are handed over together: batches are the model's own (`max_num_seqs`).

    Args:
      max_tokens: of each prompt; by default as many as its stream has.

    Raises:
      RecordError: a prompt cannot run.
    """
    params = [
        SamplingParams(
            temperature=0, max_tokens=max_tokens or len(x.tokens), ignore_eos=True, logprobs=k
        )
        for x in streams
    ]
    prompts = [{"prompt_token_ids": stream.prompt.tolist()} for stream in streams]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    for stream, output in zip(streams, outputs, strict=True):
        if output.error is not None:
            raise RecordError(f"{stream.where}: {output.error}")
        completion = output.outputs[0]
        yield list(completion.token_ids), _candidates(completion.logprobs or [])


def _candidates(positions: Sequence[PositionLogprobs | None]) -> Candidates:
    return Candidates.of(
        [[(token, entry.logprob) for token, entry in (at or {}).items()] for at in positions]
    )
