"""`gemma-jax generate` around a model that answers at once."""

import io
import json

import pytest

from gemma_jax import cli
from gemma_jax.cli import options
from gemma_jax.records import read_records

pytestmark = pytest.mark.fast


def write_rows(path, rows):
    path.write_text(
        "".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows)
    )
    return str(path)


def numbered(count):
    return [{"id": f"p{index}", "prompt": f"text {index}"} for index in range(count)]


def run_file(tmp_path, rows, *flags):
    source = write_rows(tmp_path / "in.jsonl", rows)
    output = tmp_path / "out.jsonl"
    code = cli.main(["generate", "--prompts", source, "--output", str(output), *flags])
    return code, output


def rows_of(path):
    return list(read_records(path).rows)


# --- text


def test_one_prompt_streams_to_stdout_and_nothing_else_goes_there(llm, capsys):
    assert cli.main(["generate", "--prompt", "once upon"]) == 0
    assert capsys.readouterr().out == "ONCE UPON \n"
    assert llm.closed


def test_dash_reads_the_prompt_from_stdin(llm, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("from a pipe"))
    assert cli.main(["generate", "--prompt", "-"]) == 0
    assert capsys.readouterr().out == "FROM A PIPE \n"


def test_a_terminal_shows_the_prompt_before_its_continuation(llm, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    assert cli.main(["generate", "--prompt", "once "]) == 0
    assert capsys.readouterr().out == "once ONCE \n"


def test_several_prompts_print_in_order_and_a_bad_one_loses_no_other(llm, capsys):
    argv = ["generate", "--prompt", "b", "--prompt", "", "--prompt", "a"]
    assert cli.main(argv) == 1
    captured = capsys.readouterr()
    assert captured.out == "> b\nB\n\n> a\nA\n\n"
    assert "the prompt is empty" in captured.err


def test_one_empty_prompt_exits_with_1(llm, capsys):
    assert cli.main(["generate", "--prompt", ""]) == 1
    assert capsys.readouterr().err == "gemma-jax: error: the prompt is empty\n"


def test_system_turns_the_prompt_into_a_conversation(llm, capsys):
    assert cli.main(["generate", "--prompt", "hi", "--system", "be kind"]) == 0
    messages, _ = llm.calls[0]
    assert [message["role"] for message in messages] == ["system", "user"]
    assert capsys.readouterr().out == "2 messages: hi \n"


def test_unset_sampling_fields_are_the_checkpoints_and_max_tokens_is_256(llm):
    cli.main(["generate", "--prompt", "a", "--top-p", "0.5", "--stop", "x", "--stop", "y"])
    params = llm.calls[0][1]
    assert (params.max_tokens, params.top_k, params.top_p) == (256, 64, 0.5)
    assert params.stop == ("x", "y")


def test_model_flags_reach_the_model():
    argv = "--model m --dtype float32 --rounding vllm --no-fast-prefill --max-num-seqs 3"
    parser = options.parser("x", "")
    options.add_model_flags(parser)
    assert options.model_settings(parser.parse_args(argv.split())) == {
        "model": "m",
        "dtype": "float32",
        "rounding": "vllm",
        "fast_prefill": False,
        "batch_invariant": False,
        "kernels": "auto",
        "max_num_seqs": 3,
    }


# --- record files


def test_rows_come_in_input_order_after_a_header(llm, tmp_path):
    code, output = run_file(tmp_path, numbered(5), "--temperature", "0.5")
    assert code == 0
    header, rows = read_records(output)
    assert header["settings"]["model"] == "nano"
    assert header["settings"]["temperature"] == 0.5
    assert header["sampling"]["top_k"] == 64
    assert {"python", "jax", "jaxlib", "gemma_jax"} <= set(header["versions"])
    assert header["device"]["platform"] == "cpu"
    rows = list(rows)
    assert [row["id"] for row in rows] == ["p0", "p1", "p2", "p3", "p4"]
    assert list(rows[0]) == ["id", "prompt_token_ids", "token_ids", "text", "finish_reason"]
    assert rows[0]["text"] == "TEXT 0"
    assert rows[0]["token_ids"][-1] == 1


def test_logprobs_are_recorded_best_first(llm, tmp_path):
    _, output = run_file(tmp_path, [{"id": 0, "prompt_token_ids": [97]}], "--logprobs", "2")
    (row,) = rows_of(output)
    assert row["token_ids"] == [65, 1]
    assert row["logprobs"] == [-0.25, -0.25]
    assert row["top"] == [[[65, -0.25], [66, -2.0]], [[1, -0.25], [2, -2.0]]]


def test_prompt_flags_write_records_too(llm, tmp_path):
    output = tmp_path / "out.jsonl"
    assert cli.main(["generate", "--prompt", "a", "--prompt", "b", "--output", str(output)]) == 0
    assert [(row["id"], row["text"]) for row in rows_of(output)] == [(0, "A"), (1, "B")]


def test_without_output_records_go_to_stdout(llm, tmp_path, capsys):
    source = write_rows(tmp_path / "in.jsonl", numbered(3))
    assert cli.main(["generate", "--prompts", source]) == 0
    captured = capsys.readouterr()
    lines = [json.loads(line) for line in captured.out.splitlines()]
    assert "header" in lines[0]
    assert [line["id"] for line in lines[1:]] == ["p0", "p1", "p2"]
    assert "3/3" in captured.err


def test_prompts_are_read_from_stdin(llm, tmp_path, monkeypatch):
    data = io.BytesIO(json.dumps({"id": 7, "prompt": "x"}).encode())
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(data))
    output = tmp_path / "out.jsonl"
    assert cli.main(["generate", "--prompts", "-", "--output", str(output)]) == 0
    assert rows_of(output)[0]["text"] == "X"


