"""The engines that can be recorded: ours in this process, others in a worker or behind a URL.

A worker is a script that another interpreter runs with two arguments a job; several jobs must be of
one model, dtype and options, and share a loaded model. The first argument is the job, a JSON
object: `model` (folder), `identity`, `dtype`, `logprobs`, `batch`, `max_tokens`, `teacher_force`,
`requests` (each `id`, `prompt_token_ids` and, to be teacher-forced, `token_ids`) and what is the
engine's own. The second is the file it writes: a line `{"header": …}` with engine, versions, device
and dtype, then for every request, in order, `id`, `token_ids` and `top`.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gemma_jax.errors import CapacityError, ConfigError, UnsupportedError
from gemma_jax.parity import openai_client
from gemma_jax.parity.identity import model_identity
from gemma_jax.parity.records import Stream
from gemma_jax.parity.vllm_checkpoint import vllm_checkpoint

ENGINES = ("gemma-jax", "transformers", "vllm", "openai-url")
HOST = "worker_host.py"
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
    return record_together([job])[0]


def record_together(
    jobs: Sequence[Job],
    *,
    environment: Mapping[str, str] | None = None,
    timeout_s: float | None = None,
    log: Path | None = None,
) -> list[Recorded]:
    """Runs several jobs of one worker engine in one process, which loads the model once.

    Args:
      jobs: of one engine, model, dtype, interpreter and options.
      environment: variables to set for the worker.
      timeout_s: the worker and all that it started is stopped after this time. It is also stopped
        when this process ends, however that happens.
      log: keeps what the worker prints.

    Raises:
      UnsupportedError: the engine is not installed there.
      CapacityError: it failed or took too long; the message ends with its last lines.
    """
    from gemma_jax.model_source import resolve_model

    first = jobs[0]
    own = os.environ | dict(environment or {})
    script, package = WORKERS[first.engine]
    _require(first.python, package, first.engine, own)
    identity = model_identity(first.model)
    path = resolve_model(first.model)
    copy = vllm_checkpoint(path) if first.engine == "vllm" else nullcontext(path)
    with copy as model, tempfile.TemporaryDirectory(prefix="gemma-jax-parity-") as name:
        folder = Path(name)
        files = []
        for i, job in enumerate(jobs):
            files += [folder / f"{i}.json", folder / f"{i}.jsonl"]
            files[-2].write_text(json.dumps(_message(job, model, identity)))
        scripts = [str(Path(__file__).with_name(name)) for name in (HOST, script)]
        command = [first.python, *scripts, *map(str, files)]
        log = log or folder / "log"
        code = _run(command, own, timeout_s, log)
        if code != 0 or not all(file.is_file() for file in files[1::2]):
            why = f"took more than {timeout_s} s" if code is None else f"ended with code {code}"
            last = "\n".join(log.read_text(errors="replace").splitlines()[-_LAST_LINES:])
            raise CapacityError(f"{first.engine} (of {first.python}) {why}:\n{last}")
        return [_recorded(file, identity) for file in files[1::2]]


def _message(job: Job, model: Path, identity: dict[str, Any]) -> dict[str, Any]:
    return {
        "model": str(model),
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


def _run(
    command: list[str], environment: Mapping[str, str], timeout_s: float | None, log: Path
) -> int | None:
    """Exit code; `None` when it was stopped. It has a process group of its own."""
    with log.open("wb") as file, _sigterm_raises():
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=file, stderr=subprocess.STDOUT,
            env=dict(environment), start_new_session=True,
        )  # fmt: skip
        with process:  # closes the pipe
            try:
                return process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                return None
            finally:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()


@contextmanager
def _sigterm_raises() -> Iterator[None]:
    """SIGTERM ends the process as Ctrl-C does, with what it has begun cleaned up."""
    if (
        threading.current_thread() is not threading.main_thread()
        or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL  # somebody else's
    ):
        yield
        return
    signal.signal(signal.SIGTERM, _exit)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _exit(number: int, _: object) -> None:
    sys.exit(128 + number)


def _recorded(file: Path, identity: dict[str, Any]) -> Recorded:
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    return Recorded(lines[0]["header"] | {"model": identity}, lines[1:])


def _require(python: str, package: str, engine: str, environment: Mapping[str, str]) -> None:
    code = f"import importlib.util as u, sys; sys.exit(u.find_spec({package!r}) is None)"
    try:
        done = subprocess.run([python, "-c", code], capture_output=True, env=dict(environment))
    except OSError as error:
        raise ConfigError(f"--python {python} cannot be run: {error.strerror}") from None
    if done.returncode:
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
