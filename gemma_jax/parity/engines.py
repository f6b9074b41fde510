"""The engines that can be recorded: ours in this process, others in a worker or behind a URL.

A worker is a script that another interpreter runs with two arguments. The first is a job, a JSON
object: `model` (folder), `identity`, `dtype`, `logprobs`, `batch`, `max_tokens`, `teacher_force`,
`requests` (each `id`, `prompt_token_ids` and, to be teacher-forced, `token_ids`) and what is the
engine's own. The second is the file it writes: a line `{"header": …}` with engine, versions, device
and dtype, then for every request, in order, `id`, `token_ids` and `top`.
"""

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gemma_jax.errors import CapacityError, ConfigError, UnsupportedError
from gemma_jax.parity import openai_client
from gemma_jax.parity.identity import model_identity
from gemma_jax.parity.records import Stream

ENGINES = ("gemma-jax", "transformers", "vllm", "openai-url")
WORKERS = {"transformers": ("hf_worker.py", "torch"), "vllm": ("vllm_worker.py", "vllm")}
_LAST_LINES = 12


@dataclass(frozen=True)
class Job:
    """What to record.

    Attributes:
      engine: one of `ENGINES`.
      model: path, bundled name or Hub id.
      requests: prompts; with `teacher_force`, also the tokens to score.
      teacher_force: score the given tokens instead of generating.
      max_tokens: greedy tokens of each request.
      logprobs: candidates a token.
      dtype: "bfloat16", "float32", or "auto" for the checkpoint's.
      batch: most sequences that run together.
      python: interpreter of a worker.
      options: the engine's own: `LLM` settings, vLLM arguments, or the URL.
      hidden: what to trace: `token_ids`, `positions`, `columns`, `output`; transformers only.
    """

    engine: str
    model: str
    requests: Sequence[Stream]
    teacher_force: bool
    max_tokens: int
    logprobs: int
    dtype: str
    batch: int
    python: str = sys.executable
    options: dict[str, Any] = field(default_factory=dict)
    hidden: dict[str, Any] | None = None


@dataclass(frozen=True)
class Recorded:
    """What an engine gave: header fields, and rows with `id`, `token_ids` and `top`."""

    header: dict[str, Any]
    rows: list[dict[str, Any]]


def record(job: Job) -> Recorded:
    """Runs an engine.

    Raises:
      UnsupportedError: the engine is not installed where the job looks for it, or cannot do this.
      CapacityError: it failed; the message ends with its last lines.
    """
    if job.engine == "gemma-jax":
        from gemma_jax.parity.own_engine import record_own

        return Recorded(*record_own(job))
    if job.engine == "openai-url":
        return Recorded(*openai_client.record_url(job))
    return _run_worker(job)


def _run_worker(job: Job) -> Recorded:
    from gemma_jax.model_source import resolve_model

    identity = model_identity(job.model)
    script, package = WORKERS[job.engine]
    _require(job.python, package, job.engine)
    message: dict[str, Any] = {
        "model": str(resolve_model(job.model)),
        "identity": identity,
        "dtype": _worker_dtype(job),
        "logprobs": job.logprobs,
        "batch": job.batch,
        "max_tokens": job.max_tokens,
        "teacher_force": job.teacher_force,
        "requests": [_request(stream, job.teacher_force) for stream in job.requests],
        "hidden": job.hidden,
        **job.options,
    }
    with tempfile.TemporaryDirectory(prefix="gemma-jax-parity-") as folder:
        job_file, output = Path(folder) / "job.json", Path(folder) / "out.jsonl"
        job_file.write_text(json.dumps(message))
        command = [job.python, str(Path(__file__).with_name(script)), str(job_file), str(output)]
        ended = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if ended.returncode or not output.is_file():
            last = "\n".join(ended.stdout.splitlines()[-_LAST_LINES:])
            raise CapacityError(
                f"{job.engine} (of {job.python}) ended with code {ended.returncode}:\n{last}"
            )
        lines = [json.loads(line) for line in output.read_text().splitlines()]
    return Recorded(lines[0]["header"] | {"model": identity}, lines[1:])


def _require(python: str, package: str, engine: str) -> None:
    code = f"import importlib.util as u, sys; sys.exit(u.find_spec({package!r}) is None)"
    try:
        found = subprocess.run([python, "-c", code], capture_output=True).returncode == 0
    except OSError as error:
        raise ConfigError(f"--python {python} cannot be run: {error.strerror}") from None
    if not found:
        raise UnsupportedError(
            f"--engine {engine}: {python} has no {package}; name an interpreter that has it with"
            " --python"
        )


def _worker_dtype(job: Job) -> str:
    if job.dtype != "auto":
        return job.dtype
    from gemma_jax.checkpoint.load import load_config
    from gemma_jax.model_source import resolve_model

    return load_config(resolve_model(job.model)).dtype


def _request(stream: Stream, teacher_force: bool) -> dict[str, Any]:
    request = {"id": stream.id, "prompt_token_ids": stream.prompt.tolist()}
    return request | ({"token_ids": stream.tokens.tolist()} if teacher_force else {})
