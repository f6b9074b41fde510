"""The command line with real models, as users run it."""

import itertools
import json
import os
import signal
import subprocess
import sys
import time

import pytest

from gemma_jax import cli
from gemma_jax.records import read_records

pytestmark = pytest.mark.usefixtures("quick_compilation")

PROMPT = "Once upon a time"
COMMAND = [sys.executable, "-m", "gemma_jax.cli"]


def run(*argv, **options):
    options = {"capture_output": True, "text": True, "timeout": 300, "check": False} | options
    return subprocess.run([*COMMAND, *argv], **options)


def write_rows(path, rows):
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return str(path)


def test_first_command_of_the_readme_streams_text_and_starts_quicker_again(tmp_path):
    environment = os.environ | {"GEMMA_JAX_CACHE_DIR": str(tmp_path)}
    for name in ("JAX_COMPILATION_CACHE_DIR", "JAX_DISABLE_MOST_OPTIMIZATIONS"):
        environment.pop(name, None)
    argv = ("generate", "--prompt", PROMPT, "--max-tokens", "16")
    first = run(*argv, env=environment)
    assert first.returncode == 0, first.stderr
    assert len(first.stdout.split()) > 3
    assert first.stderr == ""
    programs = sorted((tmp_path / "xla").iterdir())
    assert programs
    second = run(*argv, env=environment)
    assert second.stdout == first.stdout
    assert sorted((tmp_path / "xla").iterdir()) == programs


def test_streamed_text_is_the_recorded_text(tiny_model, tmp_path, capsys):
    flags = ["--model", tiny_model, "--prompt", PROMPT, "--max-tokens", "12", "--temperature", "0"]
    assert cli.main(["generate", *flags]) == 0
    streamed = capsys.readouterr().out
    output = tmp_path / "out.jsonl"
    argv = ["generate", *flags, "--logprobs", "3", "--output", str(output)]
    assert cli.main(argv) == 0
    header, rows = read_records(output)
    (row,) = rows
    assert streamed == row["text"] + "\n"
    assert header["sampling"]["temperature"] == 0
    assert len(row["token_ids"]) == len(row["logprobs"]) == len(row["top"])
    # Greedy: the sampled token is the best one, and the list goes down from there.
    assert [top[0] for top in row["top"]] == [
        [token, logprob] for token, logprob in zip(row["token_ids"], row["logprobs"], strict=True)
    ]
    assert all(a[1] >= b[1] for top in row["top"] for a, b in itertools.pairwise(top))


def test_bad_prompts_leave_error_rows_and_the_others_run(tiny_model, tmp_path, capsys):
    rows = [
        {"id": "good", "prompt": PROMPT},
        {"id": "empty", "prompt": ""},
        {"id": "no tokens", "prompt_token_ids": []},
        {"id": "outside", "prompt_token_ids": [2, 10**7]},
        {"id": "negative", "prompt_token_ids": [2, -1]},
        {"id": "long", "prompt_token_ids": [2] * 100},
        {"id": "also good", "prompt_token_ids": [2, 300, 301]},
    ]
    output = tmp_path / "out.jsonl"
    argv = ["generate", "--prompts", write_rows(tmp_path / "in.jsonl", rows)]
    argv += [
        "--model",
        tiny_model,
        "--output",
        str(output),
        "--max-tokens",
        "4",
        "--max-model-len",
        "64",
    ]
    assert cli.main(argv) == 1
    written = {row["id"]: row for row in read_records(output).rows}
    assert list(written) == [row["id"] for row in rows]
    failed = [row_id for row_id, row in written.items() if "error" in row]
    assert failed == ["empty", "no tokens", "outside", "negative", "long"]
    assert "10000000" in written["outside"]["error"]
    assert written["good"]["token_ids"]
    assert "5 of 7 prompts failed" in capsys.readouterr().err


def test_missing_model_is_named(capsys):
    assert cli.main(["generate", "--model", "./absent/model", "--prompt", "a"]) == 2
    assert "./absent/model" in capsys.readouterr().err


def test_killed_run_resumes_to_the_same_file_as_an_uninterrupted_one(tiny_model, tmp_path):
    rows = [{"id": index, "prompt": f"{PROMPT} {index}"} for index in range(24)]
    source = write_rows(tmp_path / "in.jsonl", rows)
    flags = ["--prompts", source, "--max-tokens", "24", "--max-num-seqs", "2"]
    flags += ["--model", tiny_model]
    whole, output = tmp_path / "whole.jsonl", tmp_path / "out.jsonl"
    assert run("generate", *flags, "--output", str(whole)).returncode == 0

    argv = [*COMMAND, "generate", *flags, "--output", str(output)]
    with subprocess.Popen(argv, stderr=subprocess.DEVNULL) as process:
        while process.poll() is None and _lines(output) < 4:
            time.sleep(0.02)
        process.send_signal(signal.SIGKILL)
    kept = _lines(output) - 1
    assert 0 < kept
    assert run("generate", *flags, "--output", str(output)).returncode == 0
    assert list(read_records(output).rows) == list(read_records(whole).rows)


def _lines(path):
    return path.read_bytes().count(b"\n") if path.exists() else 0


# A test run in the background of a shell ignores SIGINT, and so would its children.
HEAR_SIGINT = """
import signal, sys
from gemma_jax.cli import main
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.exit(main(sys.argv[1:]))
"""


def test_ctrl_c_exits_with_130_and_no_traceback(tiny_model, tmp_path):
    rows = [{"id": index, "prompt": PROMPT} for index in range(400)]
    argv = [*COMMAND, "generate", "--prompts", write_rows(tmp_path / "in.jsonl", rows)]
    argv += ["--output", str(tmp_path / "out.jsonl"), "--model", tiny_model]
    argv += ["--max-tokens", "24", "--max-num-seqs", "2"]  # programs of the test above
    argv = [sys.executable, "-c", HEAR_SIGINT, *argv[len(COMMAND) :]]
    with subprocess.Popen(argv, stderr=subprocess.PIPE) as process:
        while process.poll() is None and _lines(tmp_path / "out.jsonl") < 2:
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        error = process.stderr.read().decode()
        assert process.wait(timeout=60) == cli.EXIT_INTERRUPTED
    assert "Traceback" not in error


def test_chat_answers_a_pipe(tiny_model):
    result = run(
        "chat",
        "--model",
        tiny_model,
        "--max-tokens",
        "8",
        input="Tell me of a fox.\nAnd then?\n/exit\n",
    )
    assert result.returncode == 0, result.stderr
    assert len(result.stdout.splitlines()) >= 2
    assert result.stderr == ""
