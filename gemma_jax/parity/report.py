"""One self-contained HTML page of comparisons: tables, and plots as inline SVG (extra `report`)."""

import html
import io
import re
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from gemma_jax.errors import UnsupportedError
from gemma_jax.parity.summary import describe, facts, flip_line
from gemma_jax.version import __version__

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = {"tie": "#7f7f7f", "noise": "#1f77b4", "unexplained": "#d62728"}
MAX_FLIPS = 200
_METADATA = ("Creator", "Date", "Format", "Type")

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 72rem; margin: 2rem auto; padding: 0 1rem;
  color: #1a1a1a; background: #fff }
table { border-collapse: collapse; margin: 1rem 0 }
th, td { padding: .25rem .75rem; border-bottom: 1px solid #ddd; text-align: left }
td.number, th.number { text-align: right; font-variant-numeric: tabular-nums }
.pass { color: #1a7f37 } .fail { color: #b42318 }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(26rem, 1fr)); gap: 1rem }
figure { margin: 0 } svg { width: 100%; height: auto }
figcaption, .note { color: #555; font-size: 13px }
pre { overflow-x: auto; background: #f6f6f6; padding: .75rem }
"""


def html_page(results: Sequence[dict[str, Any]]) -> str:
    """The page of some results (of `summary.result`), each with its tables and plots.

    Raises:
      UnsupportedError: matplotlib is not installed.
    """
    _require_matplotlib()
    parts = [part for number, r in enumerate(results) for part in _section(r, number)]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width">'
        f"<title>Parity</title><style>{STYLE}</style></head>\n<body>\n<h1>Parity</h1>\n"
        + (_overview(results) if len(results) > 1 else "")
        + "\n".join(parts)
        + f'\n<p class="note">gemma-jax {html.escape(__version__)}, <code>gemma-jax parity</code>.'
        " Bounds are one-sided 95 % Clopper-Pearson.</p>\n</body></html>\n"
    )


def _require_matplotlib() -> None:
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise UnsupportedError(
            "the HTML report needs matplotlib: pip install 'gemma-jax[report]'; the JSON result"
            " and the table need nothing"
        ) from None


# --- tables -------------------------------------------------------------------------------------


def _overview(results: Sequence[dict[str, Any]]) -> str:
    rows = [
        [
            f'<a href="#result-{i}">{html.escape(describe(r["reference"]))}</a>',
            html.escape(describe(r["ours"])),
            f"{r['flips_rate']['tokens']:,}",
            f"{r['top1_agreement']:.4%}",
            str(r["classes"]["unexplained"]),
            f"{r['unexplained_rate']['upper_95']:.4%}",
            _verdict(r),
        ]
        for i, r in enumerate(results)
    ]
    heads = ["reference", "ours", "tokens", "top-1", "unexplained", "95 % upper", ""]
    return _table(heads, rows, numbers=range(2, 6))


def _verdict(r: dict[str, Any]) -> str:
    if r["failed"]:
        return '<b class="fail">unexplained differences</b>'
    return '<b class="pass">no unexplained difference</b>'


def _section(r: dict[str, Any], number: int) -> Iterator[str]:
    yield f'<section id="result-{number}"><h2>{html.escape(describe(r["reference"]))}</h2>'
    yield f"<p>{_verdict(r)}</p>"
    yield _table(["", ""], [[html.escape(a), html.escape(b)] for a, b in facts(r)])
    yield '<div class="plots">'
    for title, note, draw in PLOTS:
        yield _figure(title, note, draw, r, f"r{number}-{PLOTS.index((title, note, draw))}-")
    yield "</div>"
    if r["trace"] is not None and r["trace"]["lines"]:
        yield f"<h3>Sub-blocks</h3><pre>{html.escape(chr(10).join(r['trace']['lines'][1:]))}</pre>"
    yield from _splits(r)
    yield from _flips(r)
    yield "</section>"


def _splits(r: dict[str, Any]) -> Iterator[str]:
    rows = [
        [
            html.escape(f"{name.replace('_', ' ')} {label}"),
            f"{rate['tokens']:,}",
            f"{rate['flips']:,}",
            f"{rate['rate']:.4%}",
            f"{rate['upper_95']:.4%}",
        ]
        for name, rates in r["splits"].items()
        for label, rate in rates.items()
    ]
    yield "<h3>Flip rate by batch size, position and prompt length</h3>"
    yield _table(["split", "tokens", "flips", "rate", "95 % upper"], rows, numbers=range(1, 5))


def _flips(r: dict[str, Any]) -> Iterator[str]:
    free = r["free_running"] or {"first_divergences": []}
    flips = [*r["flips"], *free["first_divergences"]]
    if not flips:
        return
    flips.sort(key=lambda flip: flip["kind"] != "unexplained")
    lines = [f"{flip['kind']:<12}{flip_line(flip).strip().rstrip(': ')}" for flip in flips]
    yield f"<h3>Flips</h3><pre>{html.escape(chr(10).join(lines[:MAX_FLIPS]))}</pre>"
    if len(flips) > MAX_FLIPS:
        yield f'<p class="note">The first {MAX_FLIPS} of {len(flips)}.</p>'


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]], numbers: Sequence[int] = ()) -> str:
    def cells(tag: str, values: Sequence[str]) -> str:
        marks = [' class="number"' if i in numbers else "" for i in range(len(values))]
        pairs = zip(marks, values, strict=True)
        return "".join(f"<{tag}{mark}>{value}</{tag}>" for mark, value in pairs)

    head = f"<thead><tr>{cells('th', heads)}</tr></thead>" if any(heads) else ""
    body = "".join(f"<tr>{cells('td', row)}</tr>" for row in rows)
    return f"<table>{head}<tbody>{body}</tbody></table>"


# --- plots --------------------------------------------------------------------------------------


def _histogram(axes: "Axes", r: dict[str, Any]) -> None:
    edges, counts = r["histogram"]["edges"], r["histogram"]["counts"]
    axes.stairs(counts, edges, fill=True, color="#1f77b4")
    axes.set(xlabel="Δlogprob, nats", ylabel="tokens", yscale="symlog")


def _margins(axes: "Axes", r: dict[str, Any]) -> None:
    limit = r["noise_limit"]["nats"]
    for kind, colour in COLOURS.items():
        points = [
            (flip["reference_margin"], flip["our_margin"])
            for flip in r["flips"]
            if flip["kind"] == kind and None not in (flip["reference_margin"], flip["our_margin"])
        ]
        x, y = zip(*points, strict=True) if points else ((), ())
        axes.scatter(x, y, s=18, color=colour, label=f"{kind} ({r['classes'][kind]})")
    if limit:
        axes.plot([0, limit, limit], [limit, limit, 0], color="#555", linewidth=1, linestyle=":")
    axes.set(xlabel="reference's margin, nats", ylabel="our margin, nats")
    axes.legend()


def _agreement(axes: "Axes", r: dict[str, Any]) -> None:
    part = r["agreement_by_position"]
    counted = [
        ((low + high) / 2, 1 - flips / tokens)
        for low, high, tokens, flips in zip(
            part["edges"], part["edges"][1:], part["tokens"], part["flips"], strict=False
        )
        if tokens
    ]
    axes.plot(*zip(*counted, strict=True), marker=".", color="#1f77b4")
    axes.set(xlabel="position in the sequence, tokens", ylabel="top-1 agreement")
    axes.set_ylim(min(y for _, y in counted) - 0.005, 1.001)


def _survival(axes: "Axes", r: dict[str, Any]) -> None:
    curve = r["survival"]
    axes.step(curve["tokens"], curve["observed"], where="post", color="#1f77b4", label="observed")
    steps = [curve["tokens"][-1] * i / 100 for i in range(101)]
    for key, label, style in (("rate", "(1 − p)ᴺ", "--"), ("upper_95", "with the bound of p", ":")):
        p = r["flips_rate"][key]
        axes.plot(steps, [(1 - p) ** n for n in steps], style, color="#555", label=label)
    axes.set(xlabel="N, tokens", ylabel="sequences without a flip", ylim=(-0.02, 1.02))
    axes.legend()


PLOTS: list[tuple[str, str, Callable[["Axes", dict[str, Any]], None]]] = [
    ("Δlogprob", "of the reference's choice; the outer bins hold what lies beyond", _histogram),
    ("Flips against margin", "dotted: the noise limit", _margins),
    ("Agreement against position", "teacher-forced", _agreement),
    ("Survival", "flips in teacher-forced sequences; Kaplan-Meier estimate", _survival),
]


def _figure(title: str, note: str, draw: Callable, r: dict[str, Any], prefix: str) -> str:
    import matplotlib
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    # A fixed salt and no metadata: the same results give the same page.
    with matplotlib.rc_context({"svg.hashsalt": prefix, "svg.fonttype": "path"}):
        figure = Figure(figsize=(5.6, 3.6), layout="constrained")
        FigureCanvasSVG(figure)
        draw(figure.subplots(), r)
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", metadata=dict.fromkeys(_METADATA))
    svg = buffer.getvalue()
    svg = _unique_ids(svg[svg.index("<svg") :], prefix)
    caption = f"<b>{html.escape(title)}</b>, {html.escape(note)}"
    return f"<figure>{svg}<figcaption>{caption}</figcaption></figure>"


def _unique_ids(svg: str, prefix: str) -> str:
    """Ids of an SVG must differ from those of the others in one page."""
    svg = re.sub(r'\bid="', f'id="{prefix}', svg)
    svg = re.sub(r'href="#', f'href="#{prefix}', svg)
    return svg.replace("url(#", f"url(#{prefix}")
