"""The HTML page: one file, with plots, and nothing that a reader's browser would fetch."""

import re

import pytest

from gemma_jax.errors import UnsupportedError
from gemma_jax.parity import report

FLIP = {
    "id": "<b>&", "token": 3, "position": 9, "expected": 5, "actual": 6, "reference_margin": 0.01,
    "our_margin": 0.02, "kind": "noise", "reason": "",
}  # fmt: skip
RATE = {"flips": 2, "tokens": 100, "rate": 0.02, "upper_95": 0.06}
RESULT = {
    "reference": {"engine": "transformers", "dtype": "bfloat16", "model": {"name": "<nano>"}},
    "ours": {"engine": "gemma_jax", "dtype": "bfloat16"},
    "sequences": 4,
    "top1_agreement": 0.98,
    "classes": {"tie": 0, "noise": 1, "unexplained": 1},
    "flips_rate": RATE,
    "unexplained_rate": RATE,
    "noise_limit": {"nats": 0.1, "source": "given"},
    "delta_logprob": {"listed": 100, "mean": 1e-3, "p99": 1e-2, "max": 0.1, "max_shared_top": 0.2},
    "splits": {"batch": {"8": RATE}},
    "survival": {"tokens": [0, 3, 25], "observed": [1, 0.75, 0.75]},
    "histogram": {"edges": [-0.1, 0.0, 0.1], "counts": [3, 4]},
    "agreement_by_position": {"edges": [0, 10, 20], "tokens": [60, 0], "flips": [2, 0]},
    "flips": [FLIP, FLIP | {"kind": "unexplained", "reference_margin": None, "reason": "far"}],
    "free_running": None,
    "trace": None,
    "failed": True,
}


def test_page_needs_matplotlib_and_says_how_to_get_it(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    with pytest.raises(UnsupportedError, match=r"pip install 'gemma-jax\[report\]'"):
        report.html_page([RESULT])


def test_page_is_self_contained_with_four_plots_a_result():
    pytest.importorskip("matplotlib")
    page = report.html_page([RESULT, RESULT | {"failed": False}])
    assert page.count("<svg") == page.count("</svg>") == 8
    assert not re.search(r'(?:src|href)="(?!#)', page)
    assert "http" not in re.sub(r'xmlns(:\w+)?="[^"]*"|"http://[^"]*"', "", page)
    ids = re.findall(r'\bid="([^"]+)"', page)
    assert len(ids) == len(set(ids))
    assert set(re.findall(r'href="#([^"]+)"', page)) <= set(ids)


def test_page_escapes_names_and_tells_both_verdicts():
    pytest.importorskip("matplotlib")
    page = report.html_page([RESULT, RESULT | {"failed": False}])
    assert "<nano>" not in page
    assert "&lt;b&gt;&amp;" in page
    assert "unexplained differences" in page
    assert "no unexplained difference" in page
    assert "an unlisted margin" in page


def test_same_results_give_the_same_page():
    pytest.importorskip("matplotlib")
    assert report.html_page([RESULT]) == report.html_page([RESULT])
