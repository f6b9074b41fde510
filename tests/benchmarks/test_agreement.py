"""The agreement rows: every golden is a set, old ones are read as records, rows make a table."""

import hashlib
import json

import pytest

from bench import agreement, compare
from gemma_jax.parity.bounds import lower_bound
from gemma_jax.parity.records import check_twin
from gemma_jax.testing.configs import TINY_CONFIGS
from gemma_jax.testing.golden_models import BEYOND_LIMIT
from gemma_jax.testing.goldens import load_teacher_forced


def test_every_committed_golden_is_a_set_of_its_own_name():
    names = [found.name for found in agreement.committed_sets()]
    assert len(set(names)) == len(names)
    records = [p for p in agreement.DATA.glob("engines/*/*.xz") if "twin" not in p.name]
    assert len(records) == sum(name.split("/")[1].startswith(("t", "v")) for name in names)
    assert {f"{name}/float32" for name in TINY_CONFIGS} <= set(names)


def test_older_goldens_are_records_with_their_candidates():
    sets = {found.name: found for found in agreement.committed_sets()}
    record, twin = sets["nano/held_out bfloat16"].read()
    assert twin is not None
    check_twin(record, twin)
    golden = load_teacher_forced(agreement.DATA / "nano_held_out.npz")
    assert record.num_tokens == len(golden.argmax("bfloat16"))
    last = record.streams[-1].candidates
    assert last.ids[-1].tolist() == golden.top_ids["bfloat16"][-1].tolist()
    assert sets["nano/held_out float32"].read()[1] is None
    tiny, _ = sets["e2b-tiny/float32"].read()
    assert all((s.candidates.best == s.tokens).all() for s in tiny.streams)
    assert all(s.candidates.logprobs.max() <= 0 for s in tiny.streams)


def test_committed_rows_are_of_the_committed_goldens_and_their_flips_are_explained():
    rows = {}
    for row in compare.read_rows(sorted(compare.RESULTS.glob("*-parity.jsonl"))):
        rows[row["case"]] = row
    measured = [found for found in agreement.committed_sets() if found.name in rows]
    assert measured
    for found in measured:
        row = rows[found.name]
        digest = hashlib.sha256(found.path.read_bytes()).hexdigest()
        assert row["config"]["reference"]["sha256"] == digest, found.name
        beyond = row["result"]["unexplained_rate"]
        if found.model == "nano" or row["config"]["dtype"] == "float32":
            assert beyond["flips"] == 0, found.name
        else:  # tests/parity/test_engine_goldens.py says why
            assert lower_bound(beyond["flips"], beyond["tokens"]) <= BEYOND_LIMIT, found.name
        assert row["result"]["flips_rate"]["tokens"] > 1000


@pytest.mark.slow
def test_a_set_becomes_a_row_and_a_line_of_the_table(tmp_path, capsys):
    out = tmp_path / "rows.jsonl"
    command = ["--only", "e2b-tiny/float32", "--output-json", str(out), "--commit", "abc"]
    assert agreement.main(command) == 0
    assert "e2b-tiny/float32: 2,688 tokens, 0 flips" in capsys.readouterr().out
    (row,) = compare.read_rows([out])
    assert row["result"]["flips_rate"]["upper_95"] == pytest.approx(1 - 0.05 ** (1 / 2688))
    assert row["command"] == "python -m bench.agreement --only e2b-tiny/float32"
    table = compare.table("parity", [row])
    version = row["config"]["reference"]["version"]
    assert f"| e2b-tiny/float32 | transformers {version} | float32 | 2,688 |" in table
    assert "| 0 (0 / 0 / 0) | 0.11 % | 0.11 % |" in table
    assert json.loads(out.read_text())["numerics"] is None
