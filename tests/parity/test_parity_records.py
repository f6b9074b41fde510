"""Records of every engine are read, and files that cannot be compared are refused by name."""

import gzip
import json
import lzma
import math
import re

import numpy as np
import pytest
from record_files import HEADER, VOCAB, row, write

from gemma_jax.errors import RecordError
from gemma_jax.parity.records import (
    Candidates,
    check_model,
    check_twin,
    check_vocabulary,
    read_record,
)

TOP = [[[5, -0.1], [6, -2.5]], [[9, -0.5], [7, -0.75], [8, -3.0]]]
VLLM = {
    "request_id": "a",
    "prompt_token_ids": [2, 3],
    "outputs": [
        {
            "index": 0,
            "token_ids": [5, 9],
            "logprobs": [
                {"5": {"logprob": -0.1, "rank": 1}, "6": {"logprob": -2.5, "rank": 2}},
                {"9": {"logprob": -0.5}, "7": {"logprob": -0.75}, "8": {"logprob": -3.0}},
            ],
        }
    ],
}
OPENAI = {
    "id": "cmpl-1",
    "model": "m",
    "choices": [
        {
            "prompt_token_ids": [2, 3],
            "logprobs": {
                "tokens": ["token_id:5", "token_id:9"],
                "token_logprobs": [-0.1, -0.5],
                "top_logprobs": [
                    {"token_id:5": -0.1, "token_id:6": -2.5},
                    {"token_id:9": -0.5, "token_id:7": -0.75, "token_id:8": -3.0},
                ],
            },
        }
    ],
}
CHAT = {
    "id": "chat-1",
    "model": "m",
    "prompt_token_ids": [2, 3],
    "choices": [
        {
            "logprobs": {
                "content": [
                    {
                        "token": f"token_id:{at[0][0]}",
                        "logprob": at[0][1],
                        "top_logprobs": [
                            {"token": f"token_id:{token}", "logprob": value} for token, value in at
                        ],
                    }
                    for at in TOP
                ]
            }
        }
    ],
}


def lines(path, *values):
    path.write_text("".join(json.dumps(x) + "\n" for x in values))
    return path


def refused(path, words, **options):
    with pytest.raises(RecordError, match=words):
        read_record(path, **options)


def test_record_becomes_arrays_with_the_best_first(tmp_path):
    shuffled = [TOP[0][::-1], [[8, -3.0], [7, -0.5], [9, -0.5]]]
    path = write(tmp_path / "r.jsonl", [{**row("a", [2, 3], TOP), "top": shuffled}])
    record = read_record(path)
    (stream,) = record.streams
    assert stream.sequence == [2, 3, 5, 9]
    assert stream.candidates.ids.tolist() == [[5, 6, -1], [7, 9, 8]]  # the lowest id of a tie
    np.testing.assert_allclose(stream.candidates.margins, [2.4, 0.0], atol=1e-6)
    assert (record.engine, record.dtype, stream.batch) == ("transformers", "bfloat16", 4)


@pytest.mark.parametrize(("suffix", "opener"), [(".gz", gzip.open), (".xz", lzma.open)])
def test_compressed_records_are_read_directly(tmp_path, suffix, opener):
    plain = write(tmp_path / "r.jsonl", [row("a", [2], TOP)])
    path = tmp_path / f"r.jsonl{suffix}"
    with opener(path, "wb") as file:
        file.write(plain.read_bytes())
    assert read_record(path).streams[0].tokens.tolist() == [5, 9]
    path.write_bytes(path.read_bytes()[:-20])
    refused(path, "damaged or cut off.*; record it again")


def test_name_must_say_how_the_file_is_compressed(tmp_path):
    plain = write(tmp_path / "plain.jsonl", [row("a", [2], TOP)]).read_bytes()
    for name, data, words in (
        ("r.jsonl", gzip.compress(plain), r"r\.jsonl: looks gzip-compressed; name it \.gz"),
        ("r.gz", lzma.compress(plain), r"r\.gz: looks xz-compressed; name it \.xz"),
        ("r.xz", plain, r"r\.xz: not xz-compressed; name it without \.xz"),
    ):
        (tmp_path / name).write_bytes(data)
        refused(tmp_path / name, words)


