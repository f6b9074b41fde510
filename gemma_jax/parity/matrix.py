"""One model over batch sizes, contexts, fast prefill, kernels and chunk sizes: what changes?

For each context a baseline runs first: one sequence at a time, every layer on every row, reference
kernels. Every cell generates from the same prompts with its own settings and is compared with the
baseline (invariance) and, where a reference record has prompts of that length, with the record
(parity). A cell is a row of the output file, so an interrupted run goes on with the next cell.

In batch-invariant mode every cell runs in that mode, the baseline too, and bits must be equal.
"""

import itertools
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import jax
import numpy as np

from gemma_jax.config import ModelConfig
from gemma_jax.errors import CapacityError, UnsupportedError
from gemma_jax.llm import LLM
from gemma_jax.parity.bounds import Rate
from gemma_jax.parity.compare import Judge, compare, free_run_of
from gemma_jax.parity.flips import FLOAT32_LIMIT, NoiseLimit, count_classes, margin_noise
from gemma_jax.parity.records import Candidates, Record, Stream
from gemma_jax.parity.score import greedy, teacher_forced
from gemma_jax.records import LOGPROB_DECIMALS

FIRST_ID = 3
"""Random prompts leave out padding, EOS and BOS, which have the lowest ids."""


@dataclass(frozen=True)
class Cell:
    """One setting; `chunk` 0 is the engine's own."""

    context: int
    batch: int
    fast_prefill: bool
    kernels: str
    chunk: int
    is_baseline: bool = False

    @property
    def id(self) -> str:
        """Its name in the output file."""
        if self.is_baseline:
            return f"context {self.context}, baseline"
        return (
            f"context {self.context}, batch {self.batch}, fast prefill"
            f" {'on' if self.fast_prefill else 'off'}, kernels {self.kernels}, chunk"
            f" {self.chunk or 'default'}"
        )

    def settings(self, max_tokens: int) -> dict[str, Any]:
        """The arguments of `LLM` that make the cell."""
        settings = {
            "max_num_seqs": self.batch,
            "fast_prefill": self.fast_prefill,
            "kernels": self.kernels,
            "max_model_len": self.context + max_tokens,
        }
        return settings | ({"max_num_batched_tokens": self.chunk} if self.chunk else {})


@dataclass(frozen=True)
class Plan:
    """What a matrix covers.

    Attributes:
      model: path, bundled name or Hub id.
      dtype: of all cells.
      rounding: whose bfloat16 rounding points.
      contexts: prompt lengths in tokens, ascending.
      batches, fast_prefills, kernels, chunks: the other axes.
      prompts: different prompts a context.
      max_tokens: generated from each.
      logprobs: candidates a token.
      seed: of the random prompts.
      noise: limit in nats; `None` measures it against our own float32 run.
      batch_invariant: every cell promises the bits of the baseline.
    """

    model: str
    dtype: str
    rounding: str
    contexts: Sequence[int]
    batches: Sequence[int]
    fast_prefills: Sequence[bool]
    kernels: Sequence[str]
    chunks: Sequence[int]
    prompts: int
    max_tokens: int
    logprobs: int
    seed: int
    noise: float | None = None
    batch_invariant: bool = False

    @property
    def decimals(self) -> int | None:
        """Of log-probabilities in rows: as in records, or every bit where bits are promised."""
        return None if self.batch_invariant else LOGPROB_DECIMALS

    def cells(self) -> Iterator[Cell]:
        """Each context's baseline, then its cells."""
        for context in self.contexts:
            plainest = self.kernels[0] if self.batch_invariant else "reference"
            yield Cell(context, 1, False, plainest, self.chunks[0], is_baseline=True)
            axes = (self.batches, self.fast_prefills, self.kernels, self.chunks)
            for batch, fast, kernels, chunk in itertools.product(*axes):
                yield Cell(context, batch, fast, kernels, chunk)

    def load(self, dtype: str, settings: dict[str, Any]) -> LLM:
        """Our model with a cell's settings."""
        return LLM(
            self.model, dtype=dtype, rounding=self.rounding, batch_invariant=self.batch_invariant,
            **settings,
        )  # fmt: skip


def random_prompts(config: ModelConfig, context: int, count: int, seed: int) -> list[np.ndarray]:
    """`count` prompts of `context` random ids, BOS first."""
    generator = np.random.default_rng([seed, context])
    prompts = generator.integers(FIRST_ID, config.vocab_size, (count, context)).astype(np.int32)
    if config.bos_token_id is not None:
        prompts[:, 0] = config.bos_token_id
    return list(prompts)


