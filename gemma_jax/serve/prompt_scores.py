"""The prompts whose log-probabilities a request wants: scored one after another, chunk by chunk.

A pass of its own beside generation: that one may find the prompt in the prefix cache, and with fast
prefill most layers see its last token only.
"""

from collections import deque
from dataclasses import dataclass

from gemma_jax.outputs import PromptLogprobs
from gemma_jax.runner import Runner
from gemma_jax.sampling import Logprobs
from gemma_jax.score import ScoringPass
from gemma_jax.sequence import position_logprobs
from gemma_jax.serve.request import EngineRequest
from gemma_jax.tokenizer import Tokenizer


@dataclass(eq=False)
class _Job:
    request: EngineRequest
    scoring: ScoringPass


@dataclass(frozen=True)
class ScoreCall:
    """A queued device call: whose chunk, and where its results will be."""

    job: _Job
    output: Logprobs


class PromptScores:
    """Scores prompts in the order in which their requests came.

    Args:
      runner: the model's programs.
      max_chunk, page_size: as of `ScoringPass`.
      tokenizer: for the texts of tokens.
    """

    def __init__(self, runner: Runner, max_chunk: int, page_size: int, tokenizer: Tokenizer | None):
        self._runner, self._max_chunk, self._page_size = runner, max_chunk, page_size
        self._tokenizer = tokenizer
        self._jobs: dict[str, _Job] = {}
        self._unqueued: deque[_Job] = deque()

    @property
    def has_next(self) -> bool:
        """Whether a chunk waits to be queued."""
        return bool(self._unqueued)

    def add(self, request: EngineRequest) -> None:
        """Queues the prompt, of two tokens or more, of a request with `prompt_logprobs`."""
        k = request.params.prompt_logprobs
        assert k is not None
        scoring = ScoringPass(
            self._runner, request.prompt_token_ids, max_chunk=self._max_chunk,
            page_size=self._page_size, k=min(max(k, 1), self._runner.config.vocab_size),
        )  # fmt: skip
        job = self._jobs[request.request_id] = _Job(request, scoring)
        self._unqueued.append(job)

    def abort(self, request_id: str) -> None:
        """Forgets a request; unknown ids are ignored."""
        job = self._jobs.pop(request_id, None)
        if job in self._unqueued:
            self._unqueued.remove(job)

    def launch(self) -> ScoreCall:
        """Queues the next chunk."""
        job = self._unqueued[0]
        output = job.scoring.launch()
        if not job.scoring.has_next:
            self._unqueued.popleft()
        return ScoreCall(job, output)

    def read(self, call: ScoreCall) -> tuple[EngineRequest, PromptLogprobs] | None:
        """Waits for a call; a request and its log-probabilities once its prompt has ended."""
        job = call.job
        if self._jobs.get(job.request.request_id) is not job:  # aborted meanwhile
            return None
        job.scoring.take(call.output)
        if not job.scoring.finished:
            return None
        del self._jobs[job.request.request_id]
        return job.request, self._named(job)

    def _named(self, job: _Job) -> PromptLogprobs:
        ids, k = job.request.prompt_token_ids, job.request.params.prompt_logprobs
        assert k is not None
        return [None] + [
            position_logprobs(token, values, k, self._tokenizer)
            for token, values in zip(ids[1:], job.scoring.values, strict=True)
        ]