@pytest.mark.parametrize("value", [VLLM, OPENAI, CHAT], ids=["vllm", "completion", "chat"])
@pytest.mark.parametrize("form", ["lines", "list", "batch file"])
def test_outputs_of_other_tools_are_read_as_records(tmp_path, value, form):
    path = tmp_path / "o.jsonl"
    if form == "list":
        path.write_text(json.dumps([value]))
    elif form == "batch file" and value is not VLLM:
        lines(path, {"id": "x", "custom_id": "c", "response": {"body": value}, "error": None})
    else:
        lines(path, value)
    record = read_record(path)
    (stream,) = record.streams
    assert (stream.prompt.tolist(), stream.tokens.tolist()) == ([2, 3], [5, 9])
    assert stream.candidates.as_pairs() == TOP
    assert record.engine == ("vllm" if value is VLLM else "openai")


def test_logprob_of_finds_listed_candidates_only():
    candidates = Candidates.of([[(5, -0.1), (6, -2.0)], [(7, -1.0)]])
    found = candidates.logprob_of(np.array([[5, 9], [7, -1]]))
    np.testing.assert_allclose(found, [[-0.1, np.nan], [-1.0, np.nan]], rtol=1e-6)


def test_error_rows_are_counted_and_left_out(tmp_path):
    path = write(tmp_path / "r.jsonl", [row("a", [2], TOP), {"id": "b", "error": "too long"}])
    record = read_record(path)
    assert ([s.id for s in record.streams], record.failed) == (["a"], ("b",))
    write(path, [{"id": "b", "error": "too long"}])
    refused(path, r"none of its 1 rows has tokens.*line 2: too long\); record it again")
    write(path, [])
    refused(path, r"r\.jsonl: a header, but no rows; record it again")


def test_truncated_last_line_is_named(tmp_path):
    path = write(tmp_path / "r.jsonl", [row("a", [2], TOP), row("b", [2], TOP)])
    path.write_bytes(path.read_bytes()[:-9])
    refused(path, r"r\.jsonl, line 3: the line is cut off")


def test_two_records_in_one_file_are_refused(tmp_path):
    path = write(tmp_path / "r.jsonl", [row("a", [2], TOP), {"header": HEADER}])
    refused(path, "line 3: a second header; the file mixes two runs")


