"""`python -m bench.vllm_kernels`: our kernels and vLLM's own, one after the other on one GPU.

    python -m bench.vllm_kernels --output-json FOLDER [--vllm-path DIR]

Two processes take turns, so that neither library holds memory while the other is timed: first
`bench.kernels` with every implementation of ours, then `bench.vllm_worker` with vLLM's Triton
attention, its norm and rotary kernels, and the fused one, at the same cases. All rows have one
format and one `bench` name, so that `bench.compare` puts them side by side (table `vllm`).

The worker needs vLLM 0.25.1 with its torch and triton in this Python, or in the folder that
`--vllm-path` puts before its PYTHONPATH.
"""

import argparse
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from gemma_jax.benchmarks.kernels import chosen_cases
from gemma_jax.benchmarks.rows import command_line
from gemma_jax.pallas.cases import Case

OPS = ("prefill_attention", "decode_attention", "qkv_norm_rope")
"""Ours that vLLM has a kernel for."""
USUAL = {
    "prefill_attention": [
        f"e2b {kind} {batch}"
        for kind in ("sliding", "full")
        for batch in ("8x2048", "ragged", "chunk")
    ],
    "decode_attention": [
        "E2B sliding, 1 x 1024", "E2B sliding, 64 x 1024", "E2B sliding, 64 x 32768",
        "E2B full, 1 x 2048", "E2B full, 1 x 32768", "E2B full, 64 x 2048", "E2B full, 64 x 8192",
    ],
    "qkv_norm_rope": [
        "e2b sliding, 16384 tokens", "e2b full, 16384 tokens",
        "e2b sliding shared, 16384 tokens", "e2b sliding, 64 tokens", "e2b sliding, 1 token",
    ],
}  # fmt: skip
PARTS = ("gemma_jax", "vllm")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs both parts; the exit code is 1 if one of them failed."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    parser = _parser()
    args = parser.parse_args(given)
    if not set(args.only) <= set(PARTS):
        parser.error(f"--only {','.join(args.only)}: expected parts of {','.join(PARTS)}")
    cases = cases_to_time(args.op, args.case)
    if not cases:
        parser.error(f"no case has --op {args.op} and --case {args.case} in its names")
    codes = []
    if "gemma_jax" in args.only:
        codes += [subprocess.call(command) for command in own_commands(cases, args)]
    if "vllm" in args.only:
        command = worker_command(cases, args, command_line("vllm_kernels", given))
        codes.append(subprocess.call(command, env=worker_environment(args.vllm_path)))
    return 1 if any(codes) else 0


def cases_to_time(ops: Sequence[str] | None, names: Sequence[str] | None) -> list[Case]:
    """The usual cases, or with `names` all whose name contains one of these texts."""
    chosen = [c for c in chosen_cases(ops, names) if c.op in OPS]
    return [c for c in chosen if names is not None or c.name in USUAL[c.op]]


def own_commands(cases: Sequence[Case], args: argparse.Namespace) -> list[list[str]]:
    """`bench.kernels` once an op, with exactly these cases."""
    commands = []
    for op in dict.fromkeys(case.op for case in cases):
        names = [text for case in cases if case.op == op for text in ("--case", case.name)]
        command = [sys.executable, "-m", "bench.kernels", "--op", op, *names]
        commands.append([*command, *_shared_flags(args)])
    return commands


def worker_command(cases: Sequence[Case], args: argparse.Namespace, command: str) -> list[str]:
    """The process that times vLLM's kernels; `command` is what its rows record."""
    names = [text for case in cases for text in ("--case", f"{case.op}:{case.name}")]
    head = [sys.executable, "-m", "bench.vllm_worker", *names, "--command", command]
    return [*head, *_shared_flags(args)]


def worker_environment(vllm_path: Path | None) -> dict[str, str]:
    """Of the worker: JAX, which only gives it our shapes, stays off the GPU.

    Packages of `vllm_path` come before all others.
    """
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "VLLM_NO_USAGE_STATS": "1"}
    if vllm_path is not None:
        paths = [str(vllm_path), environment.get("PYTHONPATH", "")]
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    return environment


def _shared_flags(args: argparse.Namespace) -> list[str]:
    flags = ["--num-calls", str(args.num_calls), "--seed", str(args.seed)]
    flags += ["--output-json", str(args.output_json)] if args.output_json else []
    return flags + (["--commit", args.commit] if args.commit else [])


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="bench.vllm_kernels", description="Our kernels beside vLLM's.", allow_abbrev=False
    )
    parser.add_argument(
        "--op", action="append", metavar="TEXT", help="only ops whose name contains this"
    )
    parser.add_argument(
        "--case", action="append", metavar="TEXT", help="these cases instead of the usual ones"
    )
    parser.add_argument(
        "--only", type=lambda x: x.split(","), default=PARTS,
        help="comma-separated parts: gemma_jax, vllm (default: both)",
    )  # fmt: skip
    parser.add_argument("--vllm-path", type=Path, help="folder of vLLM and what it needs")
    parser.add_argument("--num-calls", type=int, default=48, help="counted samples")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output-json", type=Path, help="file or folder to append rows to")
    parser.add_argument("--commit", metavar="HASH[-dirty]", help="where git cannot tell")
    return parser


if __name__ == "__main__":
    sys.exit(main())