def test_each_prompt_has_its_own_seed_that_depends_on_its_position_only(llm, tmp_path):
    run_file(tmp_path, numbered(6), "--seed", "10")
    assert [params.seed for _, group in llm.calls for params in group] == list(range(10, 16))


def test_prompts_are_handed_over_in_bounded_groups(llm, tmp_path):
    run_file(tmp_path, numbered(11))
    assert [len(prompts) for prompts, _ in llm.calls] == [4, 4, 3]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"id": 1, "prompt": "a"', "line 2: not valid JSON"),
        ("[1]", "line 2: a JSON list; expected an object"),
        ('{"prompt": "a"}', 'line 2: no "id"'),
        ('{"id": 1.5, "prompt": "a"}', 'line 2: "id" is 1.5'),
        ('{"id": 1}', 'line 2: expected one of "prompt" and "prompt_token_ids"'),
        ('{"id": 1, "prompt": "a", "prompt_token_ids": [2]}', "line 2: expected one of"),
        ('{"id": 1, "prompt": ["a"]}', 'line 2: "prompt" is a list'),
        ('{"id": 1, "prompt_token_ids": [2, true]}', 'line 2: "prompt_token_ids" is not a list'),
        ('{"id": 1, "prompt": "a", "max_tokens": 3}', "line 2: unknown field 'max_tokens'"),
        ('{"id": 1, "prompt": ""}', "the prompt is empty"),
        ("[" * 100_000, "line 2: not valid JSON"),
    ],
)
def test_a_bad_row_leaves_an_error_row_and_the_others_run(line, message, llm, tmp_path):
    rows = [{"id": "before", "prompt": "a"}, line, {"id": "after", "prompt": "b"}]
    code, output = run_file(tmp_path, rows)
    assert code == 1
    before, bad, after = rows_of(output)
    assert (before["text"], after["text"]) == ("A", "B")
    assert message in bad["error"]
    assert "text" not in bad


def test_line_that_is_not_utf8_leaves_an_error_row(llm, tmp_path):
    source = tmp_path / "in.jsonl"
    source.write_bytes(b'{"id": 0, "prompt": "\xff"}\n{"id": 1, "prompt": "a"}\n')
    output = tmp_path / "out.jsonl"
    assert cli.main(["generate", "--prompts", str(source), "--output", str(output)]) == 1
    bad, good = rows_of(output)
    assert "line 1: not UTF-8" in bad["error"]
    assert good["text"] == "A"


def test_system_with_token_ids_is_an_error_of_that_row_only(llm, tmp_path):
    rows = [{"id": 0, "prompt_token_ids": [97]}, {"id": 1, "prompt": "a"}]
    code, output = run_file(tmp_path, rows, "--system", "s")
    assert code == 1
    bad, good = rows_of(output)
    assert "--system" in bad["error"]
    assert good["text"] == "S | A"