def test_answers_of_two_models_are_refused(tmp_path):
    other = OPENAI | {"id": "cmpl-2", "model": "n"}
    path = lines(tmp_path / "o.jsonl", OPENAI, other)
    refused(path, "line 2: of the model 'n', but the rows before it of 'm'; split the file by mod")
    refused(lines(path, VLLM, OPENAI), "line 2: of the engine 'openai', but the rows before it of")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"top": None}, "no log-probabilities"),
        ({"top": TOP[:1]}, "2 tokens, but candidates at 1 positions"),
        ({"top": [TOP[0], [[9, -0.5]]]}, "token 1: fewer than two candidates"),
        ({"top": [TOP[0], [[9, -0.5], [9, -0.5]]]}, "token 1: a candidate is listed twice"),
        ({"top": [TOP[0], [[9, "x"], [7, -1]]]}, re.escape("token 1: candidate [9, 'x']")),
        (
            {"top": [TOP[0], [[9, 5.0], [7, -1]]]},
            "line 2, row .*token 1: .*at most 0; record it again",
        ),
        (
            {"top": [TOP[0], [[9, -0.5], [7, -1e300]]]},
            r"candidate \[7, -1e\+300\]: .*finite float32",
        ),
        ({"top": [TOP[0], [[9, -0.5], [7, -(10**400)]]]}, "token 1: candidate .7, -1000.*finite"),
        ({"top": [TOP[0], [[9, math.nan], [7, -math.inf]]]}, r"candidate \[9, nan\]"),
        (
            {"batch": -3},
            "line 2, row .*batch=-3: expected an integer of at least 1; correct it or leav",
        ),
        ({"batch": "8"}, "batch='8': expected an integer"),
        ({"batch": True}, "batch=True: expected an integer"),
        ({"token_ids": [5, -9]}, r"token_ids has an id outside \[0, 2\*\*31\)"),
        ({"token_ids": [5, 2**31]}, "token_ids has an id outside"),
        ({"token_ids": [5, True]}, "token_ids is missing or not a list of integers"),
        ({"prompt_token_ids": "text"}, "prompt_token_ids is missing or not a list"),
        ({"prompt_token_ids": []}, "without tokens"),
        ({"id": None}, "id=None: expected a string or an integer"),
    ],
)
def test_bad_rows_are_refused_with_the_row_and_the_reason(tmp_path, change, words):
    path = write(tmp_path / "r.jsonl", [row("a", [2], TOP) | change])
    refused(path, words)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"versions": "x"}, "versions='x': expected an object; correct it or leave it out"),
        ({"device": 5}, "device=5: expected an object or a string"),
        ({"engine": ["vllm"]}, r"engine=\['vllm'\]: expected a string"),
        ({"dtype": "float16"}, "dtype='float16': expected bfloat16 or float32"),
        ({"dtype": ["x"]}, r"dtype=\['x'\]: expected bfloat16 or float32"),
        ({"settings": [1]}, r"settings=\[1\]: expected an object"),
        ({"settings": {"dtype": "half"}}, "settings.dtype='half': expected auto, bfloat16 or flo"),
        ({"settings": {"max_num_seqs": 0}}, "settings.max_num_seqs=0: expected an integer of at"),
        ({"model": 3}, "model=3: expected an object or a string"),
        ({"model": {"vocab_size": "64"}}, "model.vocab_size='64': expected an integer"),
        ({"model": {"weights_sha256": 7}}, "model.weights_sha256=7: expected a string"),
    ],
)
def test_header_fields_of_another_type_are_refused_as_they_are_read(tmp_path, change, words):
    path = write(tmp_path / "r.jsonl", [row("a", [2], TOP)], HEADER | change)
    refused(path, rf"r\.jsonl, line 1: header {words}")
    refused(path, words, needs_logprobs=False)


def test_header_fields_may_be_null_or_missing(tmp_path):
    empty = dict.fromkeys(("versions", "device", "dtype", "settings", "model", "engine"))
    for header in ({}, empty, {"model": {"vocab_size": None}, "device": "cpu"}):
        record = read_record(write(tmp_path / "r.jsonl", [row("a", [2], TOP)], header))
        assert (record.dtype, record.streams[0].batch, record.engine) == (
            None,
            None,
            "unknown engine",
        )


def test_logprob_of_nearly_one_may_be_rounded_above_zero(tmp_path):
    top = [[[5, 2e-4], [6, -9.5]]]
    record = read_record(write(tmp_path / "r.jsonl", [row("a", [2], top)]))
    assert record.streams[0].candidates.as_pairs() == top


def test_row_ids_must_differ(tmp_path):
    refused(write(tmp_path / "r.jsonl", [row("a", [2], TOP)] * 2), "line 3: id 'a' is there twice")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "the file is empty"),
        (b"\x00\xff\x00\n", "not valid JSON"),
        (b"[1, 2]", "entry 0: 1: expected an object"),
        (b"3\n", "line 1: 3: expected an object"),
        (b"[" * 100_000, r"r\.jsonl: not valid JSON \(nested too deeply\); record it again"),
        (b'{"header":' * 100_000 + b"\n", r"line 1: not valid JSON \(nested too deeply\); record"),
        (b'{"header": {"x": ' + b"9" * 5000 + b"}}\n", "line 1: not valid JSON .*too many digits"),
        (b"{}\n", "line 1: neither a record header"),
        (b'{"text": "hello"}\n', "neither a record header, nor a vLLM RequestOutput"),
        (b'{"header": 3}\n', '"header" is not an object'),
        (b'{"header": {}}\n{"text": 1}\n', 'line 2: no "id"'),
    ],
    ids=[
        "empty", "binary", "list of numbers", "number", "deep list", "deep object", "long number",
        "empty object", "text", "header a number", "no id",
    ],
)  # fmt: skip
def test_files_of_another_kind_are_refused(tmp_path, content, words):
    path = tmp_path / "r.jsonl"
    path.write_bytes(content)
    refused(path, words)