def place(record: Record, plan: Plan, config: ModelConfig) -> dict[int, tuple[Stream, ...]]:
    """Context → the rows of a record that its cells compare: each row has the first that holds it.

    Contexts that the model does not hold, and rows that no context holds, are left out.
    """
    contexts = [c for c in plan.contexts if c + plan.max_tokens <= config.max_position_embeddings]

    def first(stream: Stream) -> int | None:
        prompt, whole = len(stream.prompt), len(stream.sequence)
        fits = (c for c in contexts if prompt <= c and whole <= c + plan.max_tokens)
        return next(fits, None)

    chosen = [first(stream) for stream in record.streams]
    return {
        context: tuple(s for s, c in zip(record.streams, chosen, strict=True) if c == context)
        for context in contexts
    }


class Matrix:
    """Runs the cells of a plan.

    Args:
      plan: the cells.
      config: of the model.
      reference: a record to compare with too.
      twin: its float32 record.
      done: rows of cells that an earlier run finished.
    """

    def __init__(
        self,
        plan: Plan,
        config: ModelConfig,
        reference: Record | None = None,
        twin: Record | None = None,
        done: Sequence[dict[str, Any]] = (),
    ):
        self.plan, self.config = plan, config
        self.reference, self.twin = reference, twin
        self._placed = {} if reference is None else place(reference, plan, config)
        self._baselines = {row["context"]: row for row in done if row["is_baseline"]}

    def run(self, cell: Cell) -> dict[str, Any]:
        """The row of one cell; `status` says why there is none of what it should hold.

        Programs are dropped with their cell: hundreds of them would use up what a process may map.
        """
        row = {"id": cell.id} | asdict(cell)
        limit = self.config.max_position_embeddings
        if cell.context + self.plan.max_tokens > limit:
            return row | {"status": "skipped", "note": f"the model's context is {limit}"}
        begun = time.monotonic()
        try:
            found = self._baseline(cell) if cell.is_baseline else self._compare(cell)
        except (UnsupportedError, CapacityError) as error:
            found = {"status": "unsupported", "note": str(error)}
        except Exception as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            found = {"status": "oom", "note": str(error).splitlines()[0][:300]}
        finally:
            jax.clear_caches()
        row |= {"status": "ok"} | found | {"seconds": round(time.monotonic() - begun, 2)}
        if cell.is_baseline:
            self._baselines[cell.context] = row
        return row

    def _prompts(self, context: int) -> list[Stream]:
        ids = random_prompts(self.config, context, self.plan.prompts, self.plan.seed)
        return [Stream(i, prompt, np.zeros(0, np.int32)) for i, prompt in enumerate(ids)]

    def _generate(
        self, cell: Cell, prompts: Sequence[Stream]
    ) -> list[tuple[list[int], Candidates]]:
        with self.plan.load(self.plan.dtype, cell.settings(self.plan.max_tokens)) as llm:
            return list(greedy(llm, prompts, self.plan.logprobs, self.plan.max_tokens))

    def _baseline(self, cell: Cell) -> dict[str, Any]:
        prompts = self._prompts(cell.context)
        runs = self._generate(cell, prompts)
        streams = [
            Stream(p.id, p.prompt, np.array(ids, np.int32), top)
            for p, (ids, top) in zip(prompts, runs, strict=True)
        ]
        return {
            "sequences": len(streams),
            "tokens": sum(len(s.tokens) for s in streams),
            "noise": self._noise(cell, streams),
            "streams": [
                {"token_ids": s.tokens.tolist(), "top": s.candidates.as_pairs(self.plan.decimals)}
                for s in streams
            ],
        }

    def _noise(self, cell: Cell, streams: Sequence[Stream]) -> float:
        """How far rounding moves our own margins: bfloat16 against float32 on the same tokens.

        Nothing in batch-invariant mode, where any other bit is a failure.
        """
        if self.plan.batch_invariant and self.plan.noise is None:
            return 0.0
        if self.plan.noise is not None or self.plan.dtype == "float32":
            return FLOAT32_LIMIT if self.plan.noise is None else self.plan.noise
        with self.plan.load("float32", cell.settings(self.plan.max_tokens)) as llm:
            tops = list(teacher_forced(llm, streams, self.plan.logprobs))
        exact = [
            Stream(s.id, s.prompt, s.tokens, top) for s, top in zip(streams, tops, strict=True)
        ]
        return margin_noise(Record("ours", {}, tuple(streams)), Record("f32", {}, tuple(exact)))

    def _compare(self, cell: Cell) -> dict[str, Any]:
        baseline = self._baselines.get(cell.context)
        if baseline is None or baseline["status"] != "ok":
            return {"status": "no baseline", "note": (baseline or {}).get("note", "")}
        expected = self._repeated(cell, baseline)
        runs = self._generate(cell, expected)
        limit = NoiseLimit(baseline["noise"], "own float32 run", needs_verdict=False)
        free = free_run_of(expected, runs, cell.batch, Judge(expected, None, {}, limit))
        deltas, equal = _differences(expected, runs, free.agreed, self.plan.decimals)
        agreed = sum(free.agreed)
        return {
            "sequences": len(expected),
            "tokens": agreed + len(free.flips),
            "whole": free.whole,
            "bit_equal": equal,
            "batch_invariant": self.plan.batch_invariant,
            "max_delta_logprob": deltas,
            "classes": count_classes(free.flips),
            "divergences": Rate(len(free.flips), agreed + len(free.flips)).as_json(),
            "first_divergences": [flip.as_json() for flip in free.flips],
            "parity": self._parity(cell),
        }

    def _repeated(self, cell: Cell, baseline: dict[str, Any]) -> list[Stream]:
        """The baseline's streams, in turn until they fill the batch: slots must not matter."""
        prompts = self._prompts(cell.context)
        streams = [
            Stream(
                p.id, p.prompt, np.array(row["token_ids"], np.int32),
                Candidates.of([[(int(i), float(x)) for i, x in at] for at in row["top"]]),
            )
            for p, row in zip(prompts, baseline["streams"], strict=True)
        ]  # fmt: skip
        count = max(cell.batch, len(streams))
        return list(itertools.islice(itertools.cycle(streams), count))

    def _parity(self, cell: Cell) -> dict[str, Any] | None:
        """Comparison with the reference's rows of this context."""
        some = self._placed.get(cell.context)
        if self.reference is None or not some:
            return None
        part = Record(self.reference.name, self.reference.header, some)
        settings = cell.settings(self.plan.max_tokens)
        comparison = compare(
            part, lambda dtype: self.plan.load(dtype, settings), self.plan.dtype, twin=self.twin,
            noise=self.plan.noise, free_run=True,
        )  # fmt: skip
        free = comparison.free
        return {
            "sequences": len(some),
            "flips": comparison.rate.as_json(),
            "classes": count_classes(comparison.flips),
            "whole": None if free is None else free.whole,
            "free_classes": None if free is None else count_classes(free.flips),
            "unexplained": [flip.as_json() for flip in comparison.unexplained],
        }


