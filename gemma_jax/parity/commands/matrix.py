"""`gemma-jax parity matrix`."""

import argparse
import sys
from pathlib import Path
from typing import Any

from gemma_jax.checkpoint.load import load_config
from gemma_jax.cli import EXIT_FAILED, EXIT_OK
from gemma_jax.config import ModelConfig
from gemma_jax.engine_config import SMALLEST_BUDGET, EngineConfig
from gemma_jax.errors import ConfigError, RecordError
from gemma_jax.model_source import resolve_model
from gemma_jax.parity.compare import check_greedy
from gemma_jax.parity.identity import model_identity
from gemma_jax.parity.matrix import Matrix, Plan, failed, place, table
from gemma_jax.parity.records import (
    Record,
    check_model,
    check_twin,
    check_vocabulary,
    read_record,
)
from gemma_jax.records import RecordWriter, make_header, read_records
from gemma_jax.sampling_params import MAX_LOGPROBS

_REASON = {False: ", UNEXPLAINED", True: ", NOT BIT-EQUAL"}


def run(args: argparse.Namespace) -> int:
    """Run the cells that are not there yet, print all; 1 on a difference that must not be."""
    plan, settings = _plan(args)
    identity = model_identity(args.model)
    reference = read_record(args.reference) if args.reference else None
    twin = read_record(args.float32) if args.float32 else None
    config = load_config(resolve_model(args.model))
    if reference is not None:
        check_model(reference, identity)
        check_vocabulary(reference, config.vocab_size)
        if twin is not None:
            check_twin(reference, twin)
            check_vocabulary(twin, config.vocab_size)
        _print_placed(reference, args.reference, plan, config)
    cells = list(plan.cells())
    with RecordWriter(args.output) as writer:
        header = make_header(settings, model=identity)
        progress = writer.start(header, [cell.id for cell in cells])
        rows = list(read_records(args.output).rows)[: progress.rows]
        matrix = Matrix(plan, config, reference, twin, rows)
        for number, cell in enumerate(cells[progress.rows :], start=progress.rows + 1):
            rows.append(matrix.run(cell))
            writer.write(rows[-1:])
            verdict = _REASON[plan.batch_invariant] if failed(rows[-1]) else ""
            words = f"[{number}/{len(cells)}] {cell.id}: {rows[-1]['status']}{verdict}"
            print(words, file=sys.stderr)
    print(table(rows))
    if not any(row["status"] == "ok" and not row["is_baseline"] for row in rows):
        print("no cell could be compared: the notes in the output file say why", file=sys.stderr)
        return EXIT_FAILED
    return EXIT_FAILED if any(map(failed, rows)) else EXIT_OK


def _print_placed(reference: Record, path: str, plan: Plan, config: ModelConfig) -> None:
    """Says how many rows of the record each context compares.

    Raises:
      RecordError: none, or rows that a greedy run cannot follow.
    """
    placed, total = place(reference, plan, config), len(reference.streams)
    for context, streams in placed.items():
        print(f"context {context}: {len(streams)} of {total} reference rows", file=sys.stderr)
        if streams:
            check_greedy(Record(reference.name, reference.header, streams))
    left = total - sum(map(len, placed.values()))
    if left == total:
        raise RecordError(f"{path}: no row is compared; {_why_none(reference, plan, config)}")
    if left:
        print(f"{left} of {total} reference rows fit no context", file=sys.stderr)


def _why_none(reference: Record, plan: Plan, config: ModelConfig) -> str:
    prompts = [len(stream.prompt) for stream in reference.streams]
    tokens = [len(stream.tokens) for stream in reference.streams]
    return (
        f"its prompts have {min(prompts)} to {max(prompts)} tokens and its continuations"
        f" {min(tokens)} to {max(tokens)}, but no context of --contexts"
        f" {','.join(map(str, plan.contexts))} with --max-tokens {plan.max_tokens} holds one (the"
        f" model's holds {config.max_position_embeddings}); change --contexts or --max-tokens"
    )


def _plan(args: argparse.Namespace) -> tuple[Plan, dict[str, Any]]:
    """The plan, and the settings of the header, which a resumed run must repeat."""
    if not 2 <= args.logprobs <= MAX_LOGPROBS:
        raise ConfigError(f"--logprobs {args.logprobs}: expected 2 to {MAX_LOGPROBS}")
    if args.float32 and not args.reference:
        raise ConfigError("--float32: give the --reference that it belongs to")
    small = [chunk for chunk in args.chunks if 0 < chunk < SMALLEST_BUDGET]
    if small:
        raise ConfigError(
            f"--chunks {small[0]}: expected at least {SMALLEST_BUDGET} prompt tokens, or 0 for the"
            " engine's own chunks"
        )
    kernels = args.kernels or (["auto"] if args.batch_invariant else ["reference", "pallas"])
    if args.batch_invariant and len(kernels) > 1:
        raise ConfigError(
            f"--kernels {','.join(kernels)}: with --batch-invariant give one; kernels of two kinds"
            " add in two orders"
        )
    config = load_config(resolve_model(args.model))
    engine = EngineConfig(args.dtype, args.rounding, batch_invariant=args.batch_invariant)
    dtype = engine.numerics(config).dtype  # refuses what no cell could run
    fields: dict[str, Any] = {
        "model": str(args.model),
        "dtype": dtype,
        "rounding": args.rounding,
        "contexts": sorted(set(args.contexts)),
        "batches": args.batches,
        "fast_prefills": [word == "on" for word in args.fast_prefills],
        "kernels": kernels,
        "chunks": args.chunks,
        "prompts": args.prompts_per_context,
        "max_tokens": args.max_tokens,
        "logprobs": args.logprobs,
        "seed": args.seed,
        "noise": args.noise,
        "batch_invariant": args.batch_invariant,
    }
    files = {name: getattr(args, name) for name in ("reference", "float32")}
    names = {name: None if path is None else Path(path).name for name, path in files.items()}
    return Plan(**fields), fields | names
