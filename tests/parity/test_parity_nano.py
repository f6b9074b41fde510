"""nano against its committed transformers records, by the command that users run."""

import json

import planted
import pytest

from gemma_jax.cli import EXIT_OK, main
from gemma_jax.records import read_lines

RECORD = str(planted.RECORDS / "nano-bfloat16.jsonl.xz")
TWIN = str(planted.RECORDS / "nano-float32.jsonl.xz")
HIDDEN = str(planted.RECORDS / "nano-bfloat16-hidden.npz")


@pytest.mark.slow
def test_bfloat16_nano_has_no_unexplained_flip_and_no_sub_block_that_differs(tmp_path, capsys):
    some, out = tmp_path / "some.jsonl", tmp_path / "r.json"
    header, *rows = read_lines(RECORD)
    rows = [row for row in rows if _length(json.loads(row)) in planted.SEQUENCE_TOKENS]
    some.write_bytes(b"".join([header, *rows]))
    command = ["parity", "compare", str(some), "--float32", TWIN, "--trace", HIDDEN]
    assert main([*command, "--free-run", "--output-json", str(out)]) == EXIT_OK
    result = json.loads(out.read_text())
    print(capsys.readouterr().out)
    assert result["flips_rate"]["tokens"] == 768
    assert result["free_running"]["classes"]["unexplained"] == 0
    assert result["trace"]["first"] is None


def _length(row):
    return len(row["prompt_token_ids"]) + len(row["token_ids"])


@pytest.mark.slow
def test_float32_nano_has_no_flip_above_a_ten_thousandth_of_a_nat(tmp_path):
    assert main(["parity", "compare", TWIN]) == EXIT_OK


@pytest.mark.parity
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_committed_records_are_what_transformers_gives_now(tmp_path, dtype):
    from gemma_jax.parity.records import read_record

    path = tmp_path / "now.jsonl"
    flags = ["--teacher-force", RECORD, "--output", str(path), "--logprobs", "6", "--dtype", dtype]
    assert main(["parity", "record", "--engine", "transformers", *flags]) == EXIT_OK
    now, then = read_record(path), read_record(TWIN if dtype == "float32" else RECORD)
    pairs = list(zip(now.streams, then.streams, strict=True))
    same = sum(int((a.candidates.best == b.candidates.best).sum()) for a, b in pairs)
    assert same >= 0.998 * then.num_tokens
