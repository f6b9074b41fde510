"""`record`: our own engine and workers in other processes, their jobs, and what is refused."""

import contextlib
import json
import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import fake_worker
import pytest

from gemma_jax.cli import EXIT_BAD_INPUT, EXIT_FAILED, EXIT_OK, main
from gemma_jax.parity.records import read_record

PROMPTS = [{"id": "a", "prompt_token_ids": [2, 300]}, {"id": "b", "prompt": "Once upon"}]


@pytest.fixture
def record(tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps(x) + "\n" for x in PROMPTS))

    def run(engine, *flags, output="r.jsonl"):
        source = [] if "--teacher-force" in flags else ["--prompts", str(prompts)]
        path = tmp_path / output
        arguments = ["--engine", engine, "--max-tokens", "3", "--logprobs", "2"]
        return main(["parity", "record", *arguments, "--output", str(path), *source, *flags]), path

    return run


@pytest.fixture
def vllm(tmp_path, monkeypatch):
    """An interpreter that finds a stand-in for vLLM."""
    for name, source in (("vllm", fake_worker.VLLM), ("torch", fake_worker.TORCH)):
        (tmp_path / f"{name}.py").write_text(source)
    settings = tmp_path / "settings.json"
    monkeypatch.setenv("SETTINGS_FILE", str(settings))
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH="{tmp_path}" exec "{sys.executable}" "$@"\n')
    python.chmod(python.stat().st_mode | stat.S_IXUSR)
    return str(python), settings


def test_vllm_worker_generates_and_scores(record, vllm):
    python, settings = vllm
    code, path = record("vllm", "--python", python, "--dtype", "bfloat16", "--max-num-seqs", "1")
    assert code == EXIT_OK
    got = read_record(path)
    assert (got.engine, got.dtype, got.model["name"]) == ("vllm", "bfloat16", "nano")
    assert got.streams[0].tokens.tolist() == [301, 302, 303]
    assert got.streams[0].candidates.as_pairs()[0] == [[301, -0.25], [302, -2.0]]
    assert [s.batch for s in got.streams] == [1, 1]
    made = json.loads(settings.read_text())
    assert made["attention_config"] == {"backend": "TRITON_ATTN"}
    assert (made["enforce_eager"], made["kv_sharing_fast_prefill"]) == (True, False)
    assert (made["max_num_seqs"], made["enable_prefix_caching"]) == (1, False)
    code, scored = record(
        "vllm", "--python", python, "--teacher-force", str(path), "--dtype", "float32",
        "--vllm-fast-prefill", output="f.jsonl",
    )  # fmt: skip
    assert code == EXIT_OK
    assert read_record(scored).streams[0].sequence == got.streams[0].sequence
    assert json.loads(settings.read_text().splitlines()[-1])["kv_sharing_fast_prefill"] is True
    header = json.loads(scored.read_text().splitlines()[0])["header"]
    assert header["settings"]["teacher_force"] == "r.jsonl"


def test_failing_worker_shows_its_last_lines(record, vllm, tmp_path, capsys):
    (tmp_path / "vllm.py").write_text("raise RuntimeError('no CUDA driver')")
    code, path = record("vllm", "--python", vllm[0])
    assert (code, path.exists()) == (EXIT_FAILED, False)
    assert "no CUDA driver" in capsys.readouterr().err


