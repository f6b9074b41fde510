"""Recorded reference streams: what a golden file holds, how it is written, read and judged.

A golden is one greedy run of a random model in float32: prompts, tokens, and at every generated
position the best logits and the logsumexp; every eighth also has some random vocabulary columns.
"""

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from gemma_jax.errors import CheckpointError

MIN_DISTINCT_SHARE = 0.5
MEDIAN_MARGIN_RANGE = (0.1, 1.0)
COLUMN_STRIDE = 8
NUM_COLUMNS = 16
TOP = 5


@dataclass(frozen=True)
class Golden:
    """Greedy streams of one model: R prompts, T generated tokens each.

    Attributes:
      header: config name, seed, weight checksum, versions and settings of the run.
      prompts: R arrays of token ids.
      tokens: [R, T] generated ids.
      top_ids: [R, T, 5] ids of the best logits, best first.
      top_logits: [R, T, 5] float32, after the softcap.
      logsumexp: [R, T] float32, of the whole row.
      column_ids: [C] random vocabulary ids.
      columns: [R, T / 8, C] float32 logits of those ids at positions 0, 8, 16, …
    """

    header: dict[str, Any]
    prompts: tuple[np.ndarray, ...]
    tokens: np.ndarray
    top_ids: np.ndarray
    top_logits: np.ndarray
    logsumexp: np.ndarray
    column_ids: np.ndarray
    columns: np.ndarray

    @property
    def margins(self) -> np.ndarray:
        """[R, T] float32: best minus second-best logit, in nats."""
        return self.top_logits[..., 0] - self.top_logits[..., 1]

    @property
    def distinct_shares(self) -> np.ndarray:
        """[R]: number of different tokens of each stream over its length."""
        return np.array([len(np.unique(row)) / len(row) for row in self.tokens])

    def check_variety(self) -> None:
        """Checks that the streams could fail a wrong model: they vary, and ties are rare.

        Raises:
          ValueError: a stream repeats itself, or the margins are too small or too large.
        """
        share = float(self.distinct_shares.min())
        if share < MIN_DISTINCT_SHARE:
            raise ValueError(f"distinct tokens / length is {share:.2f}, below {MIN_DISTINCT_SHARE}")
        median = float(np.median(self.margins))
        low, high = MEDIAN_MARGIN_RANGE
        if not low <= median <= high:
            raise ValueError(f"median margin {median:.3g} nat, outside {low} … {high}")


def select_columns(vocab_size: int, seed: int) -> np.ndarray:
    """[C] sorted random vocabulary ids whose logits a golden keeps."""
    generator = np.random.Generator(np.random.PCG64(seed))
    return np.sort(generator.choice(vocab_size, NUM_COLUMNS, replace=False)).astype(np.int32)


def save_golden(path: str | Path, golden: Golden) -> None:
    """Writes a compressed `.npz`; ids are stored as uint16."""
    arrays = {
        f.name: getattr(golden, f.name)
        for f in dataclasses.fields(golden)
        if f.name not in ("header", "prompts")
    }
    for name in ("tokens", "top_ids", "column_ids"):
        arrays[name] = _as_uint16(name, arrays[name])
    arrays["prompts"] = _as_uint16("prompts", np.concatenate(golden.prompts))
    arrays["prompt_lens"] = np.array([len(p) for p in golden.prompts], np.int32)
    arrays["header"] = np.array(json.dumps(golden.header))
    np.savez_compressed(path, **arrays)


def load_golden(path: str | Path) -> Golden:
    """Reads a file of `save_golden`.

    Raises:
      CheckpointError: a part of the record is missing.
    """
    with np.load(path) as file:
        arrays = {name: file[name] for name in file.files}
    try:
        splits = np.cumsum(arrays.pop("prompt_lens"))[:-1]
        arrays["prompts"] = tuple(np.split(arrays["prompts"].astype(np.int32), splits))
        arrays["header"] = json.loads(str(arrays["header"]))
        for name in ("tokens", "top_ids", "column_ids"):
            arrays[name] = arrays[name].astype(np.int32)
        return Golden(**arrays)
    except (KeyError, TypeError) as error:
        raise CheckpointError(f"{path}: not a golden record of this version ({error})") from None


