"""Records the engine goldens: greedy runs of transformers or vLLM, and the twins they need.

    python -m bench.goldens.make_engine_goldens --engine transformers --python PYTHON_WITH_TORCH
    python -m bench.goldens.make_engine_goldens --engine vllm --vllm-path DIR --jobs 10 --budget 540

Four models (`gemma_jax.testing.golden_models`) with the prompts of `engine_prompts`, 32 greedy
tokens each. vLLM's cells: bfloat16, float32 and float32 with TRITON_F32_DEFAULT=ieee, eager and
compiled, fast prefill off and on (models with shared K and V), batch 1 and 64; Triton attention.
One process runs one setting at both batch sizes; `--jobs` processes share the GPU. A *twin* scores
the tokens of a record in exact float32 (for vLLM: ieee): bfloat16 and TF32 records get one.

Processes start in order of value, until `--budget` seconds are over. What is there already is left
alone, so the same command goes on; a process that fails or takes longer than `--timeout` is
reported, its log kept with `--logs`, and the others run. Exit code 1: something is missing.

Files: OUT/MODEL/ENGINE-DTYPE….jsonl.xz, and ….twin.jsonl.xz. To stay within 8 MiB a record keeps 6
candidates a token in bfloat16 (about 70 KB), 4 in float32 (50 KB), a twin 3 (40 KB), six decimals.
"""

import argparse
import shlex
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.goldens.engine_prompts import make_prompts
from gemma_jax.checkpoint.load import load_config
from gemma_jax.errors import GemmaError
from gemma_jax.parity.engines import Job, Recorded, record_together
from gemma_jax.parity.record_file import write_record
from gemma_jax.parity.records import Stream, read_record
from gemma_jax.testing.golden_models import GOLDEN_MODELS, RANDOM_CONFIGS, golden_checkpoint

OUT = Path(__file__).parents[2] / "tests" / "parity" / "data" / "engines"
PROMPT_SEED = 7
MAX_TOKENS = 32
BATCHES = (64, 1)
LOGPROBS = {"bfloat16": 6, "float32": 4}
TWIN_LOGPROBS = 3
DECIMALS = 6
SUFFIX, TWIN_SUFFIX = ".jsonl.xz", ".twin.jsonl.xz"

VLLM = {
    "attention": "TRITON_ATTN",
    "max_num_batched_tokens": 16_384,
    # A fixed cache: other processes on the GPU would confuse vLLM's measurement of free memory.
    "kv_cache_memory_bytes": 3 << 30,
}
VLLM_ENVIRONMENT = {
    "OMP_NUM_THREADS": "2", "TORCHINDUCTOR_COMPILE_THREADS": "2", "VLLM_NO_USAGE_STATS": "1",
}  # fmt: skip


@dataclass(frozen=True)
class Setting:
    """What one process runs, at every batch size of its engine."""

    engine: str
    model: str
    dtype: str
    ieee: bool = False
    compiled: bool = False
    fast_prefill: bool = False

    @property
    def name(self) -> str:
        """Part of the file names."""
        words = [self.engine, self.dtype]
        if self.engine == "vllm":
            words[1] += "-ieee" if self.ieee else ""
            words += ["compiled" if self.compiled else "eager"]
            words += ["fast-prefill"] if self.fast_prefill else []
        return "-".join(words)

    @property
    def batches(self) -> tuple[int, ...]:
        """transformers runs prompts of one length together, so there it is one record."""
        return BATCHES if self.engine == "vllm" else BATCHES[:1]

    def file(self, batch: int) -> str:
        """The record's name, relative to the output folder."""
        batch_word = f"-batch{batch}" if self.engine == "vllm" else ""
        return f"{self.model}/{self.name}{batch_word}{SUFFIX}"

    @property
    def needs_twin(self) -> bool:
        """Its float32 is rounded: bfloat16, or TF32 in vLLM's kernels."""
        return self.dtype == "bfloat16" or (self.engine == "vllm" and not self.ieee)


@dataclass
class Process:
    """One worker: the records of a setting, or the twins of some records, in exact float32."""

    setting: Setting
    twins_of: Sequence[Setting] = ()
    after: list["Future[None]"] = field(default_factory=list)

    @property
    def name(self) -> str:
        words = f"{len(self.twins_of)} twins" if self.twins_of else self.setting.name
        return f"{self.setting.model} {words}"

    def files(self) -> list[str]:
        """The names of what it writes."""
        if not self.twins_of:
            return [self.setting.file(batch) for batch in self.setting.batches]
        records = [setting.file(batch) for setting in self.twins_of for batch in setting.batches]
        return [name.removesuffix(SUFFIX) + TWIN_SUFFIX for name in records]


