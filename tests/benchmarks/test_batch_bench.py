"""`python -m bench.batch`: one row of an offline job, and refusals before it starts."""

import json

import pytest

from bench import batch


def test_a_job_becomes_a_row_with_its_tokens_and_memory(tmp_path, tiny_model):
    rows = tmp_path / "rows.jsonl"
    arguments = ["--model", tiny_model, "--num-prompts", "3", "--max-tokens", "4"]
    assert batch.main([*arguments, "--output-json", str(rows)]) == 0
    row = json.loads(rows.read_text())
    assert row["status"] == "ok", row["note"]
    assert 3 <= row["result"]["generated_tokens"] <= 12
    assert row["result"]["peak_rss_bytes"] > 2**26
    assert row["derived"]["generated_tok_per_s"] > 0


def test_a_job_that_cannot_run_is_a_row_that_says_why(tmp_path, capsys):
    assert batch.main(["--model", str(tmp_path / "nothing"), "--num-prompts", "1"]) == 1
    assert "no such file or directory" in capsys.readouterr().out


@pytest.mark.parametrize("flag", ["--num-prompts", "--max-tokens"])
def test_a_count_is_at_least_one(flag, capsys):
    with pytest.raises(SystemExit):
        batch.main([flag, "0"])
    assert f"{flag}: '0': expected an integer of at least 1" in capsys.readouterr().err


def test_prompts_are_short_and_the_same_every_time():
    rows = batch.prompts(50)
    assert rows == batch.prompts(50)
    assert {len(row["prompt"].split()) for row in rows} <= set(range(2, batch.LONGEST + 1))
    assert [row["id"] for row in rows] == list(range(50))
