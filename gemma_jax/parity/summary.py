"""A comparison as JSON, and as a table for a terminal."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from gemma_jax.errors import RecordError
from gemma_jax.parity.compare import Comparison, FreeRun, Positions
from gemma_jax.parity.flips import count_classes

FORMAT = "gemma-jax-parity/1"
BINS = 60
POSITION_BINS = 40
MAX_LISTED = 20


def result(comparison: Comparison) -> dict[str, Any]:
    """The comparison as JSON values; docs/parity.md lists the fields."""
    c, p = comparison, comparison.positions
    delta = np.abs(p.delta[np.isfinite(p.delta)])
    return {
        "format": FORMAT,
        "reference": c.reference.header | {"file": c.reference.name},
        "ours": c.ours | {"dtype": c.dtype},
        "sequences": len(c.reference.streams),
        "failed_rows": len(c.reference.failed),
        "top1_agreement": 1 - c.rate.share,
        "classes": count_classes(c.flips),
        "flips_rate": c.rate.as_json(),
        "unexplained_rate": c.unexplained_rate.as_json(),
        "noise_limit": {"nats": c.limit.nats, "source": c.limit.source},
        "delta_logprob": {
            "of": "the reference's choice",
            "listed": int(delta.size),
            "mean": _number(delta.mean()) if delta.size else None,
            "p99": _number(np.percentile(delta, 99)) if delta.size else None,
            "max": _number(delta.max()) if delta.size else None,
            "max_shared_top": _number(p.worst_delta.max()),
        },
        "splits": {
            name: {label: rate.as_json() for label, rate in rates.items()}
            for name, rates in c.splits().items()
        },
        "survival": c.survival().as_json(),
        "histogram": _histogram(p),
        "agreement_by_position": _by_position(p),
        "flips": [flip.as_json() for flip in c.flips],
        "free_running": None if c.free is None else _free(c.free),
        "trace": None if c.trace is None else c.trace.as_json(),
        "failed": c.failed,
    }


def _number(value: Any) -> float:
    return float(f"{float(value):.7g}")


def _free(free: FreeRun) -> dict[str, Any]:
    return {
        "batch": free.batch,
        "whole": free.whole,
        "sequences": len(free.lengths),
        "prefix_agreement": free.prefix_agreement,
        "agreed": free.agreed,
        "lengths": free.lengths,
        "classes": count_classes(free.flips),
        "first_divergences": [flip.as_json() for flip in free.flips],
    }


def _histogram(p: Positions) -> dict[str, Any]:
    """Counts of the signed Δlogprob of the reference's choice, in equal bins around 0."""
    delta = p.delta[np.isfinite(p.delta)]
    reach = max(float(np.percentile(np.abs(delta), 99.9)) if delta.size else 0.0, 1e-6)
    counts, edges = np.histogram(np.clip(delta, -reach, reach), BINS, (-reach, reach))
    return {"edges": [_number(x) for x in edges], "counts": counts.tolist()}


def _by_position(p: Positions) -> dict[str, Any]:
    """Tokens and flips in equal ranges of positions."""
    edges = np.linspace(0, int(p.position.max()) + 1, POSITION_BINS + 1)
    tokens, _ = np.histogram(p.position, edges)
    flips, _ = np.histogram(p.position[p.flipped], edges)
    return {
        "edges": [_number(x) for x in edges],
        "tokens": tokens.tolist(),
        "flips": flips.tolist(),
    }


def position_rows(comparison: Comparison) -> Iterator[dict[str, Any]]:
    """One row a sequence with a list a quantity, for `--positions`."""
    names = ("position", "expected", "actual", "margin", "delta", "worst_delta", "float32")
    for index, stream in enumerate(comparison.reference.streams):
        part = comparison.positions.of_stream(index)
        columns = {}
        for name in names:
            values = getattr(part, name)
            if values.dtype.kind == "f":
                columns[name] = [_number(x) if np.isfinite(x) else None for x in values]
            else:
                columns[name] = values.tolist()
        columns["float32"] = [None if x < 0 else x for x in columns["float32"]]
        yield {"id": stream.id, **columns}


