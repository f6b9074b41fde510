"""Result rows: schema, files, commands, statuses; timing and workload names."""

import json
import subprocess

import numpy as np
import pytest

from gemma_jax.benchmarks import rows
from gemma_jax.benchmarks.measure_workload import guarded
from gemma_jax.benchmarks.rows import Report, Row, Source
from gemma_jax.benchmarks.timing import Timing, measure
from gemma_jax.benchmarks.workload import Workload
from gemma_jax.errors import CapacityError, ConfigError, UnsupportedError

SCHEMA = {
    "schema", "bench", "case", "implementation", "commit", "dirty", "date_utc", "device",
    "versions", "command", "config", "warmup", "samples_ms", "median_ms", "p10_ms", "p90_ms",
    "compile_ms", "peak_memory_bytes", "derived", "numerics", "status", "note",
}  # fmt: skip


def test_a_row_has_every_field_of_the_schema():
    row = Row("throughput", "1x1+1").as_json(Source("abc", True))
    assert row.keys() >= SCHEMA
    assert row["device"].keys() == {"kind", "count", "memory_bytes"}
    assert row["versions"].keys() >= {"python", "jax", "jaxlib", "flax", "driver"}
    assert (row["commit"], row["dirty"]) == ("abc", True)
    assert json.loads(json.dumps(row)) == row


def test_rows_in_a_folder_go_to_a_file_of_date_device_and_bench(tmp_path):
    row = {"date_utc": "2026-01-02T03:04:05+00:00", "bench": "load"}
    row["device"] = {"kind": "NVIDIA A100-SXM4-80GB"}
    rows.append_row(tmp_path, row)
    path = rows.append_row(tmp_path, row)
    assert path.name == "20260102-a100-sxm4-80gb-load.jsonl"
    assert [json.loads(line) for line in path.read_text().splitlines()] == [row, row]


def test_the_command_of_a_row_leaves_out_where_files_went():
    given = ["--workload", "8x2048+1", "--output-json", "out", "--commit=abc", "--seed", "1"]
    assert rows.command_line("throughput", given) == (
        "python -m bench.throughput --workload 8x2048+1 --seed 1"
    )


def test_a_given_commit_says_whether_the_files_differed():
    assert Source.find("abc-dirty") == Source("abc", True)
    assert Source.find("abc") == Source("abc", False)


def test_outside_a_git_checkout_the_commit_is_unknown(monkeypatch):
    def missing(*args, **kwargs):
        raise FileNotFoundError("git")

    monkeypatch.setattr(subprocess, "run", missing)
    assert Source.find() == Source(None, None)


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (UnsupportedError("no"), "unsupported"),
        (CapacityError("full"), "oom"),
        (MemoryError(), "oom"),
        (RuntimeError("RESOURCE_EXHAUSTED: Out of memory"), "oom"),
        (RuntimeError("INTERNAL"), "error"),
    ],
)
def test_a_failure_becomes_a_row_with_its_reason(error, status):
    def fail(row):
        raise error

    row = guarded(Row("throughput", "1x1+1"), fail)
    assert row.status == status
    assert row.note == f"{type(error).__name__}: {error}"


def test_an_interrupt_is_not_a_row():
    def fail(row):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        guarded(Row("throughput", "1x1+1"), fail)


def test_a_report_with_a_failed_row_exits_with_1_and_ends_with_one_json_line(capsys):
    report = Report(None, Source())
    report.add(Row("throughput", "1x1+1", result={"elapsed_time": 1.0}))
    assert report.finish() == 0
    assert json.loads(capsys.readouterr().out) == {"elapsed_time": 1.0}
    report.add(Row("throughput", "2x1+1", status="oom", note="full"))
    assert report.finish() == 1
    cases = json.loads(capsys.readouterr().out)["cases"]
    assert cases == {"1x1+1": {"elapsed_time": 1.0}, "2x1+1": {"error": "full"}}


def test_only_the_run_is_timed_and_every_call_gets_fresh_input():
    given = iter(range(100))
    seen = []
    timing = measure(lambda: next(given), seen.append, warmup=2, iters=3)
    assert seen == [0, 1, 2, 3, 4, 5]
    assert len(timing.samples_ms) == 3


def test_compile_time_is_the_first_call_less_the_median():
    timing = Timing(first_ms=105.0, samples_ms=[4.0, 5.0, 9.0], warmup=1)
    fields = timing.fields()
    assert (fields["median_ms"], fields["compile_ms"]) == (5.0, 100.0)
    assert 4.0 < fields["p10_ms"] < 5.0 < fields["p90_ms"] < 9.0


def test_workload_names_round_trip():
    assert Workload.parse("8x2048+1") == Workload(8, 2048, 1)
    assert Workload(64, 128, 256).name == "64x128+256"


@pytest.mark.parametrize("name", ["8x2048", "8*2048+1", "0x8+1", "1x8+0", "-1x8+1", "", "1x8+1 "])
def test_other_workload_names_are_refused(name):
    with pytest.raises(ConfigError, match=r"workload|num_requests|output_len"):
        Workload.parse(name)


def test_prompts_are_fresh_ids_inside_the_vocabulary():
    rng = np.random.default_rng(0)
    workload = Workload(3, 50, 1)
    first, second = (workload.prompts(rng, 16) for _ in range(2))
    assert [len(p["prompt_token_ids"]) for p in first] == [50] * 3
    assert {i for p in first for i in p["prompt_token_ids"]} == set(range(16))
    assert first != second