def processes(engine: str, models: Sequence[str]) -> list[Process]:
    """All processes of an engine, most valuable first; twins follow the records they are of."""
    listed = []
    for compiled in (False, True) if engine == "vllm" else (False,):
        settings = list(_settings(engine, models, compiled))
        listed += [Process(setting) for setting in settings]
        for model in models:
            exact = Setting(engine, model, "float32", ieee=engine == "vllm")
            some = [s for s in settings if s.model == model and s.needs_twin]
            listed.append(Process(exact, some))
    return listed


def _settings(engine: str, models: Sequence[str], compiled: bool) -> Iterator[Setting]:
    precisions = [("bfloat16", False), ("float32", engine == "vllm")]
    precisions += [("float32", False)] if engine == "vllm" else []
    for fast in (False, True) if engine == "vllm" else (False,):
        for dtype, ieee in precisions:
            for model in models:
                shared = model == "nano" or RANDOM_CONFIGS[model].num_kv_shared_layers > 0
                if shared or not fast:
                    yield Setting(engine, model, dtype, ieee, compiled, fast)


class Maker:
    """Runs processes and writes their records.

    Args:
      args: of the command line.
      folder: for checkpoints, caches and logs.
    """

    def __init__(self, args: argparse.Namespace, folder: Path):
        self.args, self.folder = args, folder
        self.end = time.monotonic() + args.budget
        self.logs = args.logs or folder
        self.logs.mkdir(parents=True, exist_ok=True)
        self.checkpoints = {name: golden_checkpoint(name, folder) for name in args.model}
        self.prompts = {
            name: make_prompts(name, load_config(path), PROMPT_SEED)
            for name, path in self.checkpoints.items()
        }

    def run(self, process: Process) -> None:
        """Writes what is missing of a process' files; prints one line."""
        for future in process.after:
            future.exception()
        jobs = self._jobs(process)
        if not jobs:
            return
        begun = time.monotonic()
        left = self.end - begun
        if left <= 0:
            print(f"- {process.name}: not started, the budget is spent", flush=True)
            return
        log = self.logs / f"{process.name.replace(' ', '-')}.log"
        try:
            recorded = record_together(
                [job for _, job, _ in jobs], environment=self._environment(process.setting),
                timeout_s=min(self.args.timeout, left), log=log,
            )  # fmt: skip
            tokens = sum(
                self._write(name, job, source, result)
                for (name, job, source), result in zip(jobs, recorded, strict=True)
            )
        except (GemmaError, OSError, ValueError) as error:
            print(f"- {process.name}: FAILED: {error}", flush=True)
            return
        seconds = time.monotonic() - begun
        print(f"- {process.name}: {tokens} tokens, {seconds:.0f} s", flush=True)

    def _jobs(self, process: Process) -> list[tuple[str, Job, str | None]]:
        """File, job and, for a twin, the record's name: of every file that is not there yet."""
        missing = [name for name in process.files() if not (self.args.out / name).exists()]
        if process.twins_of:
            pairs = [(name, name.removesuffix(TWIN_SUFFIX) + SUFFIX) for name in missing]
            return [
                self._twin(process.setting, *p) for p in pairs if (self.args.out / p[1]).exists()
            ]
        return [self._record(process.setting, name) for name in missing]

    def _record(self, setting: Setting, name: str) -> tuple[str, Job, None]:
        batch = next(batch for batch in setting.batches if setting.file(batch) == name)
        prompts = self.prompts[setting.model]
        streams = [Stream(i, ids, ids[:0]) for i, ids in enumerate(prompts)]
        return name, self._job(setting, streams, False, LOGPROBS[setting.dtype], batch), None

    def _twin(self, setting: Setting, name: str, record: str) -> tuple[str, Job, str]:
        streams = read_record(self.args.out / record).streams
        job = self._job(setting, streams, True, TWIN_LOGPROBS, BATCHES[0])
        return name, job, Path(record).name

    def _job(
        self, setting: Setting, streams: Sequence[Stream], force: bool, logprobs: int, batch: int
    ) -> Job:
        args = self.args
        options: dict[str, Any] = {"threads": args.threads}
        if setting.engine == "vllm":
            own = {
                "enforce_eager": not setting.compiled,
                "kv_sharing_fast_prefill": setting.fast_prefill,
                "gpu_memory_utilization": args.memory_share,
            }
            options = {"vllm": VLLM | own}
        return Job(
            engine=setting.engine, model=str(self.checkpoints[setting.model]), requests=streams,
            teacher_force=force, max_tokens=MAX_TOKENS, logprobs=logprobs, dtype=setting.dtype,
            batch=batch, python=args.python, options=options,
        )  # fmt: skip

    def _environment(self, setting: Setting) -> dict[str, str]:
        if setting.engine != "vllm":
            return {}
        values = VLLM_ENVIRONMENT | {"TRITON_F32_DEFAULT": "ieee" if setting.ieee else "tf32"}
        # Processes that compile the same graph at once should not meet in one cache.
        values["VLLM_CACHE_ROOT"] = str(self.folder / "cache" / setting.model / setting.name)
        return values | ({"PYTHONPATH": str(self.args.vllm_path)} if self.args.vllm_path else {})

    def _write(self, name: str, job: Job, source: str | None, result: Recorded) -> int:
        rows = [row | {"top": _rounded(row["top"])} for row in result.rows]
        path = self.args.out / name
        path.parent.mkdir(parents=True, exist_ok=True)
        command = shlex.join(
            ["python", "-m", "bench.goldens.make_engine_goldens", "--engine", job.engine]
        )
        return write_record(
            path, job, Recorded(result.header, rows), source, own_logprobs=False, command=command
        )