def load_result(path: str | Path) -> dict[str, Any]:
    """Reads a JSON file of `result`.

    Raises:
      RecordError: no such file, or not a result of this version.
    """
    try:
        value = json.loads(Path(path).read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise RecordError(f"{path}: no result of `gemma-jax parity compare`: {error}") from None
    if not isinstance(value, dict) or value.get("format") != FORMAT:
        raise RecordError(f"{path}: not a result of `gemma-jax parity compare` ({FORMAT})")
    return value


# --- terminal -----------------------------------------------------------------------------------


def text_table(r: dict[str, Any]) -> str:
    """The result for a terminal: counts with bounds, splits, and the flips that matter."""
    lines = [f"{name:<13}{value}" for name, value in facts(r)]
    lines += ["", f"{'split':<34}{'tokens':>9}{'flips':>8}{'rate':>10}{'95 % upper':>13}"]
    for name, rates in r["splits"].items():
        for label, rate in rates.items():
            title = f"{name.replace('_', ' ')} {label}"
            lines.append(
                f"{title:<34}{rate['tokens']:>9,}{rate['flips']:>8,}{rate['rate']:>10.4%}"
                f"{rate['upper_95']:>13.4%}"
            )
    return "\n".join([*lines, *_flip_lines(r)])


def facts(r: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Name and value of what a reader wants to know first."""
    rate, classes, delta = r["flips_rate"], r["classes"], r["delta_logprob"]
    yield "reference", describe(r["reference"])
    yield "ours", describe(r["ours"])
    yield "tokens", f"{rate['tokens']:,} in {r['sequences']:,} sequences, teacher-forced"
    yield "top-1", f"{r['top1_agreement']:.4%} equal"
    yield (
        "flips",
        (
            f"{rate['flips']}: {classes['tie']} ties, {classes['noise']} inside the noise,"
            f" {classes['unexplained']} unexplained"
        ),
    )
    yield "flip rate", f"{rate['rate']:.4%}, below {rate['upper_95']:.4%} with 95 % confidence"
    unexplained = r["unexplained_rate"]
    yield (
        "unexplained",
        (f"{unexplained['rate']:.4%}, below {unexplained['upper_95']:.4%} with 95 % confidence"),
    )
    yield "noise limit", f"{r['noise_limit']['nats']:.4g} nat ({r['noise_limit']['source']})"
    if delta["listed"]:
        yield (
            "Δlogprob",
            (
                f"mean {delta['mean']:.2e}, 99 % {delta['p99']:.2e}, max {delta['max']:.2e} of the"
                f" reference's choice; max {delta['max_shared_top']:.2e} over shared candidates"
            ),
        )
    free = r["free_running"]
    if free is not None:
        yield (
            "free-running",
            (
                f"{free['whole']} of {free['sequences']} whole, prefix agreement"
                f" {free['prefix_agreement']:.2%}, batch {free['batch']};"
                f" {free['classes']['unexplained']} first differences unexplained"
            ),
        )
    if r["trace"] is not None:
        yield "trace", r["trace"]["summary"]


def describe(header: dict[str, Any]) -> str:
    """Engine, version, model, dtype and device of one side, in a line."""
    settings = header.get("settings")
    settings = settings if isinstance(settings, dict) else {}
    engine = str(header.get("engine") or "unknown engine")
    version = (header.get("versions") or {}).get(engine) or header.get(engine)
    model = header.get("model")
    device = header.get("device")
    words = [
        f"{engine} {version}" if version else engine,
        model.get("name") if isinstance(model, dict) else model,
        header.get("dtype") or settings.get("dtype"),
        f"rounding {header['rounding']}" if header.get("rounding") else None,
        device.get("kind") if isinstance(device, dict) else device,
        header.get("file"),
    ]
    return ", ".join(str(word) for word in words if word)


def _flip_lines(r: dict[str, Any]) -> Iterator[str]:
    free = r["free_running"] or {"first_divergences": []}
    for title, flips in (
        ("unexplained flips, teacher-forced", r["flips"]),
        ("unexplained first differences, free-running", free["first_divergences"]),
    ):
        bad = [flip for flip in flips if flip["kind"] == "unexplained"]
        if bad:
            yield ""
            yield f"{title}:"
            yield from map(flip_line, bad[:MAX_LISTED])
            if len(bad) > MAX_LISTED:
                yield f"  … and {len(bad) - MAX_LISTED} more"
    if r["trace"] is not None:
        yield from r["trace"]["lines"]


def flip_line(flip: dict[str, Any]) -> str:
    """One flip: prompt, position, both candidates and margins."""

    def nats(margin: float | None) -> str:
        return "an unlisted margin" if margin is None else f"{margin:.4f} nat"

    return (
        f"  prompt {flip['id']!r}, position {flip['position']}: the reference chooses"
        f" {flip['expected']} by {nats(flip['reference_margin'])}, we {flip['actual']} by"
        f" {nats(flip['our_margin'])}: {flip['reason']}"
    )
