"""Which dtypes a checkpoint may hold, and which ones the model may compute in."""

from typing import Any

import ml_dtypes
import numpy as np

from gemma_jax.config import ModelConfig
from gemma_jax.errors import UnsupportedError

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
FLOAT32 = np.dtype(np.float32)

STORED: dict[str, np.dtype] = {
    "BF16": BFLOAT16,
    "F16": np.dtype(np.float16),
    "F32": FLOAT32,
}
"""safetensors dtype name → numpy dtype of the kinds that a text weight may have."""

STORED_NAMES: dict[np.dtype, str] = {dtype: name for name, dtype in STORED.items()}


def compute_dtype(dtype: Any, config: ModelConfig | None = None) -> np.dtype:
    """bfloat16 or float32, from a name or a dtype; `"auto"` takes it from the config.

    Raises:
      UnsupportedError: float16, or anything else.
    """
    if isinstance(dtype, str) and dtype == "auto":
        return FLOAT32 if config is not None and config.dtype == "float32" else BFLOAT16
    try:
        resolved = np.dtype(ml_dtypes.bfloat16 if str(dtype) == "bfloat16" else dtype)
    except TypeError:
        resolved = None
    if resolved is not None and resolved in (BFLOAT16, FLOAT32):
        return resolved
    if resolved == np.float16:
        raise UnsupportedError(
            "dtype=float16: activations of E2B overflow the float16 range (65504);"
            " use bfloat16 or float32"
        )
    raise UnsupportedError(f"dtype={dtype!r}: expected 'auto', 'bfloat16' or 'float32'")
