"""`gemma-jax collect-env`: what a bug report needs, and nothing secret."""

import json
import os
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gemma_jax import env, system_info
from gemma_jax.cli import EXIT_OK, options
from gemma_jax.compilation_cache import enable_compilation_cache

# Settings of other packages that change what this one does; none of them holds a secret.
OTHER_VARIABLES = (
    "CUDA_VISIBLE_DEVICES",
    "HF_HOME",
    "HF_HUB_CACHE",
    "HF_HUB_OFFLINE",
    "JAX_COMPILATION_CACHE_DIR",
    "JAX_DEFAULT_MATMUL_PRECISION",
    "JAX_ENABLE_X64",
    "JAX_PLATFORMS",
    "LD_LIBRARY_PATH",
    "XDG_CACHE_HOME",
    "XLA_FLAGS",
    "XLA_PYTHON_CLIENT_MEM_FRACTION",
    "XLA_PYTHON_CLIENT_PREALLOCATE",
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the sub-command and return its exit code."""
    parser = options.parser("collect-env", "Print versions, devices and settings.")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args(argv)
    report = collect()
    print(json.dumps(report, indent=2) if args.json else _as_text(report))
    return EXIT_OK


def collect() -> dict[str, dict[str, Any]]:
    """Return the report: section -> name -> value."""
    environment = _environment()
    # Looking at a GPU must not take its memory from the program that is being reported on.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    return {
        "versions": system_info.package_versions(system_info.REPORT_PACKAGES),
        "system": {
            "platform": platform.platform(),
            "cpus": os.cpu_count(),
            "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
            "nvidia driver": system_info.driver_version(),
        },
        "devices": _devices(),
        "compilation cache": _cache(),
        "environment": environment,
    }


def _devices() -> dict[str, Any]:
    try:
        return system_info.device_info()
    except RuntimeError as error:  # a report is wanted most when no device starts
        return {"error": str(error)}


def _cache() -> dict[str, Any]:
    folder = enable_compilation_cache()
    if folder is None:
        return {"folder": "off"}
    files = [file for file in Path(folder).rglob("*") if file.is_file()]
    return {
        "folder": str(folder),
        "files": len(files),
        "bytes": sum(file.stat().st_size for file in files),
    }


def _environment() -> dict[str, str]:
    ours = [name for name in os.environ if name.startswith(env.PREFIX)]
    names = sorted({*ours, *OTHER_VARIABLES} & set(os.environ))
    secret = {name for name, variable in env.VARIABLES.items() if variable.is_secret}
    return {name: "(set)" if name in secret else os.environ[name] for name in names}


def _as_text(report: dict[str, dict[str, Any]]) -> str:
    lines = []
    for section, values in report.items():
        lines.append(f"{section}:")
        lines += [f"  {name}: {_shown(value)}" for name, value in values.items()]
    return "\n".join(lines)


def _shown(value: Any) -> str:
    return "-" if value is None else str(value)
