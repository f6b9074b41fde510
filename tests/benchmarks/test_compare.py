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


def test_a_server_is_shown_by_its_rates_and_latencies():
    latencies = {f"{kind}_{x}_ms": 5.0 for kind in ("median", "p99") for x in ("ttft", "itl")}
    result = {"request_throughput": 9.5, "output_throughput": 28000.0, **latencies}
    row = result_row(bench="serve", case="100x6+8 rate inf", config={}, result=result)
    assert compare.table("serve", [row]).splitlines()[-1] == (
        "| 100x6+8 rate inf | gemma_jax | 9.50 | 28,000 | 5.0 / 5.0 | 5.0 / 5.0 | – / – | – / – |"
    )


def kernel_row(implementation="triton", **changes):
    derived = {
        "flops_per_s": 4e14, "mfu": 0.571, "bytes_per_s": 5e11, "mbu": 0.125,
        "speedup_over_reference": 3.25,
    }  # fmt: skip
    row = {
        "bench": "kernels-prefill_attention", "case": "e2b full 8x2048", "config": {},
        "implementation": implementation, "median_ms": 0.6, "derived": derived,
    }  # fmt: skip
    return result_row(**row | changes)


def test_kernels_of_all_ops_share_a_table():
    derived = {
        "flops_per_s": 0.0, "mfu": 0.0, "bytes_per_s": 3.9e12, "mbu": 0.945,
        "speedup_over_reference": None,
    }  # fmt: skip
    norm = kernel_row(
        bench="kernels-gelu_mul", case="16384 rows", median_ms=0.0523, derived=derived
    )
    lines = compare.table("kernels", [kernel_row(), norm]).splitlines()
    assert lines[-2:] == [
        "| gelu_mul | 16384 rows | triton | 52.30 | – | 3.900 | 94.5 | – |",
        "| prefill_attention | e2b full 8x2048 | triton | 600.00 | 400.0 | 0.500 | 57.1 | 3.25 |",
    ]


def test_a_case_shows_the_rows_of_the_commit_that_measured_it_last():
    old = [kernel_row("reference"), kernel_row("cudnn"), kernel_row(case="other")]
    later = {"commit": "fedcba9876", "date_utc": "2026-01-03T00:00:00+00:00"}
    new = [kernel_row("reference", **later), kernel_row("mosaic", **later)]
    text = compare.table("kernels", [*new, *old])
    assert "commit 0123456, fedcba9," in text
    cells = [line.split(" | ")[1:3] for line in text.splitlines()[4:]]
    assert sorted(cells) == [
        ["e2b full 8x2048", "mosaic"], ["e2b full 8x2048", "reference"], ["other", "triton"]
    ]  # fmt: skip


def test_vllms_kernels_stand_beside_ours_of_the_same_commit():
    later = {"commit": "fedcba9876", "date_utc": "2026-01-03T00:00:00+00:00"}
    rows = [
        kernel_row("mosaic"), kernel_row("mosaic", median_ms=0.3, **later),
        kernel_row("vllm", median_ms=1.5, **later), kernel_row("triton", case="other", **later),
        kernel_row("vllm-fused", status="error", median_ms=None, derived={}, **later),
    ]  # fmt: skip
    lines = compare.table("vllm", rows).splitlines()
    assert lines[2].endswith("| implementation | µs | TFLOP/s | TB/s | × vLLM |")
    assert lines[4:] == [
        "| prefill_attention | e2b full 8x2048 | vllm | 1,500.00 | 400.0 | 0.500 | 1.00 |",
        "| prefill_attention | e2b full 8x2048 | vllm-fused |  |  |  | error |",
        "| prefill_attention | e2b full 8x2048 | mosaic | 300.00 | 400.0 | 0.500 | 5.00 |",
    ]
    assert "vllm" not in compare.table("kernels", rows)


def test_a_failed_kernel_keeps_its_names():
    row = kernel_row(status="error", median_ms=None, derived={})
    line = compare.table("kernels", [row]).splitlines()[-1]
    assert line == "| prefill_attention | e2b full 8x2048 | triton |  |  |  |  | error |"


def test_a_table_of_kernels_is_filled_from_a_file(tmp_path, monkeypatch):
    rows, document = tmp_path / "kernels.jsonl", tmp_path / "kernels.md"
    rows.write_text(json.dumps(kernel_row()) + "\n")
    document.write_text("a\n<!-- table: kernels -->\nNo rows yet.\n<!-- end table -->\n")
    monkeypatch.setattr("sys.argv", ["compare", str(rows), "--update", str(document)])
    assert compare.main() == 0
    text = document.read_text(encoding="utf-8")
    assert "| op | case | implementation | µs | TFLOP/s | TB/s | % of peak | × plain jnp |" in text
    assert "| prefill_attention | e2b full 8x2048 | triton | 600.00 |" in text


def test_only_the_blocks_of_a_document_change():
    document = "a\n<!-- table: throughput -->\nold\n<!-- end table -->\nb\n"
    updated = compare.update(document, [result_row()])
    assert updated.startswith("a\n<!-- table: throughput -->\nNVIDIA H200")
    assert updated.endswith("|\n<!-- end table -->\nb\n")
    assert "old" not in updated
    assert compare.update(updated, [result_row()]) == updated


def test_a_table_of_some_cases_only():
    rows = [result_row(), result_row() | {"case": "another"}]
    document = "<!-- table: throughput anoth -->\n<!-- end table -->\n"
    updated = compare.update(document, rows)
    assert "| another |" in updated
    assert f"| {result_row()['case']} |" not in updated
    assert compare.update(updated, rows) == updated


def test_a_broken_line_is_named(tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_text(json.dumps(result_row()) + "\n{\n")
    with pytest.raises(ValueError, match=r"x\.jsonl, line 2: not a result row"):
        compare.read_rows([path])


def test_the_committed_tables_are_those_of_the_committed_rows():
    rows = compare.read_rows(sorted(compare.RESULTS.glob("*.jsonl")))
    documents = "docs/benchmarks.md", "docs/kernels.md", "docs/parity.md", "README.md"
    for path in (REPOSITORY / name for name in documents):
        text = path.read_text(encoding="utf-8")
        assert compare.update(text, rows) == text, f"run: python -m bench.compare --update {path}"
