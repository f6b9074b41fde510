"""`bench.vllm_kernels` without vLLM: what it would time, how, and what becomes of failures."""

import argparse
import itertools
import sys
from types import SimpleNamespace

import pytest

from bench import vllm_kernels, vllm_ops, vllm_worker
from gemma_jax.benchmarks.kernels import chosen_cases
from gemma_jax.benchmarks.rows import Row
from gemma_jax.errors import UnsupportedError

ARGS = argparse.Namespace(num_calls=3, seed=1, output_json=None, commit="abc")


@pytest.fixture
def fake_torch(monkeypatch):
    cuda = SimpleNamespace(
        reset_peak_memory_stats=lambda: None,
        empty_cache=lambda: None,
        max_memory_allocated=lambda: 7,
    )
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))


def a_case():
    return vllm_kernels.cases_to_time(["decode"], ["E2B full, 64 x 8192"])[0]


def program(error):
    return SimpleNamespace(error=lambda: error, run=lambda: None)


def measured(monkeypatch, make):
    monkeypatch.setattr(vllm_ops, "program", make)
    monkeypatch.setattr(vllm_worker, "device_times", lambda runs, calls: ([0.2] * calls, "how"))
    row = Row("kernels-decode_attention", "E2B full, 64 x 8192", "vllm")
    vllm_worker.measure(row, a_case(), 3, 0)
    return row


# --- what is timed -------------------------------------------------------------------------------


def test_the_usual_cases_all_exist():
    found = {(case.op, case.name) for case in vllm_kernels.cases_to_time(None, None)}
    assert found == {(op, name) for op, names in vllm_kernels.USUAL.items() for name in names}


def test_our_own_run_takes_exactly_the_chosen_cases():
    cases = vllm_kernels.cases_to_time(None, None)
    found = []
    for command in vllm_kernels.own_commands(cases, ARGS):
        values = {
            flag: [b for a, b in itertools.pairwise(command) if a == flag]
            for flag in ("--op", "--case")
        }
        found += chosen_cases(values["--op"], values["--case"])
    assert [(c.op, c.name) for c in found] == [(c.op, c.name) for c in cases]


def test_every_case_that_can_be_chosen_says_its_sizes():
    cases = vllm_kernels.cases_to_time(None, [""])
    assert {case.op for case in cases} == set(vllm_ops.OPS) == set(vllm_kernels.OPS)
    assert all(case.sizes is not None for case in cases)


def test_flags_reach_both_processes(tmp_path):
    args = argparse.Namespace(**{**vars(ARGS), "output_json": tmp_path})
    worker = vllm_kernels.worker_command([a_case()], args, "python -m bench.vllm_kernels")
    (own,) = vllm_kernels.own_commands([a_case()], args)
    flags = ["--num-calls", "3", "--seed", "1", "--output-json", str(tmp_path), "--commit", "abc"]
    assert worker[-len(flags) :] == own[-len(flags) :] == flags
    assert worker[3:5] == ["--case", "decode_attention:E2B full, 64 x 8192"]


def test_the_worker_keeps_jax_off_the_gpu_and_finds_vllm(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "before")
    environment = vllm_kernels.worker_environment(tmp_path)
    assert environment["JAX_PLATFORMS"] == "cpu"
    assert environment["PYTHONPATH"].split(":") == [str(tmp_path), "before"]
    assert vllm_kernels.worker_environment(None)["PYTHONPATH"] == "before"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["--case", "no such"], "no case has"), (["--only", "torch"], "expected parts of")],
)
def test_a_choice_of_nothing_is_an_error(arguments, message, capsys):
    with pytest.raises(SystemExit):
        vllm_kernels.main(arguments)
    assert message in capsys.readouterr().err


def test_a_failing_part_is_an_exit_code(monkeypatch):
    codes = iter([0, 1])
    monkeypatch.setattr(vllm_kernels.subprocess, "call", lambda *_, **__: next(codes))
    assert vllm_kernels.main(["--case", "E2B full, 64 x 8192"]) == 1


# --- rows ----------------------------------------------------------------------------------------


def test_a_row_has_rates_of_our_counts_and_the_error(monkeypatch, fake_torch):
    row = measured(monkeypatch, lambda case, name, seed: program(0.004))
    assert (row.status, row.note, row.median_ms) == ("ok", "how", 0.2)
    assert row.derived["bytes_per_s"] == a_case().bytes / 2e-4
    assert row.numerics is not None
    assert row.numerics["relative"] == 0.004
    assert row.peak_memory_bytes == 7
    assert "error 4.0e-03" in vllm_worker.summary(row)


@pytest.mark.parametrize("error", [0.5, float("nan")])
def test_a_wrong_result_is_no_figure(error, monkeypatch, fake_torch):
    row = measured(monkeypatch, lambda case, name, seed: program(error))
    assert (row.status, row.median_ms) == ("error", None)
    assert "relative error" in row.note


@pytest.mark.parametrize(
    ("raised", "status"),
    [(RuntimeError("Triton says no"), "error"), (UnsupportedError("no kernel"), "unsupported")],
)
def test_a_kernel_that_fails_is_a_row(raised, status, monkeypatch, fake_torch):
    def make(*_):
        raise raised

    row = measured(monkeypatch, make)
    assert row.status == status
    assert str(raised) in row.note
    assert status in vllm_worker.summary(row)


def test_kernels_are_summed_by_call():
    assert vllm_worker.per_call([1.0, 2.0, 3.0, 4.0], 2) == pytest.approx([0.003, 0.007])
    with pytest.raises(RuntimeError, match="3 kernels in 2 calls"):
        vllm_worker.per_call([1.0, 2.0, 3.0], 2)
