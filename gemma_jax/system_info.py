"""What this process runs on, for results and bug reports: package versions, devices, driver."""

import platform
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

from gemma_jax.version import __version__

RESULT_PACKAGES = ("jax", "jaxlib", "flax")
REPORT_PACKAGES = (
    *RESULT_PACKAGES,
    "jax-cuda13-plugin",
    "numpy",
    "ml_dtypes",
    "safetensors",
    "orbax-checkpoint",
    "tokenizers",
    "jinja2",
    "huggingface_hub",
    "torch",
    "transformers",
)


def package_versions(packages: tuple[str, ...] = RESULT_PACKAGES) -> dict[str, str | None]:
    """Return distribution name -> version, None where it is not installed; nothing is imported."""
    versions = {"python": platform.python_version(), "gemma_jax": __version__}
    return versions | {name: _installed_version(name) for name in packages}


def _installed_version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def driver_version() -> str | None:
    """Return the NVIDIA driver's version, or None without one."""
    try:
        # "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.159.03  Wed ..."
        text = Path("/proc/driver/nvidia/version").read_text(encoding="utf-8")
        return next(word for word in text.split() if word[0].isdigit() and "." in word)
    except (OSError, StopIteration):
        pass
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        lines = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return lines.stdout.strip().partition("\n")[0] or None


def device_info() -> dict[str, Any]:
    """Return platform, kind, count and memory_bytes (None on CPU) of the devices JAX uses."""
    import jax

    devices = jax.local_devices()
    stats = devices[0].memory_stats() or {}
    return {
        "platform": devices[0].platform,
        "kind": devices[0].device_kind,
        "count": len(devices),
        "memory_bytes": stats.get("bytes_limit"),
    }
