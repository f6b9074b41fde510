"""Sub-block outputs of a reference: what `record --hidden F.npz` stores.

Written by `hf_worker.py` for one sequence of S tokens, at C chosen positions. Arrays are [C, …]
except an owner layer's k and v, which attention needs at all S. bfloat16 is stored as its bits.

| array | content |
|---|---|
| `token_ids` [S], `positions` [C], `columns` [X] | sequence, positions, ids of the logits |
| `embed`, `final_norm` [C, D] | scaled embedding; final norm |
| `head`, `softcap` [C, X] | logits before and after the soft cap |
| `layers.i/input`, `…/output` | the residual stream around a layer |
| `…/input_norm`, `…/q_raw`, `…/k_raw`, `…/v_raw` | input norm and projections |
| `…/q` [C, N, H], `…/k`, `…/v` [S, K, H] | after norm and RoPE |
| `…/attention`, `…/o_proj`, `…/after_attention` | heads, projection, stream after the block |
| `…/mlp_norm`, `…/gate_up`, `…/down_proj`, `…/mlp` | `mlp` has the experts added |
| `…/after_mlp`, `…/per_layer_input`, `…/gated`, `…/ple_projection` | with per-layer inputs |
"""

import json
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from gemma_jax.errors import RecordError
from gemma_jax.parity.record_header import check_header

_DAMAGED = (
    OSError, ValueError, KeyError, AttributeError, EOFError, RecursionError, zipfile.BadZipFile,
    zlib.error,
)  # fmt: skip


@dataclass(frozen=True)
class TraceFile:
    """A loaded file: header, tokens, positions and arrays by name."""

    name: str
    header: dict[str, Any]
    token_ids: np.ndarray
    positions: np.ndarray
    columns: np.ndarray
    arrays: dict[str, np.ndarray]

    @property
    def dtype(self) -> str:
        return self.header["dtype"]

    def __getitem__(self, name: str) -> np.ndarray:
        if name not in self.arrays:
            raise RecordError(f"{self.name}: no array {name!r}; it is of another kind of model")
        return self.arrays[name]

    def __contains__(self, name: str) -> bool:
        return name in self.arrays


def load_trace(path: str | Path) -> TraceFile:
    """Reads a trace file.

    Raises:
      RecordError: no such file, or not one of `record --hidden`.
    """
    try:
        with Path(path).open("rb") as opened, np.load(opened) as file:
            arrays = {name: file[name] for name in file.files}
        header = json.loads(str(arrays.pop("header")))
        check_header(header, str(path))
        token_ids, positions, columns = (
            arrays.pop(name) for name in ("token_ids", "positions", "columns")
        )
        if header["dtype"] not in ("bfloat16", "float32"):
            raise KeyError("dtype")
    except RecordError:
        raise
    except _DAMAGED as error:
        raise RecordError(f"{path}: not a file of `parity record --hidden` ({error})") from None
    values = {
        name: x.view(ml_dtypes.bfloat16) if x.dtype == np.uint16 else x
        for name, x in arrays.items()
    }
    return TraceFile(Path(path).name, header, token_ids, positions, columns, values)