def _as_uint16(name: str, ids: np.ndarray) -> np.ndarray:
    if ids.size and not 0 <= int(ids.min()) <= int(ids.max()) < 2**16:
        raise ValueError(f"{name}: ids {ids.min()} … {ids.max()}, expected 0 … 65535")
    return ids.astype(np.uint16)


# --- teacher-forced records -----------------------------------------------------------------------

NOISE_PERCENTILE = 99.9


@dataclass(frozen=True)
class TeacherForced:
    """What a reference gives the rows of some texts in bfloat16 and in float32.

    A text of n tokens has n − 1 rows, one before each token after the first; rows of all texts
    follow one another.

    Attributes:
      header: model and versions.
      sequences: the token ids of each text.
      top_ids: dtype name → [rows, 5] best ids, the lowest id first among equals.
      top_logprobs: dtype name → [rows, 5] float32.
    """

    header: dict[str, Any]
    sequences: tuple[np.ndarray, ...]
    top_ids: dict[str, np.ndarray]
    top_logprobs: dict[str, np.ndarray]

    def argmax(self, dtype: str) -> np.ndarray:
        """[rows] the reference's token in that dtype."""
        return self.top_ids[dtype][:, 0]

    def margins(self, dtype: str) -> np.ndarray:
        """[rows] best minus second-best log-probability, in nats."""
        values = self.top_logprobs[dtype]
        return values[:, 0] - values[:, 1]

    def margin_noise(self) -> float:
        """99.9th percentile of |Δmargin| between the reference's own bfloat16 and float32 runs.

        The margin is that of the float32 run's best two ids in both; a row whose bfloat16 best
        five lack one of them counts with the margin of the fifth, a lower bound of the change.
        """
        change = [
            abs(_margin_of(pair, ids, values) - margin)
            for pair, ids, values, margin in zip(
                self.top_ids["float32"][:, :2],
                self.top_ids["bfloat16"],
                self.top_logprobs["bfloat16"],
                self.margins("float32"),
                strict=True,
            )
        ]
        return float(np.percentile(change, NOISE_PERCENTILE))


def _margin_of(pair: np.ndarray, ids: np.ndarray, values: np.ndarray) -> float:
    known = dict(zip(ids.tolist(), values.tolist(), strict=True))
    best, second = (known.get(token, float(values[-1])) for token in pair.tolist())
    return best - second


def save_teacher_forced(path: str | Path, golden: TeacherForced) -> None:
    """Writes a compressed `.npz`; ids are stored as uint16, log-probabilities as float32."""
    arrays = {
        "header": np.array(json.dumps(golden.header)),
        "tokens": _as_uint16("sequences", np.concatenate(golden.sequences)),
        "lengths": np.array([len(s) for s in golden.sequences], np.int32),
    }
    for dtype in golden.top_ids:
        arrays[f"{dtype}/top_ids"] = _as_uint16("top_ids", golden.top_ids[dtype])
        arrays[f"{dtype}/top_logprobs"] = golden.top_logprobs[dtype]
    np.savez_compressed(path, **arrays)


def load_teacher_forced(path: str | Path) -> TeacherForced:
    """Reads a file of `save_teacher_forced`.

    Raises:
      CheckpointError: a part of the record is missing.
    """
    with np.load(path) as file:
        arrays = {name: file[name] for name in file.files}
    try:
        tokens = arrays["tokens"].astype(np.int32)
        sequences = np.split(tokens, np.cumsum(arrays["lengths"])[:-1])
        dtypes = [name.removesuffix("/top_ids") for name in arrays if name.endswith("/top_ids")]
        return TeacherForced(
            header=json.loads(str(arrays["header"])),
            sequences=tuple(sequences),
            top_ids={d: arrays[f"{d}/top_ids"].astype(np.int32) for d in dtypes},
            top_logprobs={d: arrays[f"{d}/top_logprobs"] for d in dtypes},
        )
    except KeyError as error:
        raise CheckpointError(f"{path}: not a record of this version ({error})") from None