def _rounded(top: list[list[list[Any]]]) -> list[list[list[Any]]]:
    return [[[token, round(logprob, DECIMALS)] for token, logprob in at] for at in top]


def run_all(maker: Maker, listed: Sequence[Process], jobs: int) -> list[str]:
    """Runs the processes, `jobs` at a time; returns the files that are missing in the end."""
    with ThreadPoolExecutor(jobs) as pool:
        futures: dict[Setting, Future[None]] = {}
        for process in listed:
            process.after = [futures[setting] for setting in process.twins_of if setting in futures]
            future = pool.submit(maker.run, process)
            if not process.twins_of:
                futures[process.setting] = future
    files = [name for process in listed for name in process.files()]
    return [name for name in files if not (maker.args.out / name).exists()]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Record the engine goldens.", allow_abbrev=False)
    parser.add_argument("--engine", choices=("transformers", "vllm"), required=True)
    parser.add_argument("--out", type=Path, default=OUT, help="folder (default: %(default)s)")
    parser.add_argument("--model", action="append", choices=GOLDEN_MODELS, help="only this one")
    parser.add_argument(
        "--only", default="", metavar="TEXT", help="processes with this in the name"
    )
    parser.add_argument("--python", default=sys.executable, help="interpreter with the engine")
    parser.add_argument(
        "--vllm-path", type=Path, metavar="DIR", help="PYTHONPATH of vLLM's process"
    )
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time")
    parser.add_argument("--memory-share", type=float, default=0.08, help="of the GPU, a process")
    parser.add_argument("--timeout", type=float, default=240, help="seconds of a process")
    parser.add_argument("--budget", type=float, default=36_000, help="seconds for everything")
    parser.add_argument("--threads", type=int, default=2, help="of torch on a CPU")
    parser.add_argument("--logs", type=Path, metavar="DIR", help="keep what the processes print")
    parser.add_argument("--list", action="store_true", help="print the files and end")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit code."""
    args = _parser().parse_args(arguments)
    args.model = args.model or list(GOLDEN_MODELS)
    listed = [p for p in processes(args.engine, args.model) if args.only in p.name]
    if args.list:
        print(*(name for process in listed for name in process.files()), sep="\n")
        return 0
    with tempfile.TemporaryDirectory(prefix="gemma-jax-goldens-") as folder:
        missing = run_all(Maker(args, Path(folder)), listed, args.jobs)
    size = sum(path.stat().st_size for path in args.out.rglob(f"*{SUFFIX}"))
    print(f"{args.out}: {size:,} bytes; missing: {', '.join(missing) or 'nothing'}")
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
