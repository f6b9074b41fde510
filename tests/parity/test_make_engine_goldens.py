"""The command that records the engine goldens, with a stand-in for vLLM."""

import json

import fake_worker
import pytest

from bench.goldens import make_engine_goldens as maker
from bench.goldens.engine_prompts import LONGEST, NUM_PROMPTS, make_prompts
from gemma_jax.checkpoint.load import load_config
from gemma_jax.parity.records import check_twin, read_record
from gemma_jax.testing.golden_models import golden_checkpoint

MODEL = "31b-like"
REFUSES_COMPILED = """
class LLM(LLM):
    def __init__(self, **settings):
        if not settings["enforce_eager"]:
            raise RuntimeError("no kernel image")
        super().__init__(**settings)
"""
HANGS = """
import time
time.sleep(60)
"""


@pytest.fixture
def make(tmp_path, monkeypatch):
    """Runs the command with a stand-in for vLLM; gives its exit code and the record folder."""
    site, out, settings = tmp_path / "site", tmp_path / "out", tmp_path / "settings.jsonl"
    site.mkdir()
    monkeypatch.setenv("SETTINGS_FILE", str(settings))

    def run(*flags, more=""):
        (site / "vllm.py").write_text(fake_worker.VLLM + more)
        (site / "torch.py").write_text(fake_worker.TORCH)
        common = ["--engine", "vllm", "--model", MODEL, "--vllm-path", str(site), "--jobs", "2"]
        code = maker.main([*common, "--out", str(out), "--logs", str(tmp_path / "logs"), *flags])
        engines = settings.read_text().splitlines() if settings.exists() else []
        settings.unlink(missing_ok=True)
        return code, out / MODEL, [json.loads(line) for line in engines]

    return run


def test_every_cell_and_twin_is_recorded_from_one_engine_a_setting(make):
    code, folder, engines = make()
    assert code == 0
    records = {path.name: read_record(path) for path in folder.iterdir()}
    twins = {name for name in records if name.endswith(maker.TWIN_SUFFIX)}
    # Three precisions, eager and compiled, two batch sizes; exact float32 needs no twin.
    assert (len(records) - len(twins), len(twins)) == (12, 8)
    for name in twins:
        check_twin(records[name.replace(maker.TWIN_SUFFIX, maker.SUFFIX)], records[name])
        assert records[name].header["environment"]["TRITON_F32_DEFAULT"] == "ieee"
    alone = records["vllm-float32-compiled-batch1.jsonl.xz"]
    assert {stream.batch for stream in alone.streams} == {1}
    assert alone.header["vllm"]["enforce_eager"] is False
    assert alone.header["vllm"]["max_num_seqs"] == 64
    assert alone.header["environment"]["TRITON_F32_DEFAULT"] == "tf32"
    assert alone.num_tokens == NUM_PROMPTS * maker.MAX_TOKENS
    assert len(engines) == 6 + 2
    assert {engine["max_num_seqs"] for engine in engines} == {64}
    assert {engine["max_model_len"] for engine in engines} == {4096}
    assert len({engine["VLLM_CACHE_ROOT"] for engine in engines}) == 6


def test_failing_process_is_reported_the_rest_runs_and_the_same_command_goes_on(make, capsys):
    only = ("--only", "float32-ieee")
    code, folder, _ = make(*only, more=REFUSES_COMPILED)
    printed = capsys.readouterr().out
    assert code == 1
    assert "31b-like vllm-float32-ieee-compiled: FAILED" in printed
    assert "no kernel image" in printed
    assert "missing: 31b-like/vllm-float32-ieee-compiled-batch64.jsonl.xz" in printed
    names = {path.name for path in folder.iterdir()}
    assert names == {f"vllm-float32-ieee-eager-batch{n}.jsonl.xz" for n in (1, 64)}
    (folder / "vllm-float32-ieee-eager-batch1.jsonl.xz").unlink()
    code, folder, engines = make(*only)
    assert code == 0
    assert len(list(folder.iterdir())) == 4
    assert sorted(engine["max_num_seqs"] for engine in engines) == [1, 64]


def test_process_that_hangs_is_stopped(make, capsys):
    code, _, engines = make("--only", "float32-ieee-eager", "--timeout", "2", more=HANGS)
    assert (code, engines) == (1, [])
    assert "took more than 2" in capsys.readouterr().out


def test_no_process_starts_after_the_budget(make, capsys):
    assert make("--budget", "0")[::2] == (1, [])
    assert "not started, the budget is spent" in capsys.readouterr().out


def test_fast_prefill_is_a_cell_of_models_with_shared_keys_only():
    files = [f for p in maker.processes("vllm", ("nano", "26b-like")) for f in p.files()]
    assert sum(name.startswith("nano/") for name in files) == 24 + 16
    assert sum(name.startswith("26b-like/") for name in files) == 12 + 8
    assert not any("fast-prefill" in name for name in files if name.startswith("26b"))
    assert len(set(files)) == len(files)


@pytest.mark.parametrize("name", ["nano", "e2b-like"])
def test_prompts_are_seeded_and_reach_from_one_token_to_the_context(name, tmp_path):
    config = load_config(golden_checkpoint(name, tmp_path))
    prompts = make_prompts(name, config, 7)
    lengths = [len(prompt) for prompt in prompts]
    assert (len(prompts), lengths[0], lengths[-1]) == (NUM_PROMPTS, 1, LONGEST)
    window = config.sliding_window
    assert {window - 1, window, window + 1, 2 * window + 3, 1023, 1025} <= set(lengths)
    again = make_prompts(name, config, 7)
    assert all((a == b).all() for a, b in zip(prompts, again, strict=True))
    assert max(prompt.max() for prompt in prompts) < config.vocab_size
