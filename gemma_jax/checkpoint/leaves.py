"""Leaves on their way to disk are checked against the model they claim to be."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from gemma_jax.checkpoint.dtypes import STORED_NAMES
from gemma_jax.checkpoint.names import LeafSource
from gemma_jax.checkpoint.problems import Problems


def check_leaves(
    leaves: Mapping[str, Any], sources: Mapping[str, LeafSource], where: object
) -> None:
    """Raises CheckpointError unless the leaves are exactly those of the model."""
    problems = Problems(where)
    for path in sorted(set(leaves) | set(sources)):
        if path not in sources:
            problems.add(f"leaf {path}: unknown; the config has no place for it")
        elif path not in leaves:
            problems.add(f"leaf {path}: missing; expected shape {list(sources[path].shape)}")
        else:
            leaf, shape = leaves[path], sources[path].shape
            dtype = np.dtype(leaf.dtype)
            if tuple(leaf.shape) != shape:
                problems.add(
                    f"leaf {path}: shape {list(leaf.shape)} ({dtype}), expected {list(shape)}"
                )
            elif dtype not in STORED_NAMES:
                problems.add(
                    f"leaf {path}: dtype {dtype} (shape {list(shape)}), expected bfloat16,"
                    " float16 or float32"
                )
    problems.check()
