"""Markdown tables from result rows."""

import json
from pathlib import Path

import pytest
from bench_helpers import result_row

from bench import compare

REPOSITORY = Path(__file__).parents[2]


def test_a_table_names_device_versions_commit_and_figures():
    text = compare.table("throughput", [result_row()])
    assert text.startswith("NVIDIA H200, jax 0.11.2, driver 580, commit 0123456, 2026-01-02:")
    assert text.splitlines()[-1] == (
        "| 8x2048+1 | gemma_jax | 50.0 (49.0-51.0) | 327,680 | 160 | 52.7 | – | 16.00 | 2.0 |"
    )


def test_the_newest_row_of_a_case_counts_whatever_the_order():
    old = result_row(median_ms=99.0)
    new = result_row(date_utc="2026-01-03T00:00:00+00:00")
    assert compare.newest([new, old]) == [new]


def test_other_settings_and_other_engines_are_lines_of_their_own():
    model = {"model": "random weights, e2b"}
    changes = [
        {}, {"config": model | {"fast_prefill": False}}, {"config": model | {"rounding": "vllm"}},
        {"implementation": "vllm 0.25.1"}, {"device": {"kind": "NVIDIA A100", "count": 1}},
    ]  # fmt: skip
    text = compare.table("throughput", [result_row(**c) for c in changes])
    assert text.count("| 8x2048+1 |") == 5
    assert "| gemma_jax, no fast prefill |" in text
    assert "| gemma_jax, rounding vllm |" in text


def test_a_failed_row_shows_its_status_and_no_number():
    text = compare.table("throughput", [result_row(status="oom", median_ms=None)])
    assert text.splitlines()[-1] == "| 8x2048+1 | gemma_jax |  |  |  |  |  |  | oom |"


def test_only_the_blocks_of_a_document_change():
    document = "a\n<!-- table: throughput -->\nold\n<!-- end table -->\nb\n"
    updated = compare.update(document, [result_row()])
    assert updated.startswith("a\n<!-- table: throughput -->\nNVIDIA H200")
    assert updated.endswith("|\n<!-- end table -->\nb\n")
    assert "old" not in updated
    assert compare.update(updated, [result_row()]) == updated


def test_a_broken_line_is_named(tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_text(json.dumps(result_row()) + "\n{\n")
    with pytest.raises(ValueError, match=r"x\.jsonl, line 2: not a result row"):
        compare.read_rows([path])


def test_the_committed_tables_are_those_of_the_committed_rows():
    rows = compare.read_rows(sorted(compare.RESULTS.glob("*.jsonl")))
    for path in (REPOSITORY / "docs/benchmarks.md", REPOSITORY / "README.md"):
        text = path.read_text(encoding="utf-8")
        assert compare.update(text, rows) == text, f"run: python -m bench.compare --update {path}"
