"""The `gemma-jax` command: finds the sub-command and imports only its module.

Exit codes: 0 all done; 1 a prompt failed, or there was no room; 2 bad input or usage;
130 stopped by Ctrl-C; 141 the reader of stdout went away.
"""

import argparse
import errno
import importlib
import io
import logging
import os
import sys
from collections.abc import Sequence
from typing import NamedTuple

from gemma_jax import env
from gemma_jax.errors import CapacityError, GemmaError
from gemma_jax.version import __version__

EXIT_OK, EXIT_FAILED, EXIT_BAD_INPUT, EXIT_INTERRUPTED, EXIT_BROKEN_PIPE = 0, 1, 2, 130, 141


class Command(NamedTuple):
    """One sub-command: the module whose `main(argv)` runs it, and its line in `--help`."""

    module: str
    help: str


COMMANDS = {
    "generate": Command("gemma_jax.cli.generate", "continue one prompt, several, or a JSONL file"),
    "chat": Command("gemma_jax.cli.chat", "chat in the terminal"),
    "serve": Command("gemma_jax.cli.serve", "serve a model over HTTP, with OpenAI's API"),
    "run-batch": Command("gemma_jax.cli.run_batch", "run a file of requests, offline"),
    "convert": Command("gemma_jax.checkpoint.cli", "convert and verify checkpoints"),
    "parity": Command("gemma_jax.cli.parity", "compare with transformers, vLLM or a record"),
    "bench": Command("gemma_jax.benchmarks.cli", "measure latency and throughput"),
    "collect-env": Command("gemma_jax.cli.collect_env", "print what a bug report needs"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run `gemma-jax` with these arguments (None: the process's own) and return its exit code."""
    # XLA's C++ log is read when jax is imported; below errors it holds nothing for users.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    _open_missing_streams()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a terminal may not be UTF-8
    args = _parser().parse_args(argv)
    try:
        _configure_logging()
        module = importlib.import_module(COMMANDS[args.command].module)
        code = module.main(args.arguments) or EXIT_OK
        sys.stdout.flush()
        return code
    except GemmaError as error:
        print(f"gemma-jax: error: {error}", file=sys.stderr)
        return EXIT_FAILED if isinstance(error, CapacityError) else EXIT_BAD_INPUT
    except KeyboardInterrupt:
        print("gemma-jax: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        _silence_stdout()
        return EXIT_BROKEN_PIPE
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EIO, errno.EDQUOT):
            raise
        print(f"gemma-jax: error: output cannot be written: {error.strerror}", file=sys.stderr)
        _silence_stdout()
        return EXIT_BAD_INPUT


def _open_missing_streams() -> None:
    """Make a stream that the process was started without (as by `<&-`) an empty one."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))


def _silence_stdout() -> None:
    # The interpreter flushes stdout once more on its way out.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _parser() -> argparse.ArgumentParser:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {command.help}" for name, command in COMMANDS.items()]
    parser = argparse.ArgumentParser(
        prog="gemma-jax",
        description="Gemma 4 inference in JAX.",
        usage="gemma-jax [-h] [--version] COMMAND ...",
        epilog="commands:\n" + "\n".join(lines) + "\n\n'gemma-jax COMMAND --help' explains one.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"gemma-jax {__version__}")
    parser.add_argument("command", choices=COMMANDS, metavar="COMMAND", help="one of those below")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    return parser


def _configure_logging() -> None:
    logging.basicConfig(
        stream=sys.stderr,
        level=logging.WARNING,
        format="%(levelname)s %(name)s: %(message)s",
        force=True,
    )
    logger = logging.getLogger("gemma_jax")
    logger.setLevel(env.LOG_LEVEL.read())
    for sentence in env.unknown_variables():
        logger.warning(sentence)
