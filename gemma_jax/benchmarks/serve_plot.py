"""Plots a sweep over request rates: time to first token and inter-token latency."""

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gemma_jax.benchmarks.serve_metrics import rate_text
from gemma_jax.errors import ConfigError

PANELS = {"ttft": "Time to first token", "itl": "Inter-token latency"}


def check_plot(path: Path | None) -> None:
    """Raise ConfigError when a plot is wanted and cannot be made."""
    if path is None:
        return
    if path.suffix != ".png":
        raise ConfigError(f"--plot {path}: expected a file name that ends in .png")
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("--plot needs matplotlib: pip install 'gemma-jax[report]'")


def plot_sweep(results: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Write a PNG: a panel a latency, its median and p99 against the request rate.

    Args:
      results: one a rate, in the order of the x axis.
      path: of the PNG; its folder is made.
    """
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    rates = [rate_text(result) for result in results]
    positions = range(len(rates))
    figure, panels = pyplot.subplots(1, len(PANELS), figsize=(10, 4), layout="constrained")
    for panel, (name, title) in zip(panels, PANELS.items(), strict=True):
        for kind, style in (("median", "o-"), ("p99", "s--")):
            panel.plot(positions, [r[f"{kind}_{name}_ms"] for r in results], style, label=kind)
        panel.set_title(title)
        panel.set_xlabel("request rate (requests/s)")
        panel.set_ylabel("ms")
        panel.set_xticks(positions, rates)
        panel.set_ylim(bottom=0)
        panel.grid(alpha=0.3)
        panel.legend()
    figure.suptitle(f"{results[0]['model_id']}, {results[0]['num_prompts']} requests a rate")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