@pytest.mark.parametrize("repeat", [1, "x"])
def test_duplicate_ids_are_refused_before_the_model_loads(repeat, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(options, "load_model", lambda args: pytest.fail("the model was loaded"))
    rows = [{"id": repeat, "prompt": "a"}, {"id": 2, "prompt": "b"}, {"id": repeat, "prompt": "c"}]
    code, output = run_file(tmp_path, rows)
    assert code == 2
    assert f"id {repeat!r} is on line 1 and on line 3" in capsys.readouterr().err
    assert not output.exists()


@pytest.mark.parametrize("text", ["", "\n  \n"])
def test_prompts_file_without_rows_is_refused(text, llm, tmp_path, capsys):
    assert run_file(tmp_path, [text])[0] == 2
    assert "has no rows" in capsys.readouterr().err


def test_missing_prompts_file_is_named(llm, tmp_path, capsys):
    assert cli.main(["generate", "--prompts", str(tmp_path / "no.jsonl")]) == 2
    assert "no.jsonl cannot be read: No such file or directory" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["absent/out.jsonl", "."])
def test_unwritable_output_is_refused_before_the_model_loads(name, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(options, "load_model", lambda args: pytest.fail("the model was loaded"))
    argv = ["generate", "--prompt", "a", "--output", str(tmp_path / name)]
    assert cli.main(argv) == 2
    assert "cannot be written" in capsys.readouterr().err


# --- resuming


def test_interrupted_run_resumes_with_no_row_lost_or_doubled(llm, tmp_path):
    whole, expected = run_file(tmp_path, numbered(10))
    expected = expected.rename(tmp_path / "expected.jsonl")
    llm.calls.clear()
    llm.fail_after = 1
    code, output = run_file(tmp_path, numbered(10))
    assert (whole, code) == (0, 130)
    assert len(rows_of(output)) == 4

    llm.calls.clear()
    llm.fail_after = None
    assert run_file(tmp_path, numbered(10))[0] == 0
    assert rows_of(output) == rows_of(expected)
    assert [len(prompts) for prompts, _ in llm.calls] == [4, 2]
    assert llm.calls[0][1][0].seed == 4


@pytest.mark.parametrize("cut", [1, 7, 40])
def test_torn_last_line_is_cut_and_its_prompt_runs_again(cut, llm, tmp_path):
    _, output = run_file(tmp_path, numbered(5))
    whole = output.read_bytes()
    output.write_bytes(whole[:-cut])
    llm.calls.clear()
    assert run_file(tmp_path, numbered(5))[0] == 0
    assert output.read_bytes() == whole
    assert sum(len(prompts) for prompts, _ in llm.calls) == 1


def test_torn_header_starts_anew(llm, tmp_path):
    (tmp_path / "out.jsonl").write_text('{"header": {"for')
    code, output = run_file(tmp_path, numbered(2))
    assert code == 0
    assert len(rows_of(output)) == 2


def test_finished_run_is_left_as_it_is_and_keeps_its_exit_code(llm, tmp_path):
    rows = [*numbered(2), {"id": "empty", "prompt": ""}]
    assert run_file(tmp_path, rows)[0] == 1
    before = (tmp_path / "out.jsonl").read_bytes()
    llm.calls.clear()
    code, output = run_file(tmp_path, rows)
    assert code == 1
    assert output.read_bytes() == before
    assert llm.calls == []


@pytest.mark.parametrize("flags", [["--seed", "1"], ["--max-tokens", "5"], ["--dtype", "float32"]])
def test_other_settings_do_not_resume(flags, llm, tmp_path, capsys):
    run_file(tmp_path, numbered(2))
    before = (tmp_path / "out.jsonl").read_bytes()
    code, output = run_file(tmp_path, numbered(2), *flags)
    assert code == 2
    name = flags[0][2:].replace("-", "_")
    assert f"settings.{name} was" in capsys.readouterr().err
    assert output.read_bytes() == before


def test_other_prompts_do_not_resume(llm, tmp_path, capsys):
    run_file(tmp_path, numbered(2))
    assert run_file(tmp_path, numbered(3))[0] == 2
    assert "prompts.rows was 2 and is now 3" in capsys.readouterr().err


def test_file_of_another_kind_is_not_overwritten(llm, tmp_path, capsys):
    (tmp_path / "out.jsonl").write_text('{"precious": 1}\n')
    code, output = run_file(tmp_path, numbered(2))
    assert code == 2
    assert "is not a record file" in capsys.readouterr().err
    assert output.read_text() == '{"precious": 1}\n'


def test_output_is_removed_again_when_the_model_does_not_load(tmp_path, monkeypatch):
    def fail(args):
        raise KeyboardInterrupt

    monkeypatch.setattr(options, "load_model", fail)
    code, output = run_file(tmp_path, numbered(2))
    assert code == 130
    assert not output.exists()
