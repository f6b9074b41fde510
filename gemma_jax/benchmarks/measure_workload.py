"""One workload on one model: time it, check that every token came, derive the rates."""

import contextlib
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from gemma_jax.benchmarks.ceilings import Ceilings
from gemma_jax.benchmarks.costs import decode_bytes, workload_flops
from gemma_jax.benchmarks.rows import Row, peak_memory_bytes
from gemma_jax.benchmarks.timing import Timing, measure
from gemma_jax.benchmarks.workload import Workload
from gemma_jax.errors import GemmaError, RequestError
from gemma_jax.llm import LLM
from gemma_jax.sampling_params import SamplingParams
from gemma_jax.serve.request import EngineRequest


class WorkloadRunner:
    """Runs workloads on `llm` with fresh random prompts a call, greedily and past any EOS."""

    def __init__(self, llm: LLM, seed: int = 0):
        self.llm = llm
        self._idle_ms: list[float] = []
        self._rng = np.random.default_rng(seed)

    def _params(self, workload: Workload) -> SamplingParams:
        return SamplingParams(
            temperature=0.0, max_tokens=workload.output_len, ignore_eos=True, detokenize=False
        )

    def prompts(self, workload: Workload) -> list[dict[str, list[int]]]:
        return workload.prompts(self._rng, self.llm.model_config.vocab_size)

    def run(self, workload: Workload, prompts: list[dict[str, list[int]]]) -> None:
        """Generates; returns when every token is on the host.

        Raises:
          RequestError: a prompt was refused or did not get all its tokens.
        """
        before = self.llm.engine.stats().idle_seconds
        outputs = self.llm.generate(prompts, self._params(workload), use_tqdm=False)
        self._idle_ms.append((self.llm.engine.stats().idle_seconds - before) * 1e3)
        for output in outputs:
            if output.error:
                raise RequestError(output.error)
            tokens = len(output.outputs[0].token_ids)
            if tokens != workload.output_len:
                raise RequestError(
                    f"output_len={workload.output_len}: only {tokens} tokens fit in a context of"
                    f" {self.llm.max_model_len}"
                )

    def compile_ahead(self, workloads: Sequence[Workload]) -> int:
        """Compiles what the workloads need, side by side; the number of programs.

        A workload that cannot run is left out: its own row says why.
        """
        batches: list[list[EngineRequest]] = []
        for workload in workloads:
            with contextlib.suppress(GemmaError):
                batches.append(
                    [
                        self.llm.make_request(prompt, self._params(workload), f"ahead-{i}")
                        for i, prompt in enumerate(self.prompts(workload))
                    ]
                )
        return self.llm.engine.compile_for(batches)

    def idle_share(self, timing: Timing) -> float:
        """Share of the runs of the last `measure` in which no call was queued on the device."""
        counted = self._idle_ms[-len(timing.samples_ms) :]
        return sum(counted) / sum(timing.samples_ms)

    def measure(self, workload: Workload, warmup: int, iters: int) -> Timing:
        return measure(
            lambda: self.prompts(workload), lambda p: self.run(workload, p), warmup, iters
        )


def guarded(row: Row, fill: Callable[[Row], None]) -> Row:
    """`row` filled in, or with the reason why it could not be; an interrupt passes."""
    try:
        fill(row)
    except Exception as error:
        if not isinstance(error, GemmaError):
            traceback.print_exc(file=sys.stderr)
        row.fail(error)
    return row


def derived_rates(
    llm: LLM, workload: Workload, median_ms: float, ceilings: Ceilings
) -> dict[str, float | None]:
    """Tokens a second, and shares of the ceilings over the whole workload, prompts included.

    `bytes_per_s` and `mbu` count what the decode steps read, and exist only where there are any.
    """
    config, seconds = llm.model_config, median_ms / 1e3
    flops = workload_flops(config, workload, llm.engine_config.fast_prefill)
    itemsize = llm.runner.numerics.jnp_dtype.itemsize
    read = decode_bytes(config, workload, itemsize) / seconds
    return {
        "tok_per_s": (workload.prompt_tokens + workload.generated_tokens) / seconds,
        "prompt_tok_per_s": workload.prompt_tokens / seconds,
        "generated_tok_per_s": workload.generated_tokens / seconds,
        "flops_per_s": flops / seconds,
        "bytes_per_s": read or None,
        "mbu": read / ceilings.bandwidth or None,
        "mfu": flops / seconds / ceilings.flops,
    }


def settings(llm: LLM, model: str, ceilings: Ceilings) -> dict[str, Any]:
    """The `config` of a row."""
    engine = llm.engine_config
    return {
        "model": model,
        "dtype": llm.runner.numerics.dtype,
        "rounding": engine.rounding,
        "fast_prefill": engine.fast_prefill,
        "batch_invariant": engine.batch_invariant,
        "kernels": str(llm.runner.kernels),
        "max_model_len": llm.max_model_len,
        "max_num_seqs": engine.max_num_seqs,
        "max_num_batched_tokens": engine.prefill_tokens(),
        "decode_steps": engine.decode_steps,
        "page_size": engine.page_size,
        "prefix_caching": False,
        "peak_flops": ceilings.flops,
        "peak_bandwidth": ceilings.bandwidth,
    }


def fill(row: Row, runner: WorkloadRunner, workload: Workload, timing: Timing, c: Ceilings) -> None:
    """Writes timing, memory and rates into a row."""
    for name, value in timing.fields().items():
        setattr(row, name, value)
    row.peak_memory_bytes = peak_memory_bytes()
    row.derived = derived_rates(runner.llm, workload, timing.median_ms, c)
    row.derived["device_idle_share"] = runner.idle_share(timing)
