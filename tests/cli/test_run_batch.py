"""`gemma-jax run-batch`: rows in and out, faults, resuming; the model is replayed."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from gemma_jax.batch_output import BatchFile
from gemma_jax.cli import main, options

SERVE_TESTS = Path(__file__).parents[1] / "serve"
sys.path.insert(0, str(SERVE_TESTS))

from replay_engine import ReplayLLM  # noqa: E402

# A run in a process of its own, with a replayed model: arguments are the model's options and then
# those of the command.
DRIVER = f"""
import json, resource, sys
sys.path.insert(0, {str(SERVE_TESTS)!r})
from replay_engine import ReplayLLM
from gemma_jax.batch_output import BatchFile
from gemma_jax.cli import main, options
settings = json.loads(sys.argv[1])
limit = settings.pop("file_bytes", None)
if limit:
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
options.load_model = lambda args: ReplayLLM(**settings)
code = main(["run-batch", *sys.argv[2:]])
print("max rss", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, file=sys.stderr)
sys.exit(code)
"""


def chat(custom_id, text="Hello", **body):
    messages = [{"role": "user", "content": text}]
    body = {"model": "nano", "messages": messages, "max_tokens": 50, **body}
    return {"custom_id": custom_id, "method": "POST", "url": "/v1/chat/completions", "body": body}


def completion(custom_id, prompt="One two", **body):
    body = {"model": "nano", "prompt": prompt, **body}
    return {"custom_id": custom_id, "method": "POST", "url": "/v1/completions", "body": body}


@pytest.fixture
def job(tmp_path, monkeypatch):
    """Writes lines to a file and runs them: job(lines, *flags, **model options)."""

    class Job:
        input, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
        llm = None

        def __call__(self, lines, *flags, **settings):
            self.write(lines)
            self.llm = ReplayLLM(**settings)
            monkeypatch.setattr(options, "load_model", lambda args: self.llm)
            return main(["run-batch", "-i", str(self.input), "-o", str(self.output), *flags])

        def write(self, lines):
            texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
            self.input.write_text("\n".join(texts) + "\n")

        def rows(self):
            rows = [json.loads(line) for line in self.output.read_text().splitlines()]
            assert len({row["custom_id"] for row in rows}) == len(rows)
            return {row["custom_id"]: row for row in rows}

        def start(self, lines, **settings):
            self.write(lines)
            files = ["-i", str(self.input), "-o", str(self.output)]
            return subprocess.Popen(
                [sys.executable, "-c", DRIVER, json.dumps(settings), *files],
                stderr=subprocess.PIPE,
                text=True,
            )

    return Job()


def texts(rows):
    return {
        key: [c.get("text") or c["message"]["content"] for c in row["response"]["body"]["choices"]]
        for key, row in rows.items()
    }


def test_each_request_gets_a_row_of_the_batch_format(job, capfd):
    assert job([chat("a", "Hi"), completion("b"), {"id": 7, "prompt": "Plain"}]) == 0
    rows = job.rows()
    assert set(rows) == {"a", "b", 7}
    assert texts(rows)["b"] == ["One two"]
    assert texts(rows)[7] == ["Plain"]
    row = rows["a"]
    assert set(row) == {"id", "custom_id", "response", "error"}
    assert row["id"].startswith("batch_req_")
    assert row["error"] is None
    assert row["response"]["status_code"] == 200
    assert row["response"]["request_id"] == row["response"]["body"]["id"]
    assert row["response"]["body"]["object"] == "chat.completion"
    assert row["response"]["body"]["model"] == "nano"
    error = capfd.readouterr().err
    assert "3 rows: 3 succeeded, 0 failed" in error
    assert "generated tok/s; peak memory" in error
    assert "tok/s]" in error  # of the progress bar


def test_rows_are_written_as_they_finish(job):
    """A long row comes after the short ones that were behind it."""
    assert job([completion("long", "word " * 40, max_tokens=40), *map(completion, "abc")]) == 0
    assert list(job.rows()) == ["a", "b", "c", "long"]


def test_malformed_lines_become_error_rows_and_the_others_run(job):
    lines = [
        "{not json",
        '"a string"',
        "",
        {"method": "POST"},
        completion("ok"),
        completion("url") | {"url": "/v1/embeddings"},
        completion("method") | {"method": "GET"},
        completion("body") | {"body": None},
        completion("more") | {"extra": 1},
        {"id": "two", "prompt": "a", "prompt_token_ids": [1]},
        {"id": "none", "prompts": "a"},
        completion(""),
        completion(["list"]),
    ]
    assert job(lines) == 1
    rows = job.rows()
    assert rows.pop("ok")["error"] is None
    messages = {key: row["error"]["message"] for key, row in rows.items()}
    expected = {
        "line-1": "line 1: not valid JSON",
        "line-2": "line 2: a JSON str; expected an object",
        "line-4": 'line 4: "custom_id" is None; expected a string',
        "url": "line 6: \"url\" is '/v1/embeddings'; supported are /v1/chat/completions",
        "method": "line 7: \"method\" is 'GET'",
        "body": 'line 8: "body" is a JSON NoneType',
        "more": "line 9: unknown field 'extra'",
        "two": "line 10: expected one of",
        "none": "line 11: unknown field 'prompts'",
        "line-12": "line 12: \"custom_id\" is ''",
        "line-13": 'line 13: "custom_id" is',
    }
    assert set(messages) == set(expected)
    for key, message in expected.items():
        assert messages[key].startswith(message)
        assert rows[key]["response"] is None


@pytest.mark.parametrize(
    ("row", "status", "param"),
    [
        (chat("x", temperature=-1), 400, "temperature"),
        (chat("x", temprature=1), 400, "temprature"),
        (chat("x", stream=True), 400, "stream"),
        (chat("x", model="other"), 404, "model"),
        (chat("x", messages=[{"role": "user"}]), 400, "messages"),
        (completion("x", [5] * 9000), 400, "prompt"),
        (completion("x", [99999]), 400, None),
        (completion("x", n=8, temperature=1), 503, None),
    ],
)
def test_a_request_that_cannot_run_says_which_field_in_its_row(job, row, status, param):
    assert job([row, completion("ok")], running=4, queue=2) == 1
    rows = job.rows()
    assert rows["ok"]["error"] is None
    response = rows["x"]["response"]
    assert response["status_code"] == status
    assert response["body"]["error"]["param"] == param
    assert rows["x"]["error"]["message"] == response["body"]["error"]["message"]


def test_an_engine_error_fails_its_row_only(job):
    def reply(request):
        bad = len(request.prompt_token_ids) > 20
        return RuntimeError("the logits overflowed") if bad else "fine"

    assert job([completion("a", "many " * 30), completion("b")], reply=reply) == 1
    rows = job.rows()
    assert rows["a"]["response"]["status_code"] == 500
    assert rows["a"]["error"]["message"] == "the logits overflowed"
    assert texts({"b": rows["b"]}) == {"b": ["fine"]}


def test_duplicate_custom_ids_are_refused_before_anything_runs(job, capfd):
    assert job([completion("a"), completion("b"), "", completion("a")]) == 2
    error = capfd.readouterr().err
    assert "custom_id 'a' is on line 1 and on line 4; custom_ids must differ" in error
    assert not job.output.exists()
    assert job([completion("line-2"), "{"]) == 2


@pytest.mark.parametrize("lines", [[], [" ", ""]])
def test_an_input_without_rows_is_refused(job, lines, capfd):
    assert job(lines) == 2
    assert "in.jsonl has no rows" in capfd.readouterr().err


def test_flags_fill_what_bodies_leave_out(job):
    rows = [
        completion("a"),
        completion("b", max_tokens=3, seed=9),
        chat("c"),
        {"id": 1, "prompt": "x"},
    ]
    rows[2]["body"]["max_completion_tokens"] = rows[2]["body"].pop("max_tokens")
    assert job(rows, "--max-tokens", "5", "--seed", "100", "--top-k", "7") == 0
    params = [request.params for request in job.llm.engine.requests]
    assert [p.max_tokens for p in params] == [5, 3, 50, 5]
    assert [p.seed for p in params] == [100, 9, 102, 103]
    assert {p.top_k for p in params} == {7}
    job.output.unlink()
    assert job(rows) == 0
    assert [r.params.max_tokens for r in job.llm.engine.requests] == [16, 3, 50, 256]


def test_few_completions_are_in_flight_however_long_the_input(job):
    assert job([{"id": i, "prompt": f"Prompt {i}"} for i in range(300)], running=4) == 0
    assert len(job.rows()) == 300
    assert job.llm.engine.most_completions <= 16


def test_a_full_queue_is_waited_for(job):
    assert job([completion(str(i)) for i in range(20)], running=2, queue=1) == 0
    assert len(job.rows()) == 20
    assert job.llm.engine.most_completions <= 3


def test_all_prompts_and_completions_of_a_row_are_in_its_response(job):
    assert job([completion("a", ["x", "y"], n=2, temperature=1)], running=1) == 0
    assert texts(job.rows()) == {"a": ["x", "x", "y", "y"]}


# --- resuming ------------------------------------------------------------------------------------


def test_a_finished_job_does_nothing_again(job, capfd):
    lines = [completion("a"), "{", completion("b")]
    assert job(lines) == 1
    before = job.output.read_bytes()
    assert job(lines) == 1
    assert job.output.read_bytes() == before
    assert not job.llm.engine.requests
    assert "3 rows (3 of them before this run): 2 succeeded, 1 failed" in capfd.readouterr().err


@pytest.mark.parametrize("cut", [1, 2, 50])
def test_a_torn_last_line_is_repaired(job, cut):
    lines = [completion(key) for key in "abc"]
    assert job(lines) == 0
    whole = job.output.read_bytes()
    job.output.write_bytes(whole[:-cut])
    assert job(lines) == 0
    assert set(job.rows()) == {"a", "b", "c"}
    # A line that lacks its end only is kept as it is.
    assert len(job.llm.engine.requests) == (cut > 1)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("notes", "line 1 is not a result row"),
        ('{"a": 1}\n', "line 1 is not a result row"),
        ('{"id":"batch_req_1","custom_id":"z","response":null}\n', "custom_id 'z', which"),
        (
            '{"id":"batch_req_1","custom_id":"a","response":null}\n' * 2,
            "line 2 repeats a custom_id",
        ),
    ],
)
def test_an_output_of_something_else_is_left_alone(job, content, message, capfd):
    job.output.write_text(content)
    assert job([completion("a")]) == 2
    assert message in capfd.readouterr().err
    assert job.output.read_text() == content


def wait_for_rows(job, process, count):
    deadline = time.monotonic() + 60
    while not job.output.exists() or job.output.read_bytes().count(b"\n") < count:
        assert process.poll() is None, process.stderr.read()
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_kill_9_and_resume_loses_and_doubles_nothing(job):
    lines = [completion(f"row-{i}", f"Prompt number {i}") for i in range(60)]
    lines.insert(10, "{broken")
    for count in (5, 25):
        process = job.start(lines, delay=0.01)
        wait_for_rows(job, process, count)
        process.kill()
        process.communicate()
        assert process.returncode == -signal.SIGKILL
    finished = job.output.read_bytes()
    assert 25 <= finished.count(b"\n") < len(lines)
    assert job(lines) == 1
    assert job.output.read_bytes().startswith(finished[: finished.rfind(b"\n") + 1])
    rows = job.rows()
    assert set(rows) == {f"row-{i}" for i in range(60)} | {"line-11"}
    del rows["line-11"]
    assert texts(rows) == {f"row-{i}": [f"Prompt number {i}"] for i in range(60)}


def test_a_full_disk_is_an_error_after_which_the_job_goes_on(job):
    lines = [completion(f"row-{i}") for i in range(40)]
    process = job.start(lines, file_bytes=4000)
    error = process.communicate(timeout=60)[1]
    assert process.returncode == 2
    assert f"output {job.output}: File too large; the rows before are whole" in error
    assert "Traceback" not in error
    assert 0 < job.output.stat().st_size <= 4000
    assert job(lines) == 0
    assert len(job.rows()) == 40


def test_a_full_device_is_an_error(job, capfd):
    job.output = Path("/dev/full")
    assert job([completion("a")]) == 2
    assert "output /dev/full: No space left on device" in capfd.readouterr().err


def test_results_on_stdout_are_lines_of_json(job, capfd):
    job.output = "-"
    assert job([completion("a"), completion("b")]) == 0
    rows = [json.loads(line) for line in capfd.readouterr().out.splitlines()]
    assert [row["custom_id"] for row in rows] == ["a", "b"]


def test_an_interrupted_run_frees_the_engine(job):
    def interrupt(request):
        if len(job.llm.engine.requests) > 6:
            raise KeyboardInterrupt
        return "word " * 50

    lines = [completion(str(i), max_tokens=100) for i in range(20)]
    assert job(lines, reply=interrupt) == 130
    assert not job.llm.engine.has_work


def test_two_runs_do_not_write_one_file(job, capfd):
    with BatchFile(job.output):
        assert job([completion("a")]) == 2
    assert "is being written by another run" in capfd.readouterr().err
    assert not job.output.exists()


@pytest.mark.slow
def test_memory_does_not_grow_with_the_number_of_prompts(job):
    peaks = []
    for count in (1_000, 20_000):
        lines = (
            {
                "id": i,
                "prompt": f"Prompt number {i}",
            }
            for i in range(count)
        )
        job.output.unlink(missing_ok=True)
        process = job.start(lines, running=16, tokens=50)
        error = process.communicate(timeout=120)[1]
        assert process.returncode == 0, error
        peaks.append(int(error.split()[-1]))
    assert peaks[1] - peaks[0] < 5_000  # KiB; a prompt's id takes some 100 bytes


@pytest.mark.slow
def test_a_model_answers_a_job_and_keeps_to_its_schema(tiny_model, tmp_path):
    """Through the real engine: text, token ids, logprobs, several completions, a JSON schema."""
    schema = {
        "type": "object",
        "properties": {"n": {"type": "integer", "maximum": 99}, "b": {"type": "boolean"}},
        "required": ["n", "b"],
        "additionalProperties": False,
    }
    json_format = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    lines = [
        chat("chat", model=None, logprobs=True, top_logprobs=2, max_tokens=8),
        chat("json", model=None, response_format=json_format, max_tokens=200),
        completion("two", model=None, n=2, temperature=1, max_tokens=8, ignore_eos=True),
        {"id": "ids", "prompt_token_ids": [2, 600, 700]},
    ]
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("\n".join(map(json.dumps, lines)))
    flags = ["--model", tiny_model, "--max-model-len", "512", "--max-num-seqs", "4"]
    assert main(["run-batch", "-i", str(source), "-o", str(output), *flags]) == 0
    rows = {row["custom_id"]: row for row in map(json.loads, output.read_text().splitlines())}
    bodies = {key: row["response"]["body"] for key, row in rows.items()}
    assert bodies["two"]["usage"]["completion_tokens"] == 16
    positions = bodies["chat"]["choices"][0]["logprobs"]["content"]
    assert len(positions) == bodies["chat"]["usage"]["completion_tokens"]
    (choice,) = bodies["json"]["choices"]
    assert choice["finish_reason"] == "stop"
    assert set(json.loads(choice["message"]["content"])) == {"n", "b"}
    assert len(bodies["ids"]["choices"]) == 1
