"""Where a run spends the device's time: a jax.profiler trace, summed by kernel and op."""

import contextlib
import re
import warnings
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TOP = 30
_NUMBER = re.compile(r"([._]\d+)+$")
_LAYER = re.compile(r"\d+")


@dataclass(frozen=True)
class Event:
    """One kernel (or copy) on a device: times in nanoseconds."""

    name: str
    op: str
    module: str
    start: float
    duration: float


@contextlib.contextmanager
def record(folder: Path) -> Iterator[None]:
    """Profiles the block into `folder`."""
    import jax

    folder.mkdir(parents=True, exist_ok=True)
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    options.host_tracer_level = 1
    with jax.profiler.trace(folder, profiler_options=options):
        yield


def newest_events(folder: Path) -> list[Event]:
    """The kernels of the newest trace in `folder`."""
    import jax

    traces = _traces(folder)
    return device_events(jax.profiler.ProfileData.from_file(str(traces[-1]))) if traces else []


def _traces(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.xplane.pb"), key=lambda path: path.stat().st_mtime)


def device_events(data: Any) -> list[Event]:
    """The kernels of a `jax.profiler.ProfileData`, in the order of their start.

    GPUs report them on lines called "Stream #…"; a CPU has no such lines and gives none.
    """
    with warnings.catch_warnings():
        # Its iterator types have no __module__; Python warns, and a warning made an error aborts.
        warnings.simplefilter("ignore", DeprecationWarning)
        found = [
            _event(event)
            for plane in data.planes
            if plane.name.startswith("/device:GPU")
            for line in plane.lines
            if line.name.startswith("Stream")
            for event in line.events
        ]
    return sorted(found, key=lambda event: event.start)


def _event(event: Any) -> Event:
    stats = {name: value for name, value in event.stats if name is not None}
    op = stats.get("name") or stats.get("tf_op") or stats.get("hlo_op") or ""
    module = str(stats.get("hlo_module") or "")
    return Event(event.name, str(op), module, event.start_ns, event.duration_ns)


def tables(events: list[Event]) -> str:
    """Totals, then time by program, by kernel and by op."""
    if not events:
        return "the trace has no device kernels (only GPUs report them)"
    first, last = events[0].start, max(e.start + e.duration for e in events)
    busy = busy_time(events)
    head = (
        f"{len(events)} kernels, busy {busy / 1e6:.3f} ms of {(last - first) / 1e6:.3f} ms between"
        f" the first and the last ({100 * busy / max(last - first, 1):.1f} %)"
    )
    parts = [head, _table("program", events, lambda e: e.module)]
    parts.append(_table("kernel, numbers dropped", events, lambda e: _NUMBER.sub("", e.name)))
    parts.append(_table("op, layers together", events, lambda e: _LAYER.sub("#", e.op)))
    return "\n\n".join(parts)


def busy_time(events: Iterable[Event]) -> float:
    """Nanoseconds in which at least one of the events runs; they come in order of their start."""
    total, end = 0.0, float("-inf")
    for event in events:
        stop = event.start + event.duration
        total += max(stop - max(event.start, end), 0.0)
        end = max(end, stop)
    return total


def _table(title: str, events: list[Event], key: Any) -> str:
    groups: dict[str, list[float]] = defaultdict(list)
    for event in events:
        groups[key(event) or "(unnamed)"].append(event.duration)
    whole = sum(event.duration for event in events)
    order = sorted(groups.items(), key=lambda item: -sum(item[1]))
    lines = [f"{'ms':>10} {'share':>7} {'calls':>8} {'µs each':>9}  {title}"]
    for name, durations in order[:TOP]:
        total = sum(durations)
        lines.append(
            f"{total / 1e6:10.3f} {100 * total / whole:6.1f}% {len(durations):8d}"
            f" {total / len(durations) / 1e3:9.2f}  {name[:110]}"
        )
    rest = sum(sum(durations) for _, durations in order[TOP:])
    if rest:
        lines.append(f"{rest / 1e6:10.3f} {100 * rest / whole:6.1f}%  {len(order) - TOP} others")
    return "\n".join(lines)
