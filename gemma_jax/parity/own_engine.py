"""This package as an engine to record, through `LLM` only."""

from typing import TYPE_CHECKING, Any

from gemma_jax.llm import LLM
from gemma_jax.parity.identity import model_identity
from gemma_jax.parity.score import greedy, teacher_forced
from gemma_jax.records import make_header

if TYPE_CHECKING:
    from gemma_jax.parity.engines import Job


def record_own(job: "Job") -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Header and rows of a run of `LLM` with the job's options as its settings."""
    with LLM(job.model, dtype=job.dtype, max_num_seqs=job.batch, **job.options) as llm:
        header = make_header(dict(job.options))
        dtype = llm.engine_config.numerics(llm.model_config).dtype
        header |= {"dtype": dtype, "model": model_identity(job.model)}
        if job.teacher_force:
            tops = teacher_forced(llm, job.requests, job.logprobs)
            results = [
                (stream.tokens.tolist(), top)
                for stream, top in zip(job.requests, tops, strict=True)
            ]
        else:
            results = list(greedy(llm, job.requests, job.logprobs, job.max_tokens))
    rows = [
        {"id": stream.id, "token_ids": ids, "top": top.as_pairs()}
        for stream, (ids, top) in zip(job.requests, results, strict=True)
    ]
    return header, rows
