"""Flags that several sub-commands share: which model to load and how to sample."""

import argparse
from typing import TYPE_CHECKING, Any

from gemma_jax.sampling_params import SamplingParams

if TYPE_CHECKING:
    from gemma_jax.llm import LLM

DEFAULT_MODEL = "nano"


def parser(command: str, description: str) -> argparse.ArgumentParser:
    """Return an empty parser of `gemma-jax COMMAND` that takes no abbreviated flags."""
    return argparse.ArgumentParser(
        prog=f"gemma-jax {command}", description=description, allow_abbrev=False
    )


def add_model_flags(parser: argparse.ArgumentParser, *, of_reference: bool = False) -> None:
    """Add the flags that `load_model` reads.

    Args:
      parser: gets them.
      of_reference: dtype and rounding that are not given are `None`, for those of a record.
    """
    source, rounding = ("reference", "the reference's") if of_reference else ("checkpoint", "hf")
    group = parser.add_argument_group("model")
    group.add_argument(
        "--model",
        default=DEFAULT_MODEL,
        help="checkpoint folder, bundled name or Hugging Face Hub id (default: %(default)s)",
    )
    group.add_argument(
        "--dtype",
        choices=("auto", "float32", "bfloat16"),
        default=None if of_reference else "auto",
        help=f"dtype of weights and activations (default: the {source}'s)",
    )
    group.add_argument(
        "--rounding",
        choices=("hf", "vllm"),
        default=None if of_reference else "hf",
        help=f"whose bfloat16 roundings to reproduce (default: {rounding})",
    )
    group.add_argument(
        "--no-fast-prefill",
        action="store_true",
        help="run every layer on every prompt token, for comparison",
    )
    group.add_argument(
        "--batch-invariant",
        action="store_true",
        help="give every request the same bits alone and in any batch (slower)",
    )
    group.add_argument(
        "--kernels",
        default="auto",
        metavar="auto|reference|pallas[,OP=IMPLEMENTATION…]",
        help="which kernels to use, for instance auto,prefill_attention=triton (default: auto)",
    )
    group.add_argument(
        "--max-model-len", type=int, metavar="N", help="context length (default: the model's)"
    )
    group.add_argument(
        "--max-num-seqs", type=int, metavar="N", help="most prompts that run at a time"
    )


def model_settings(args: argparse.Namespace) -> dict[str, Any]:
    """Return the keyword arguments of `LLM` that the flags of `add_model_flags` ask for."""
    settings = {
        "model": args.model,
        "dtype": args.dtype,
        "rounding": args.rounding,
        "fast_prefill": not args.no_fast_prefill,
        "batch_invariant": args.batch_invariant,
        "kernels": args.kernels,
    }
    limits = {"max_model_len": args.max_model_len, "max_num_seqs": args.max_num_seqs}
    return settings | {name: value for name, value in limits.items() if value is not None}


def load_model(args: argparse.Namespace) -> "LLM":
    """Return the model that the flags ask for; this is where JAX is imported."""
    from gemma_jax.llm import LLM

    return LLM(**model_settings(args))


def add_sampling_flags(
    parser: argparse.ArgumentParser,
    max_tokens: int | None,
    without_limit: str = "the rest of the context",
) -> None:
    """Add the flags that `sampling_settings` reads.

    Args:
      parser: gets them.
      max_tokens: the default of --max-tokens.
      without_limit: what no limit means, in words.
    """
    group = parser.add_argument_group(
        "sampling", "An unset field is the checkpoint's, from generation_config.json."
    )
    group.add_argument(
        "--max-tokens",
        type=int,
        default=max_tokens,
        metavar="N",
        help=f"most tokens to generate (default: {max_tokens or without_limit})",
    )
    group.add_argument("--temperature", type=float, metavar="T", help="0 is greedy")
    group.add_argument("--top-p", type=float, metavar="P", help="in (0, 1]")
    group.add_argument("--top-k", type=int, metavar="K", help="0 or -1 keeps all")
    group.add_argument("--min-p", type=float, metavar="P", help="in [0, 1]")
    group.add_argument(
        "--seed", type=int, default=0, metavar="S", help="of the sampler (default: %(default)s)"
    )
    group.add_argument(
        "--stop", action="append", metavar="TEXT", help="end at this text; may be repeated"
    )


def sampling_settings(args: argparse.Namespace) -> dict[str, Any]:
    """Return the SamplingParams fields that flags ask for, without the unset ones.

    Raises:
      RequestError: a value is out of range.
    """
    names = ("max_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "stop")
    fields = {name: getattr(args, name) for name in names}
    fields |= {name: getattr(args, name, None) for name in ("ignore_eos", "logprobs")}
    fields = {name: value for name, value in fields.items() if value is not None}
    SamplingParams.from_dict(fields)
    return fields
