"""A fresh process that loads one checkpoint and prints what that took, as one JSON line.

    python -m gemma_jax.benchmarks.load_worker FOLDER DTYPE

RssAnon is host memory that is not a mapped file; VmHWM counts the mapped pages of the checkpoint
that were resident too, which the system may drop at any time.
"""

import json
import sys
import threading
import time
from pathlib import Path

STATUS = Path("/proc/self/status")
INTERVAL = 0.005
"""Seconds between two readings of RssAnon."""


def status_bytes(field: str, text: str | None = None) -> int | None:
    """A field of /proc/self/status in bytes, None where the system has no such file or field."""
    if text is None:
        if not STATUS.exists():
            return None
        text = STATUS.read_text()
    for line in text.splitlines():
        name, _, value = line.partition(":")
        if name == field:
            return int(value.split()[0]) * 1024
    return None


class AnonymousPeak:
    """Samples RssAnon in a thread while it is entered; `peak` and `before` are in bytes."""

    def __init__(self) -> None:
        self.before = self.peak = status_bytes("RssAnon")
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)

    def __enter__(self) -> "AnonymousPeak":
        if self.before is not None:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()

    def _sample(self) -> None:
        while not self._stop.wait(INTERVAL):
            self.peak = max(self.peak or 0, status_bytes("RssAnon") or 0)


def main(folder: str, dtype: str) -> None:
    """Loads, generates one token, prints."""
    start = time.perf_counter()
    import jax

    from gemma_jax.benchmarks.rows import peak_memory_bytes
    from gemma_jax.llm import LLM
    from gemma_jax.sampling_params import SamplingParams

    jax.block_until_ready(jax.numpy.zeros(1))  # starts the device
    ready = time.perf_counter()
    with AnonymousPeak() as host:
        llm = LLM(folder, dtype=dtype)
        jax.block_until_ready(llm.runner.leaves)
        loaded = time.perf_counter()
    peak_device = peak_memory_bytes()
    params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, detokenize=False)
    (output,) = llm.generate([{"prompt_token_ids": [2, 3, 4]}], params, use_tqdm=False)
    result = {
        "start_s": ready - start,
        "load_s": loaded - ready,
        "first_token_s": time.perf_counter() - loaded,
        "weight_bytes": sum(x.nbytes for x in llm.runner.leaves),
        "largest_leaf_bytes": max(x.nbytes for x in llm.runner.leaves),
        "rss_anon_before_bytes": host.before,
        "peak_rss_anon_bytes": host.peak,
        "peak_rss_bytes": status_bytes("VmHWM"),
        "peak_memory_bytes": peak_device,
        "generated": len(output.outputs[0].token_ids) if output.outputs else 0,
        "error": output.error,
    }
    print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
