"""What an engine gave as a record file: the header and the rows."""

from pathlib import Path
from typing import Any

from gemma_jax.parity.engines import Job, Recorded
from gemma_jax.parity.records import NO_CANDIDATE, Stream
from gemma_jax.parity.write import write_json_lines
from gemma_jax.records import make_header


def write_record(
    path: str | Path,
    job: Job,
    recorded: Recorded,
    source: str | None = None,
    *,
    own_logprobs: bool = True,
    **fields: Any,
) -> int:
    """Writes the record of a job and returns the number of its tokens.

    Args:
      path: `.gz` and `.xz` compress.
      source: name of the record whose tokens a teacher-forced job scored.
      own_logprobs: with the field `logprobs`, which repeats what `top` says of each token.
      **fields: further fields of the header.
    """
    rows = [_row(stream, row) for stream, row in zip(job.requests, recorded.rows, strict=True)]
    if not own_logprobs:
        rows = [{k: x for k, x in row.items() if k != "logprobs"} for row in rows]
    write_json_lines(path, [{"header": _header(job, recorded, source) | fields}, *rows])
    return sum(len(row["token_ids"]) for row in rows)


def _row(stream: Stream, row: dict[str, Any]) -> dict[str, Any]:
    """The record row: prompt, tokens, each token's own logprob, candidates."""
    own = [dict(map(tuple, at)).get(t) for t, at in zip(row["token_ids"], row["top"], strict=True)]
    return {
        "id": stream.id,
        "prompt_token_ids": stream.prompt.tolist(),
        "token_ids": row["token_ids"],
        "logprobs": own,
        "top": [[pair for pair in at if pair[0] != NO_CANDIDATE] for at in row["top"]],
    }


def _header(job: Job, recorded: Recorded, source: str | None) -> dict[str, Any]:
    """The engine's own fields over those that this process knows."""
    settings: dict[str, Any] = {
        "max_num_seqs": job.batch,
        "logprobs": job.logprobs,
        "dtype": job.dtype,
    }
    if job.teacher_force:
        settings["teacher_force"] = source
    else:
        settings |= {"max_tokens": job.max_tokens, "temperature": 0, "ignore_eos": True}
    given = recorded.header.get("settings") or {}
    return make_header(given | settings) | {**recorded.header, "settings": given | settings}
