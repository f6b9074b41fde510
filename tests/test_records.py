"""The record format: rows of requests, reading, and writing after an interrupted run."""

import gzip
import lzma
import math

import pytest

from gemma_jax.errors import ConfigError
from gemma_jax.outputs import CompletionOutput, Logprob, RequestOutput
from gemma_jax.records import RecordWriter, error_row, make_header, make_row, read_records

pytestmark = pytest.mark.fast

HEADER = {"settings": {"seed": 0}, "created_utc": "now"}


def output_with(logprobs):
    completion = CompletionOutput(0, "ab", [5, 1], logprobs=logprobs, finish_reason="stop")
    return RequestOutput("0", "x", [2, 9], outputs=[completion], finished=True)


def rows(*ids):
    return [{"id": row_id, "text": "t"} for row_id in ids]


def write(path, header=HEADER, ids=(), new=()):
    with RecordWriter(path) as writer:
        progress = writer.start(header, ids)
        writer.write(new)
    return progress


def test_row_holds_the_completion_without_logprobs_when_none_were_asked_for():
    assert make_row("a", output_with(None)) == {
        "id": "a",
        "prompt_token_ids": [2, 9],
        "token_ids": [5, 1],
        "text": "ab",
        "finish_reason": "stop",
    }


def test_sampled_token_outside_the_top_is_listed_last():
    first = {7: Logprob(-0.5), 8: Logprob(-1.0), 5: Logprob(-9.0)}
    row = make_row(0, output_with([first, {1: Logprob(-0.125)}]))
    assert row["logprobs"] == [-9.0, -0.125]
    assert row["top"] == [[[7, -0.5], [8, -1.0], [5, -9.0]], [[1, -0.125]]]


def test_logprob_that_is_not_finite_makes_an_error_row():
    row = make_row(0, output_with([{5: Logprob(math.nan)}, {1: Logprob(-1.0)}]))
    assert "not finite" in row["error"]


def test_failed_request_makes_an_error_row_with_its_prompt():
    output = RequestOutput("0", None, [2], finished=True, error="too long")
    assert make_row(0, output) == {"id": 0, "error": "too long", "prompt_token_ids": [2]}


def test_header_names_format_engine_versions_device_and_settings():
    header = make_header({"seed": 1}, engine="other", extra_field=2)
    assert header["engine"] == "other"
    assert header["settings"] == {"seed": 1}
    assert header["extra_field"] == 2
    assert header["device"]["count"] >= 1
    assert header["format"].startswith("gemma-jax-records/")


def test_what_was_written_is_read_back(tmp_path):
    path = tmp_path / "r.jsonl"
    strange = {"id": "\ud800", "text": "snow ☃ \u2028 \n"}
    write(path, new=[*rows(1), strange, error_row(None, "line 3: bad")])
    header, read = read_records(path)
    assert header == HEADER
    assert list(read) == [*rows(1), strange, {"id": None, "error": "line 3: bad"}]


def test_second_writer_is_refused_while_the_first_is_open(tmp_path):
    path = tmp_path / "r.jsonl"
    with RecordWriter(path), pytest.raises(ConfigError, match="being written by another run"):
        RecordWriter(path)


def test_time_of_the_run_may_differ_on_resuming(tmp_path):
    path = tmp_path / "r.jsonl"
    write(path, new=rows(0))
    assert write(path, HEADER | {"created_utc": "later"}, [0, 1], rows(1)) == (1, 0)
    assert [row["id"] for row in read_records(path).rows] == [0, 1]


def test_resuming_counts_the_errors_that_are_kept(tmp_path):
    path = tmp_path / "r.jsonl"
    write(path, new=[error_row(0, "bad"), *rows(1)])
    assert write(path, ids=[0, 1, 2]) == (2, 1)


def test_everything_from_a_damaged_line_on_is_cut(tmp_path, caplog):
    path = tmp_path / "r.jsonl"
    write(path, new=rows(0, 1, 2))
    path.write_bytes(path.read_bytes().replace(b'{"id":1', b"\0\0\0\0\0\0\0"))
    assert write(path, ids=[0, 1, 2]) == (1, 0)
    assert [row["id"] for row in read_records(path).rows] == [0]
    assert "cut after 1 whole rows" in caplog.text


@pytest.mark.parametrize("ids", [[1, 0], [0], []])
def test_rows_of_other_prompts_are_refused(ids, tmp_path):
    path = tmp_path / "r.jsonl"
    write(path, new=rows(0, 1))
    with pytest.raises(ConfigError, match="which is not the id of prompt"):
        write(path, ids=ids)
    assert len(list(read_records(path).rows)) == 2


def test_reading_a_torn_file_names_the_line(tmp_path):
    path = tmp_path / "r.jsonl"
    write(path, new=rows(0, 1))
    path.write_bytes(path.read_bytes()[:-3])
    _, read = read_records(path)
    with pytest.raises(ConfigError, match="line 3 is torn"):
        list(read)


@pytest.mark.parametrize("text", ["", "{}\n", "[]\n", "x\n", '{"header": 1}\n'])
def test_reading_another_kind_of_file_is_refused(text, tmp_path):
    path = tmp_path / "r.jsonl"
    path.write_text(text)
    with pytest.raises(ConfigError, match="is not a record file"):
        read_records(path)


def test_reading_a_missing_file_names_it(tmp_path):
    with pytest.raises(ConfigError, match=r"absent\.jsonl: No such file"):
        read_records(tmp_path / "absent.jsonl")


def test_device_file_is_not_an_output():
    with pytest.raises(ConfigError, match="not a regular file"):
        RecordWriter("/dev/null")


@pytest.mark.parametrize("suffix", [".gz", ".xz"])
def test_compressed_file_is_read_and_a_cut_one_refused(tmp_path, suffix):
    plain, path = tmp_path / "r.jsonl", tmp_path / f"r.jsonl{suffix}"
    write(plain, new=rows(1, 2))
    pack = {".gz": gzip.compress, ".xz": lzma.compress}[suffix]
    path.write_bytes(pack(plain.read_bytes()))
    assert [row["id"] for row in read_records(path).rows] == [1, 2]
    path.write_bytes(path.read_bytes()[:-12])
    with pytest.raises(ConfigError, match="damaged or cut off"):
        list(read_records(path).rows)
