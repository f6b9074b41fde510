"""Wrong models: nano and a tiny 26B with one bug each, beside what transformers recorded."""

import dataclasses
from importlib import resources
from pathlib import Path

import jax.numpy as jnp

from gemma_jax.checkpoint.load import load_checkpoint
from gemma_jax.llm import LLM
from gemma_jax.parity.compare import compare
from gemma_jax.parity.flips import margin_noise
from gemma_jax.parity.records import read_record
from gemma_jax.parity.trace import trace
from gemma_jax.parity.trace_file import load_trace

RECORDS = Path(__file__).with_name("data") / "records"
NANO = Path(str(resources.files("gemma_jax") / "data" / "nano"))
SEQUENCE_TOKENS = range(80, 129)
"""Long enough for nano's window of 64, and all in one bucket: one program."""


def nano_record():
    """The bfloat16 record, its longer sequences, and the noise of the whole."""
    record = read_record(RECORDS / "nano-bfloat16.jsonl.xz")
    noise = margin_noise(record, read_record(RECORDS / "nano-float32.jsonl.xz"))
    some = [stream for stream in record.streams if len(stream.sequence) in SEQUENCE_TOKENS]
    return dataclasses.replace(record, streams=tuple(some)), noise


def compare_planted(record, config, leaves, dtype="bfloat16", **settings):
    """`compare` with a model made of these weights."""
    return compare(
        record, lambda _: LLM.from_leaves(config, leaves, dtype=dtype), dtype, **settings
    )


def trace_planted(name, config, leaves):
    """`trace` with a model made of these weights."""
    return trace(load_trace(RECORDS / name), config, leaves)


def load(path, dtype):
    """Config and a copy of the leaves that may be changed."""
    config, leaves = load_checkpoint(path, dtype)
    return config, dict(leaves)


def one_plus(leaves, ending):
    """The leaves whose names end so, each with 1 added: a norm that takes 1 + w."""
    return leaves | {k: x + jnp.ones((), x.dtype) for k, x in leaves.items() if k.endswith(ending)}
