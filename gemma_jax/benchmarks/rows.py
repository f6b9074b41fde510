"""The result row: one JSON object a measurement, with everything needed to judge and repeat it."""

import dataclasses
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from gemma_jax.errors import CapacityError, UnsupportedError
from gemma_jax.system_info import (
    RESULT_PACKAGES,
    device_info,
    driver_version,
    package_versions,
)

SCHEMA = 1
IMPLEMENTATION = "gemma_jax"
Status = Literal["ok", "unsupported", "oom", "error"]
_PRIVATE_FLAGS = (
    "--output-json", "--profile", "--commit", "--folder", "--result-dir", "--plot", "--api-key",
    "--vllm-path",
)  # fmt: skip


@dataclass
class Row:
    """One line of a results file.

    Attributes:
      bench: which benchmark, for instance "throughput".
      case: what was measured, for instance "8x2048+1".
      implementation: the engine or kernel.
      command: a shell command that repeats it.
      config: the resolved settings.
      warmup: uncounted calls after the first one, which compiles.
      samples_ms: wall time of every counted call; with median_ms, p10_ms and p90_ms.
      compile_ms: how much longer the first call took than the median.
      peak_memory_bytes: most device memory in use in the process so far; None where the device
        does not say (CPU).
      derived: rates: tok_per_s, bytes_per_s, and the shares mbu and mfu of what the device reaches
        in a plain copy and a plain matrix product.
      result: the fields of the vLLM tool of the same name, in its units.
      numerics: difference from a reference, where one was compared.
      status: "ok", or why there is no number.
    """

    bench: str
    case: str
    implementation: str = IMPLEMENTATION
    command: str = ""
    config: dict[str, Any] = field(default_factory=dict)
    warmup: int | None = None
    samples_ms: list[float] = field(default_factory=list)
    median_ms: float | None = None
    p10_ms: float | None = None
    p90_ms: float | None = None
    compile_ms: float | None = None
    peak_memory_bytes: int | None = None
    derived: dict[str, float | None] = field(default_factory=dict)
    result: dict[str, Any] = field(default_factory=dict)
    numerics: dict[str, Any] | None = None
    status: Status = "ok"
    note: str = ""

    def fail(self, error: BaseException) -> None:
        """Records why there is no number."""
        self.status = error_status(error)
        message = " ".join(str(error).split())
        self.note = f"{type(error).__name__}: {message}"[:500]

    def as_json(
        self,
        source: "Source",
        device: dict[str, Any] | None = None,
        packages: tuple[str, ...] = RESULT_PACKAGES,
    ) -> dict[str, Any]:
        """The row with schema, commit, date, device (None: what JAX runs on) and versions."""
        own = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        first = {name: own.pop(name) for name in ("bench", "case", "implementation")}
        device = device or device_info()
        return {
            "schema": SCHEMA,
            **first,
            "commit": source.commit,
            "dirty": source.dirty,
            "date_utc": datetime.now(UTC).isoformat(timespec="seconds"),
            "device": {name: device[name] for name in ("kind", "count", "memory_bytes")},
            "versions": package_versions(packages) | {"driver": driver_version()},
            **own,
        }


@dataclass(frozen=True)
class Source:
    """The commit that was measured, and whether the files differed from it; None if unknown."""

    commit: str | None = None
    dirty: bool | None = None

    @classmethod
    def find(cls, given: str | None = None) -> "Source":
        """`given` (a hash, with "-dirty" appended if so), else what git says of this package."""
        if given is not None:
            return cls(given.removesuffix("-dirty"), given.endswith("-dirty"))
        root = Path(__file__).resolve().parents[2]
        commit = _git(root, "rev-parse", "HEAD")
        if commit is None or not (root / ".git").exists():
            return cls()
        return cls(commit, bool(_git(root, "status", "--porcelain", "--untracked-files=no")))


def _git(root: Path, *arguments: str) -> str | None:
    command = ["git", "-C", str(root), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def error_status(error: BaseException) -> Status:
    """The row status that an exception stands for."""
    if isinstance(error, UnsupportedError):
        return "unsupported"
    memory = isinstance(error, MemoryError | CapacityError) or "RESOURCE_EXHAUSTED" in str(error)
    return "oom" if memory else "error"


def command_line(bench: str, arguments: Sequence[str]) -> str:
    """The command that repeats a run, without where its results and files went."""
    kept: list[str] = []
    rest = iter(arguments)
    for argument in rest:
        name, separator, _ = argument.partition("=")
        if name not in _PRIVATE_FLAGS:
            kept.append(argument)
        elif not separator:
            next(rest, None)
    return shlex.join(["python", "-m", f"bench.{bench}", *kept])


def peak_memory_bytes() -> int | None:
    """Most bytes of device memory in use at a time since the process began."""
    import jax

    return (jax.local_devices()[0].memory_stats() or {}).get("peak_bytes_in_use")


def append_row(path: Path, row: dict[str, Any]) -> Path:
    """Appends a row to a file; in an existing folder, to `<yyyymmdd>-<device>-<bench>.jsonl`."""
    if path.is_dir():
        date = row["date_utc"][:10].replace("-", "")
        path = path / f"{date}-{device_slug(row['device']['kind'])}-{row['bench']}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")
    return path


def device_slug(kind: str) -> str:
    """A device kind as part of a file name: "NVIDIA H200" is "h200"."""
    return re.sub(r"[^a-z0-9]+", "-", kind.lower().removeprefix("nvidia ")).strip("-")


class Report:
    """Prints rows as they come, appends them to a file, and ends with one JSON line.

    Args:
      output: the file, or a folder that gets one.
      source: what is measured.
      device: what it runs on; None asks JAX.
      packages: those whose versions matter.
    """

    def __init__(
        self,
        output: Path | None,
        source: Source,
        device: dict[str, Any] | None = None,
        packages: tuple[str, ...] = RESULT_PACKAGES,
    ):
        self._output, self._source = output, source
        self._device, self._packages = device, packages
        self.rows: list[Row] = []

    def add(self, row: Row) -> None:
        """Takes a finished row."""
        self.rows.append(row)
        if self._output is not None:
            append_row(self._output, row.as_json(self._source, self._device, self._packages))

    def finish(self, allowed: Sequence[Status] = ("ok",)) -> int:
        """Prints the last line, one JSON object; the exit code is 1 if a status is not allowed."""
        results = {row.case: row.result or {"error": row.note} for row in self.rows}
        only = next(iter(results.values())) if len(results) == 1 else {"cases": results}
        sys.stdout.flush()
        print(json.dumps(only), flush=True)
        return 0 if all(row.status in allowed for row in self.rows) else 1
