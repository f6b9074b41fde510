"""`gemma-jax serve`: an OpenAI-compatible HTTP server of one model."""

import argparse
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from gemma_jax import env
from gemma_jax.cli import EXIT_OK, options
from gemma_jax.errors import ConfigError, UnsupportedError
from gemma_jax.serve.config import ServerConfig

DEFAULTS = {field.name: field.default for field in fields(ServerConfig)}


def _parser() -> argparse.ArgumentParser:
    parser = options.parser(
        "serve", "Serve a Gemma 4 model over HTTP, with the API of OpenAI and a chat page at /."
    )
    parser.add_argument(
        "name", nargs="?", metavar="MODEL", help="the same as --model MODEL, which it overrides"
    )
    parser.add_argument(
        "--config", type=Path, metavar="FILE", help="YAML file of flags, such as `port: 8000`;"
        " flags of the command line win",
    )  # fmt: skip
    options.add_model_flags(parser)
    _add_engine_flags(parser)
    _add_server_flags(parser)
    return parser


def _add_engine_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("engine")
    group.add_argument("--tokenizer", metavar="DIR", help="folder of another tokenizer")
    group.add_argument(
        "--max-num-batched-tokens", type=int, metavar="N", help="most prompt tokens of a call"
    )
    group.add_argument(
        "--gpu-memory-utilization", type=float, metavar="X",
        help="share of the device's memory for weights and caches (default: 0.9)",
    )  # fmt: skip
    group.add_argument(
        "--no-warm-up", action="store_true",
        help="be ready at once; programs compile when the first requests need them",
    )  # fmt: skip
    group.add_argument(
        "--seed", type=int, metavar="S", help="of the requests that bring none (default: 0)"
    )


def _add_server_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("server")
    add = group.add_argument
    add("--host", help="address to listen on (default: %(default)s, this machine only)")
    add("--port", type=int, help="port to listen on; 0 picks a free one (default: %(default)s)")
    add(
        "--api-key", action="append", dest="api_keys", metavar="KEY",
        help=f"bearer token to ask for; may be repeated (default: ${env.API_KEY.name})",
    )  # fmt: skip
    add(
        "--served-model-name", action="append", metavar="NAME",
        help="name of the model in requests; may be repeated (default: --model)",
    )  # fmt: skip
    add(
        "--max-queue", type=int, metavar="N",
        help="completions that may wait; more are answered 429 (default: %(default)s)",
    )  # fmt: skip
    add(
        "--max-body-bytes", type=int, metavar="N",
        help="longest request body; longer ones are answered 413 (default: %(default)s)",
    )  # fmt: skip
    add(
        "--request-timeout", type=float, metavar="S",
        help="seconds a request may take, waiting included (default: no limit)",
    )  # fmt: skip
    add(
        "--drain-timeout", type=float, metavar="S",
        help="seconds that running requests get after SIGTERM (default: %(default)g)",
    )  # fmt: skip
    add(
        "--allowed-origin", action="append", dest="allowed_origins", metavar="ORIGIN",
        help="web origin that may use the API, or '*'; may be repeated (default: none)",
    )  # fmt: skip
    add("--access-log", action="store_true", help="log every request on stderr")
    names = ("host", "port", "max_queue", "max_body_bytes", "request_timeout", "drain_timeout")
    parser.set_defaults(**{name: DEFAULTS[name] for name in names})


def main(argv: Sequence[str]) -> int:
    """Run the server; `argv` is what follows the word `serve`."""
    args = _parse(argv)
    config = ServerConfig(model=args.model, **_server_settings(args))
    try:
        from gemma_jax.serve.launch import serve_model
    except ModuleNotFoundError as error:
        raise UnsupportedError(
            f"serve needs the package {error.name}: pip install 'gemma-jax[serve]'"
        ) from error
    serve_model(config, _engine_settings(args), warm=not args.no_warm_up)
    return EXIT_OK


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = _parser()
    args = parser.parse_args(argv)
    if args.config is not None:
        args = parser.parse_args([*_config_flags(parser, args.config), *argv])
    if args.name is not None:
        args.model = args.name
    return args


def _config_flags(parser: argparse.ArgumentParser, file: Path) -> list[str]:
    """The flags that a YAML file stands for: keys are their names, lists repeat them."""
    import yaml

    try:
        values = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"config={str(file)!r}: cannot be read as YAML: {error}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"config={str(file)!r}: expected a mapping of flags to values")
    flags: list[str] = []
    for key, value in values.items():
        flag = "--" + str(key).replace("_", "-")
        if flag not in parser._option_string_actions or flag in ("--config", "--help"):
            raise ConfigError(f"config={str(file)!r}: {key!r} is not a flag of this command")
        flags += _flag(flag, value)
    return flags


def _flag(flag: str, value: Any) -> list[str]:
    if isinstance(value, list):
        return [part for item in value for part in _flag(flag, item)]
    if value is None or value is False:
        return []
    return [flag] if value is True else [f"{flag}={value}"]


def _server_settings(args: argparse.Namespace) -> dict[str, Any]:
    settings = {name: getattr(args, name) for name in DEFAULTS if name != "model"}
    for name in ("api_keys", "served_model_name", "allowed_origins"):
        settings[name] = tuple(settings[name] or ())
    if not settings["api_keys"] and (key := env.API_KEY.read()):
        settings["api_keys"] = (key,)
    return settings


def _engine_settings(args: argparse.Namespace) -> dict[str, Any]:
    names = ("tokenizer", "max_num_batched_tokens", "gpu_memory_utilization", "seed")
    given = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    return options.model_settings(args) | given