def test_absent_file_is_refused(tmp_path):
    refused(tmp_path / "none.jsonl", "No such file")


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (VLLM | {"outputs": []}, "outputs=.*expected a list of completions"),
        (VLLM | {"outputs": [{"token_ids": [5, 9]}]}, "no log-probabilities"),
        (OPENAI | {"choices": [{"text": "x", "logprobs": None}]}, 'ask for "logprobs"'),
        (OPENAI | {"choices": []}, "expected a completion"),
        (OPENAI | {"model": ["m"]}, r"line 1: model=\['m'\]: expected a string"),
        (VLLM | {"outputs": [{"token_ids": [5], "logprobs": 3}]}, "logprobs=3: expected a list"),
        *(
            (OPENAI | {"choices": [{"logprobs": bad}]}, "line 1: logprobs=.*expected those of a co")
            for bad in (
                {"tokens": 5},
                {"tokens": [["a"]]},
                {"tokens": ["token_id:5"], "token_logprobs": [-1.0], "top_logprobs": [3]},
                {"content": [3]},
                {"content": [{"token": "token_id:5", "top_logprobs": [{"logprob": -1.0}]}]},
            )
        ),
    ],
)
def test_outputs_without_logprobs_or_tokens_are_refused(tmp_path, value, words):
    refused(lines(tmp_path / "o.jsonl", value), words)


def test_answer_with_token_texts_asks_for_ids(tmp_path):
    choice = dict(OPENAI["choices"][0], logprobs={"tokens": [" a"], "token_logprobs": [-1.0]})
    refused(lines(tmp_path / "o.jsonl", OPENAI | {"choices": [choice]}), "return_token_ids")


def test_record_of_another_tokenizer_size_is_refused(tmp_path):
    record = read_record(write(tmp_path / "r.jsonl", [row("a", [2], TOP)]))
    check_vocabulary(record, VOCAB)
    with pytest.raises(RecordError, match=r"of 64, but the model has 262144.*as --model"):
        check_vocabulary(record, 262_144)


@pytest.mark.parametrize(
    ("bad", "place"),
    [
        (row("a", [2, 99], TOP), r"prompt_token_ids\[1\]=99"),
        (row("a", [2], TOP) | {"token_ids": [5, 70]}, r"token_ids\[1\]=70"),
        (row("a", [2], [TOP[0], [[9, -0.5], [64, -1.0]]]), r"top\[1, 1\]=64"),
    ],
)
def test_ids_out_of_range_are_named_with_their_place(tmp_path, bad, place):
    record = read_record(write(tmp_path / "r.jsonl", [bad], {"engine": "x"}))
    words = f"line 2, row 'a': {place}, outside the vocabulary of 64; give the model .* as --model"
    with pytest.raises(RecordError, match=words):
        check_vocabulary(record, VOCAB)


def test_record_of_another_model_is_refused(tmp_path):
    record = read_record(write(tmp_path / "r.jsonl", [row("a", [2], TOP)]))
    check_model(record, HEADER["model"])
    check_model(record, HEADER["model"] | {"weights_sha256": None})
    for key, what in (("config_sha256", "configuration"), ("weights_sha256", "weights")):
        with pytest.raises(RecordError, match=f"recorded with other {what}.*as --model"):
            check_model(record, HEADER["model"] | {key: "other"})


def test_float32_twin_must_have_the_same_rows_model_and_dtype(tmp_path):
    record = read_record(write(tmp_path / "r.jsonl", [row("a", [2], TOP)]))
    float32 = HEADER | {"dtype": "float32"}

    def twin(rows, header=float32):
        return read_record(write(tmp_path / "t.jsonl", rows, header))

    check_twin(record, twin([row("b", [2], TOP), row("a", [2], TOP)]))
    other_model = float32 | {"model": HEADER["model"] | {"weights_sha256": "w2"}}
    for bad, words in (
        (twin([row("b", [2], TOP)]), "no row 'a'"),
        (twin([row("a", [3], TOP)]), "row 'a': other tokens"),
        (twin([row("a", [2], TOP)], HEADER), "a bfloat16 record, expected float32"),
        (twin([row("a", [2], TOP)], other_model), "other weights"),
    ):
        with pytest.raises(RecordError, match=words):
            check_twin(record, bad)