def _differences(
    expected: Sequence[Stream],
    runs: Sequence[tuple[list[int], Candidates]],
    agreed: Sequence[int],
    decimals: int | None,
) -> tuple[float, int]:
    """Largest |Δlogprob| of shared candidates before the first difference; equal sequences.

    Log-probabilities are compared to so many decimals; None compares every bit.
    """
    worst, equal = 0.0, 0
    for stream, (ids, top), same in zip(expected, runs, agreed, strict=True):
        theirs = stream.candidates
        delta = np.abs(top.logprob_of(theirs.ids[: len(ids)]) - theirs.logprobs[: len(ids)])[:same]
        worst = max(worst, float(delta[np.isfinite(delta)].max(initial=0.0)))
        equal += top.as_pairs(decimals) == theirs.as_pairs(decimals)
    return worst, equal


def failed(row: dict[str, Any]) -> bool:
    """Whether a cell has an unexplained difference, or in batch-invariant mode any."""
    if row["status"] != "ok" or row["is_baseline"]:
        return False
    if row["batch_invariant"] and row["bit_equal"] < row["sequences"]:
        return True
    parity = row["parity"]
    return bool(row["classes"]["unexplained"] or (parity and parity["unexplained"]))


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The cells for a terminal."""
    heads = ("context", "batch", "fast", "kernels", "chunk", "whole", "bit-equal", "max Δlogprob")
    heads += ("tie/noise/unexplained", "parity")
    lines = [[*heads]]
    for row in rows:
        chunk = str(row["chunk"] or "default")
        fast = "on" if row["fast_prefill"] else "off"
        cell = [str(row["context"]), str(row["batch"]), fast, row["kernels"], chunk]
        lines.append(cell + _cell_words(row))
    widths = [max(len(line[i]) for line in lines) for i in range(len(heads))]
    return "\n".join(
        "  ".join(f"{word:<{width}}" for word, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )


def _cell_words(row: dict[str, Any]) -> list[str]:
    if row["status"] != "ok":
        return [f"{row['status']}: {row['note']}"[:60], "", "", "", ""]
    if row["is_baseline"]:
        limit = f"limit {row['noise']:.4f}" if row["noise"] else "bits"
        return ["baseline", "", limit, "", ""]
    count, parity = row["sequences"], row["parity"]
    words = "–"
    if parity is not None:
        words = "/".join(str(n) for n in parity["classes"].values())
        words += f", free {'/'.join(str(n) for n in parity['free_classes'].values())}"
    return [
        f"{row['whole']}/{count}",
        f"{row['bit_equal']}/{count}",
        f"{row['max_delta_logprob']:.2e}",
        "/".join(str(n) for n in row["classes"].values()),
        words,
    ]