SLEEPER = """
class LLM:
    def __init__(self, **settings):
        import os, subprocess, time
        child = subprocess.Popen(["sleep", "300"])
        with open(os.environ["SETTINGS_FILE"] + ".part", "w") as file:
            file.write(f"{os.getpid()} {child.pid}")
        os.rename(file.name, os.environ["SETTINGS_FILE"])
        time.sleep(300)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_worker_and_what_it_started_end_with_the_command(vllm, tmp_path, number):
    python, pids = vllm
    (tmp_path / "vllm.py").write_text(SLEEPER)
    (tmp_path / "prompts.jsonl").write_text(json.dumps(PROMPTS[0]) + "\n")
    (tmp_path / "temporary").mkdir()
    output = tmp_path / "r.jsonl"
    command = [
        sys.executable, "-m", "gemma_jax.cli", "parity", "record", "--engine", "vllm", "--python",
        python, "--prompts", str(tmp_path / "prompts.jsonl"), "--output", str(output),
        "--model", "nano",
    ]  # fmt: skip
    parent = subprocess.Popen(command, env=os.environ | {"TMPDIR": str(tmp_path / "temporary")})
    try:
        wait_until(pids.exists)
        started = [int(pid) for pid in pids.read_text().split()]
        assert all(map(is_alive, started))
        parent.send_signal(number)
        assert parent.wait(30) == (143 if number == signal.SIGTERM else -number)
        wait_until(lambda: not any(map(is_alive, started)))
    finally:
        parent.kill()
    assert not output.exists()
    if number == signal.SIGTERM:
        assert list((tmp_path / "temporary").iterdir()) == []


def wait_until(condition, seconds=60):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"did not happen within {seconds} s"
        time.sleep(0.05)


def is_alive(pid):
    with contextlib.suppress(FileNotFoundError):
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    return False


def test_engine_that_is_not_installed_is_named(record, capsys):
    for engine, package in (("vllm", "vllm"), ("transformers", "torch")):
        assert record(engine)[0] == EXIT_BAD_INPUT
        assert f"has no {package}; name an interpreter" in capsys.readouterr().err
    assert record("vllm", "--python", "/no/such/python")[0] == EXIT_BAD_INPUT


@pytest.mark.parametrize(
    ("engine", "flags", "words"),
    [
        ("vllm", ["--rounding", "vllm"], "--rounding: only for --engine gemma-jax"),
        ("vllm", ["--no-fast-prefill"], "--fast-prefill: only for --engine gemma-jax"),
        ("gemma-jax", ["--hidden", "f.npz"], "--hidden: only for --engine transformers"),
        ("transformers", ["--hidden", "f.npz"], "--teacher-force"),
        ("gemma-jax", ["--logprobs", "1"], "--logprobs 1: expected 2 to 20"),
        ("openai-url", [], "give --url"),
        ("vllm", ["--vllm-args", "[1]"], "--vllm-args [1]: expected a JSON object"),
        ("gemma-jax", ["--model", "/none"], "no such file or directory"),
    ],
)
def test_flags_that_do_not_fit_are_refused(record, engine, flags, words, capsys):
    assert record(engine, *flags)[0] == EXIT_BAD_INPUT
    assert words in capsys.readouterr().err


def test_our_own_record_compares_with_itself_until_a_candidate_is_changed(
    record, tiny_model, tmp_path, capsys
):
    model = ["--model", tiny_model, "--max-num-seqs", "2"]
    code, path = record("gemma-jax", *model, output="r.jsonl.gz")
    assert code == EXIT_OK
    out = tmp_path / "result.json"
    positions = tmp_path / "p.jsonl"
    flags = ["--free-run", "--output-json", str(out), "--positions", str(positions)]
    assert main(["parity", "compare", str(path), *model, *flags]) == EXIT_OK
    printed = capsys.readouterr().out
    assert "100.0000% equal" in printed
    assert "2 of 2 whole" in printed
    values = json.loads(out.read_text())
    assert (
        values["reference"]["model"]["weights_sha256"] == values["ours"]["model"]["weights_sha256"]
    )
    assert len(positions.read_text().splitlines()) == 2
    assert main(["parity", "report", str(out)]) == EXIT_OK
    assert "100.0000% equal" in capsys.readouterr().out

    header, first, *rest = read_lines_of(path)
    first["top"][0][1][1] = first["top"][0][0][1] + 3.0
    changed = tmp_path / "changed.jsonl"
    changed.write_text("".join(json.dumps(x) + "\n" for x in (header, first, *rest)))
    assert (
        main(["parity", "compare", str(changed), *model, "--output-json", str(out)]) == EXIT_FAILED
    )
    assert "unexplained flips" in capsys.readouterr().out
    assert main(["parity", "report", str(out)]) == EXIT_FAILED


def test_record_of_another_model_is_refused_unless_any_model_will_do(
    record, tiny_model, tmp_path, capsys
):
    path = record("gemma-jax", "--model", tiny_model)[1]
    header, *rows = read_lines_of(path)
    header["header"]["model"]["weights_sha256"] = "another"
    path.write_text("".join(json.dumps(x) + "\n" for x in (header, *rows)))
    compare = ["parity", "compare", str(path), "--model", tiny_model]
    assert main(compare) == EXIT_BAD_INPUT
    message = capsys.readouterr().err
    assert "recorded with other weights" in message
    assert "as --model, or compare all the same with --any-model" in message
    assert main([*compare, "--any-model"]) == EXIT_OK


def test_report_refuses_what_is_no_result(tmp_path, capsys):
    path = tmp_path / "x.json"
    path.write_text("{}")
    assert main(["parity", "report", str(path)]) == EXIT_BAD_INPUT
    assert "not a result of `gemma-jax parity compare`" in capsys.readouterr().err


def read_lines_of(path):
    from gemma_jax.records import read_lines

    return [json.loads(line) for line in read_lines(path)]
