"""`gemma-jax bench` on a tiny model: rows, last line, bad input; the random weights behind it."""

import json
import subprocess
import sys

import jax
import numpy as np
import pytest

from gemma_jax.benchmarks import cli, load_worker, random_model
from gemma_jax.checkpoint.names import leaf_sources
from gemma_jax.errors import ConfigError
from gemma_jax.testing.configs import TINY_CONFIGS
from gemma_jax.testing.weights import tensor_moments

pytestmark = pytest.mark.usefixtures("quick_compilation")

QUICK = ["--preset", "e2b-tiny", "--peak-flops", "1e12", "--peak-bandwidth", "1e12"]


@pytest.mark.parametrize("bench", cli.BENCHMARKS)
def test_bench_help_does_not_import_jax(bench):
    script = f"""
import sys
from gemma_jax.cli import main
try:
    main(["bench", {bench!r}, "--help"])
except SystemExit:
    print("jax imported:", "jax" in sys.modules)
"""
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert f"usage: gemma-jax bench {bench}" in result.stdout
    assert "jax imported: False" in result.stdout


def test_throughput_writes_a_row_a_workload_and_ends_with_one_json_line(tmp_path, capsys):
    path = tmp_path / "rows.jsonl"
    workloads = ["--workload", "2x32+1", "--workload", "1x32+3", "--workload", "1x5000+1"]
    code = cli.main(["throughput", *QUICK, *workloads, "--output-json", str(path)])
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [r["case"] for r in rows] == ["2x32+1", "1x32+3", "1x5000+1"]
    assert [r["status"] for r in rows] == ["ok", "ok", "error"]
    assert code == 1
    assert "5000 tokens leave no room in a context of 4096" in rows[2]["note"]

    prompts, decode, _ = rows
    seconds = prompts["median_ms"] / 1e3
    assert len(prompts["samples_ms"]) == 3
    assert prompts["derived"]["prompt_tok_per_s"] == pytest.approx(64 / seconds, rel=1e-3)
    assert prompts["derived"]["tok_per_s"] == pytest.approx(66 / seconds, rel=1e-3)
    assert prompts["derived"]["mbu"] is None
    assert 0 < decode["derived"]["mbu"] < decode["derived"]["bytes_per_s"]
    assert all(0 < row["derived"]["device_idle_share"] < 1 for row in (prompts, decode))
    assert prompts["config"]["model"] == "random weights, e2b-tiny"

    last = json.loads(capsys.readouterr().out.splitlines()[-1])["cases"]["2x32+1"]
    assert last == prompts["result"]
    assert last["num_requests"] == 2
    assert last["total_num_tokens"] == 66
    assert last["tokens_per_second"] == pytest.approx(66 / last["elapsed_time"])


def test_latency_reports_the_fields_of_vllm_in_seconds(capsys):
    shape = ["--batch-size", "2", "--input-len", "32", "--output-len", "1"]
    repeats = ["--num-iters-warmup", "0", "--num-iters", "4"]
    assert cli.main(["latency", *QUICK, *shape, *repeats]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert len(result["latencies"]) == 4
    assert result["avg_latency"] == pytest.approx(sum(result["latencies"]) / 4)
    assert result["percentiles"]["50"] == pytest.approx(np.median(result["latencies"]))


def test_load_reports_seconds_and_memory_of_a_fresh_process(tmp_path, capsys):
    path = tmp_path / "rows.jsonl"
    arguments = ["--preset", "e2b-tiny", "--folder", str(tmp_path), "--output-json", str(path)]
    assert cli.main(["load", *arguments]) == 0
    row = json.loads(path.read_text())
    assert row["result"]["generated"] == 1
    assert row["median_ms"] == pytest.approx(row["result"]["load_s"] * 1e3, abs=1e-3)
    assert row["config"]["file_bytes"] >= row["result"]["weight_bytes"] > 0
    assert row["result"]["peak_rss_bytes"] >= row["result"]["peak_rss_anon_bytes"] > 0
    assert sorted(tmp_path.iterdir()) == [path]
    assert str(tmp_path) not in path.read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["latency", "--batch-size", "0"], "expected an integer of at least 1"),
        (["latency", "--num-iters", "x"], "expected an integer of at least 1"),
        (["throughput", "--peak-flops", "0"], "expected a number above 0"),
        (["throughput", "--unknown"], "unrecognized arguments: --unknown"),
        ([], "required: BENCHMARK"),
    ],
)
def test_bad_flags_are_refused_with_what_is_allowed(arguments, message, capsys):
    with pytest.raises(SystemExit) as stopped:
        cli.main(arguments)
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--workload", "8x2048"], "workload='8x2048'"),
        (["--preset", "e3b"], "preset='e3b'"),
        (["--preset", "e2b-tiny", "--model", "nano"], "give one"),
    ],
)
def test_bad_values_are_refused_by_name(arguments, message):
    with pytest.raises(ConfigError, match=message):
        cli.main(["throughput", *QUICK[2:], *arguments])


@pytest.fixture(scope="module")
def drawn():
    config = TINY_CONFIGS["e2b-tiny"]
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    leaves = random_model.random_leaves(config, "float32", 0, lambda path: sharding)
    return leaf_sources(config), leaves


def test_random_leaves_have_the_shapes_and_moments_of_the_recipe(drawn):
    sources, leaves = drawn
    assert {p: x.shape for p, x in leaves.items()} == {p: s.shape for p, s in sources.items()}
    for path in ("embed/table", "layers/0/mlp/down", "ple/table"):
        mean, std = random_model.leaf_moments(sources[path])
        values = np.asarray(leaves[path])
        assert values.mean() == pytest.approx(mean, abs=std / 20)
        assert values.std() == pytest.approx(std, rel=0.05)


def test_tensors_fused_into_one_leaf_share_their_moments(drawn):
    for source in drawn[0].values():
        assert len({tensor_moments(part.name, part.shape) for part in source.parts}) == 1


def test_a_large_leaf_is_drawn_in_blocks_that_differ(monkeypatch):
    monkeypatch.setattr(random_model, "MAX_BLOCK", 64)
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    draw = random_model._drawer.__wrapped__((64, 16), "float32", sharding)
    rows = np.asarray(draw(jax.random.key(0), np.float32(0), np.float32(1)))
    assert len(np.unique(rows)) == rows.size


def test_status_fields_are_read_in_bytes():
    text = "Name:\tpython\nVmHWM:\t   2048 kB\nRssAnon:\t     16 kB\n"
    assert load_worker.status_bytes("VmHWM", text) == 2048 * 1024
    assert load_worker.status_bytes("RssAnon", text) == 16 * 1024
    assert load_worker.status_bytes("RssFile", text) is None


@pytest.mark.skipif(not load_worker.STATUS.exists(), reason="needs /proc")
def test_the_anonymous_peak_sees_memory_that_is_gone_again():
    with load_worker.AnonymousPeak() as host:
        block = np.ones(200 << 20, np.uint8)
        host._stop.wait(0.2)
        del block
    assert host.peak - host.before > 150 << 20
