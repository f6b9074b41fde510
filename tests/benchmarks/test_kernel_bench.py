"""`bench.kernels` and its timing, on a CPU: what is measured, chosen and written."""

import json

import jax.numpy as jnp
import pytest

from gemma_jax.benchmarks import kernels, profile
from gemma_jax.benchmarks.ceilings import Ceilings
from gemma_jax.benchmarks.kernel_timing import L2_BYTES, rotations, time_kernel
from gemma_jax.benchmarks.profile import Event
from gemma_jax.benchmarks.timing import Timing
from gemma_jax.pallas.cases import all_cases

FIELDS = {
    "schema", "bench", "case", "implementation", "commit", "dirty", "date_utc", "device",
    "versions", "command", "config", "warmup", "samples_ms", "median_ms", "p10_ms", "p90_ms",
    "compile_ms", "peak_memory_bytes", "derived", "result", "numerics", "status", "note",
}  # fmt: skip
RATES = {"flops_per_s", "mfu", "bytes_per_s", "mbu", "speedup_over_reference"}


@pytest.fixture
def no_ceilings(monkeypatch):
    monkeypatch.setattr(kernels, "_ceilings", lambda report: Ceilings(1e12, 1e12))


def test_a_run_writes_a_row_for_each_implementation(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("gemma_jax.benchmarks.ceilings.CALLS", 1)
    path = tmp_path / "rows.jsonl"
    chosen = ["--op", "Residual_Norm", "--case", "E2B, 1 token", "--num-calls", "2"]
    assert kernels.main([*chosen, "--commit", "abc-dirty", "--output-json", str(path)]) == 0
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert all(set(row) == FIELDS for row in rows)
    assert [row["bench"] for row in rows[:2]] == ["ceilings"] * 2
    rows = rows[2:]
    assert [(r["bench"], r["case"], r["implementation"]) for r in rows] == [
        ("kernels-residual_norm", "e2b, 1 token", name) for name in ("reference", "triton")
    ]
    for row in rows:
        assert (row["status"], row["commit"], row["dirty"]) == ("ok", "abc", True)
        assert len(row["samples_ms"]) == 2
        assert set(row["derived"]) == RATES
        assert "--op Residual_Norm" in row["command"]
        assert "output-json" not in row["command"]
    assert rows[0]["derived"]["speedup_over_reference"] == 1.0
    assert "µs" in capsys.readouterr().out


def test_a_failing_case_is_a_row_and_an_exit_code(tmp_path, monkeypatch, no_ceilings):
    def broken(*arguments):
        raise MemoryError("too large")

    monkeypatch.setattr(kernels, "time_kernel", broken)
    path = tmp_path / "rows.jsonl"
    chosen = ["--op", "gelu_gate", "--case", "1 token", "--implementation", "reference"]
    assert kernels.main([*chosen, "--output-json", str(path)]) == 1
    (row,) = map(json.loads, path.read_text().splitlines())
    assert (row["status"], row["note"], row["median_ms"]) == ("oom", "MemoryError: too large", None)


def test_a_named_implementation_that_cannot_take_a_case_has_a_row(tmp_path, no_ceilings):
    path = tmp_path / "rows.jsonl"
    names = [text for name in ("cudnn", "unfused") for text in ("--implementation", name)]
    chosen = ["--op", "gelu_gate", "--case", "1 token", *names, "--output-json", str(path)]
    assert kernels.main(chosen) == 0
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(row["implementation"], row["status"]) for row in rows] == [
        ("cudnn", "unsupported"), ("unfused", "unsupported"),
    ]  # fmt: skip
    assert "gelu_gate" in rows[0]["note"]
    assert "has no baseline 'unfused'" in rows[1]["note"]


def test_a_kernel_is_compared_with_the_unfused_chain(monkeypatch, tmp_path, no_ceilings):
    times = iter([4.0, 6.0, 2.0])
    monkeypatch.setattr(
        kernels, "time_kernel", lambda *_: Timing(first_ms=9.0, samples_ms=[next(times)], warmup=1)
    )
    path = tmp_path / "rows.jsonl"
    names = [
        text for name in ("reference", "unfused", "triton") for text in ("--implementation", name)
    ]
    chosen = ["--op", "qkv_norm_rope", "--case", "e2b full, 1 token", *names]
    assert kernels.main([*chosen, "--output-json", str(path)]) == 0
    reference, unfused, triton = map(json.loads, path.read_text().splitlines())
    assert "speedup_over_unfused" not in reference["derived"]
    assert unfused["derived"]["speedup_over_unfused"] == 1.0
    assert triton["derived"]["speedup_over_unfused"] == 3.0
    assert triton["derived"]["speedup_over_reference"] == 2.0


def test_names_are_chosen_by_any_of_the_texts_in_either_case():
    cases = kernels.chosen_cases(["GELU_gate", "residual"], ["64 TOKENS", "16384"])
    assert {(c.op, c.name) for c in cases} == {
        ("gelu_gate", "e2b, 16384 tokens"),
        ("residual_norm", "e2b, 16384 tokens"),
        ("residual_norm", "e2b layer end, 16384 tokens"),
        ("residual_norm", "e2b, 64 tokens"),
    }
    assert len(kernels.chosen_cases(None, None)) == sum(c.bench for c in all_cases())


def test_a_choice_of_nothing_is_an_error(capsys):
    with pytest.raises(SystemExit):
        kernels.main(["--op", "gelu", "--case", "no such"])
    assert "no case has --op ['gelu'] and --case ['no such']" in capsys.readouterr().err


def test_cases_that_write_a_cache_are_in_place():
    in_place = {case.name for case in all_cases() if case.bench and case.in_place}
    assert {"e2b sliding, 1 token", "E2B full owner, 64 x 2048"} <= in_place
    assert not {name for name in in_place if "shared" in name}


# --- timing --------------------------------------------------------------------------------------


def test_inputs_rotate_until_they_exceed_the_cache():
    assert rotations(1) == 8
    assert rotations(0) == 8
    assert rotations(L2_BYTES) == 5
    assert rotations(100 * L2_BYTES) == 1


def test_on_a_cpu_the_wall_clock_of_single_calls_counts():
    sets = [{"x": jnp.full(4, i, jnp.float32)} for i in range(3)]
    timing = time_kernel(lambda x: x + 1, sets, 5)
    assert len(timing.samples_ms) == 5
    assert timing.first_ms > 0
    assert all(x > 0 for x in timing.samples_ms)


@pytest.mark.parametrize(("in_place", "expected"), [(False, 0.006), (True, 0.005)])
def test_kernels_of_a_call_are_summed_and_copies_left_out_in_place(monkeypatch, in_place, expected):
    names = {"copy_1": 1000.0, "attention": 3000.0, "combine": 2000.0}
    events = [Event(name, "", "", 0.0, ns) for _ in range(2) for name, ns in names.items()]
    monkeypatch.setattr(profile, "newest_events", lambda folder: events)
    timing = time_kernel(lambda x: x, [{"x": jnp.zeros(1)}], 2, in_place)
    assert timing.samples_ms == pytest.approx([expected] * 2)


def test_a_trace_that_lost_kernels_is_an_error(monkeypatch):
    monkeypatch.setattr(profile, "newest_events", lambda folder: [Event("a", "", "", 0.0, 1.0)])
    with pytest.raises(RuntimeError, match="1 kernels in 2 calls"):
        time_kernel(lambda x: x, [{"x": jnp.zeros(1)}], 2)
