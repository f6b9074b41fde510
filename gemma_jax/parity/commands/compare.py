"""`gemma-jax parity compare`."""

import argparse
import json
from typing import TYPE_CHECKING, Any

from gemma_jax.cli import EXIT_FAILED, EXIT_OK, options
from gemma_jax.model_source import resolve_model
from gemma_jax.parity.record_header import model_of
from gemma_jax.parity.records import (
    OWN_MODEL,
    Record,
    check_identity,
    check_model,
    read_record,
)
from gemma_jax.parity.write import write_json_lines, write_text

if TYPE_CHECKING:
    from gemma_jax.llm import LLM
    from gemma_jax.parity.compare import Comparison
    from gemma_jax.parity.trace import Trace


_OTHER_MODEL = f"{OWN_MODEL}, or compare all the same with --any-model"


def run(args: argparse.Namespace) -> int:
    """Compare, print the table, write what was asked for; 1 on an unexplained difference."""
    reference = read_record(args.reference)
    twin = read_record(args.float32) if args.float32 else None
    comparison = _compare(args, reference, twin)

    from gemma_jax.parity.summary import position_rows, result, text_table

    values = result(comparison)
    if args.output_json:
        write_text(args.output_json, json.dumps(values, indent=1) + "\n")
    if args.positions:
        write_json_lines(args.positions, position_rows(comparison))
    if args.html:
        from gemma_jax.parity.report import html_page

        write_text(args.html, html_page([values]))
    print(text_table(values))
    return EXIT_FAILED if comparison.failed else EXIT_OK


def _compare(args: argparse.Namespace, reference: Record, twin: Record | None) -> "Comparison":
    from gemma_jax.parity.compare import compare
    from gemma_jax.parity.identity import model_identity
    from gemma_jax.system_info import device_info, package_versions

    identity = model_identity(args.model)
    if not args.any_model:
        check_model(reference, identity, _OTHER_MODEL)
    settings = _settings(args, reference)

    def load(dtype: str) -> "LLM":
        from gemma_jax.llm import LLM

        own: dict[str, Any] = settings | {"dtype": dtype}
        return LLM(**own)

    comparison = compare(
        reference, load, settings["dtype"], twin=twin, noise=args.noise, free_run=args.free_run,
        float32_everywhere=args.float32_everywhere,
    )  # fmt: skip
    if args.trace:
        comparison.trace = _trace(args, identity)
    comparison.ours = {
        "engine": "gemma_jax",
        "versions": package_versions(),
        "device": device_info(),
        "model": identity,
        "rounding": settings["rounding"],
        "settings": settings | {"model": str(settings["model"])},
    }
    return comparison


def _trace(args: argparse.Namespace, identity: dict[str, Any]) -> "Trace":
    from gemma_jax.checkpoint.load import load_checkpoint
    from gemma_jax.kernels import Kernels
    from gemma_jax.parity.trace import trace
    from gemma_jax.parity.trace_file import load_trace

    file = load_trace(args.trace)
    if not args.any_model:
        check_identity(file.name, model_of(file.header), identity, _OTHER_MODEL)
    config, leaves = load_checkpoint(resolve_model(args.model), file.dtype)
    # The file is transformers', whoever made the record.
    return trace(file, config, leaves, args.rounding or "hf", Kernels.parse(args.kernels))


def _settings(args: argparse.Namespace, reference: Record) -> dict[str, Any]:
    """The arguments of `LLM`; dtype and rounding that are not given are the reference's."""
    settings = options.model_settings(args)
    if settings["rounding"] is None:
        settings["rounding"] = "vllm" if reference.engine.startswith("vllm") else "hf"
    if settings["dtype"] in (None, "auto"):
        settings["dtype"] = reference.dtype or _checkpoint_dtype(args.model)
    return settings


def _checkpoint_dtype(model: str) -> str:
    from gemma_jax.checkpoint.load import load_config

    dtype = load_config(resolve_model(model)).dtype
    return dtype if dtype in ("bfloat16", "float32") else "bfloat16"
