"""`gemma-jax serve`: its flags, its YAML file, and the real engine behind it."""

import json
import sys
from types import SimpleNamespace

import fake_engine
import httpx
import pytest
import server_process

from gemma_jax import cli
from gemma_jax.cli import serve as command
from gemma_jax.engine_config import EngineConfig
from gemma_jax.errors import ConfigError
from gemma_jax.serve.load import warm_up
from gemma_jax.text_side import TextSide


@pytest.fixture
def started(monkeypatch):
    """What the command would start: a list that it fills."""
    from gemma_jax.serve import launch

    calls = []
    monkeypatch.setattr(launch, "serve_model", lambda *args, **named: calls.append((*args, named)))
    return calls


def test_the_defaults_are_those_of_the_config(started):
    assert cli.main(["serve"]) == 0
    ((config, settings, named),) = started
    assert (config.host, config.port, config.api_keys) == ("127.0.0.1", 8000, ())
    assert config.model_names == ("nano",)
    assert settings["model"] == "nano"
    assert named == {"warm": True}


def test_flags_reach_the_server_and_the_engine(started):
    argv = ["serve", "some/model", "--port", "0", "--api-key", "a", "--api-key", "b",
            "--served-model-name", "gemma", "--max-model-len", "512", "--max-queue", "7",
            "--request-timeout", "2.5", "--seed", "3", "--no-warm-up"]  # fmt: skip
    assert cli.main(argv) == 0
    ((config, settings, named),) = started
    assert (config.port, config.api_keys, config.max_queue) == (0, ("a", "b"), 7)
    assert (config.model, config.model_names) == ("some/model", ("gemma",))
    assert config.request_timeout == 2.5
    assert settings["model"] == "some/model"
    assert (settings["max_model_len"], settings["seed"]) == (512, 3)
    assert named == {"warm": False}


def test_a_yaml_file_gives_flags_and_the_command_line_wins(started, tmp_path):
    file = tmp_path / "serve.yaml"
    file.write_text("port: 9000\nmax_queue: 5\napi-key: [a, b]\nno-fast-prefill: true\n")
    assert cli.main(["serve", "--config", str(file), "--max-queue", "6"]) == 0
    ((config, settings, _),) = started
    assert (config.port, config.max_queue, config.api_keys) == (9000, 6, ("a", "b"))
    assert settings["fast_prefill"] is False


@pytest.mark.parametrize(
    ("text", "message"),
    [("prt: 1", "'prt' is not a flag"), ("- 1", "expected a mapping"), ("a: [", "read as YAML")],
)
def test_a_bad_yaml_file_is_refused(text, message, tmp_path):
    file = tmp_path / "serve.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=message):
        command.main(["--config", str(file)])


@pytest.mark.parametrize(
    ("flag", "value"),
    [("--port", "70000"), ("--max-queue", "-1"), ("--max-body-bytes", "0"),
     ("--request-timeout", "0"), ("--drain-timeout", "nan"), ("--api-key", "")],
)  # fmt: skip
def test_a_value_out_of_range_is_refused_by_its_name(flag, value, capsys):
    assert cli.main(["serve", f"{flag}={value}"]) == 2
    assert flag[2:].replace("-", "_") in capsys.readouterr().err


def test_the_key_may_come_from_the_environment(started, monkeypatch):
    monkeypatch.setenv("GEMMA_JAX_API_KEY", "from the environment")
    assert cli.main(["serve"]) == 0
    assert cli.main(["serve", "--api-key", "given"]) == 0
    assert [call[0].api_keys for call in started] == [("from the environment",), ("given",)]


def test_a_model_that_is_not_there_is_said_at_once(capsys):
    assert cli.main(["serve", "no/such/model/here"]) == 2
    assert "no such file or directory" in capsys.readouterr().err


def test_warm_up_runs_one_request_and_then_as_many_as_fit_sampled_and_greedy():
    text_side = TextSide.load("nano")
    engine = fake_engine.FakeEngine(max_num_seqs=3, seconds_per_step=0)
    llm = SimpleNamespace(
        engine=engine, max_num_seqs=3, generation_defaults=text_side.defaults,
        engine_config=SimpleNamespace(decode_steps=8), make_request=text_side.make_request,
    )  # fmt: skip
    warm_up(llm)
    assert not engine.has_work
    assert engine.stats().generated_tokens == 2 * (1 + 3) * 16


def test_a_gpu_compiles_every_number_of_rows_and_every_length_of_a_chunk(monkeypatch):
    text_side = TextSide.load("nano")
    compiled = []
    engine = SimpleNamespace(has_work=False, add=lambda r: None, compile_for=compiled.extend)
    llm = SimpleNamespace(
        engine=engine, max_num_seqs=20, max_model_len=256, make_request=text_side.make_request,
        generation_defaults=text_side.defaults,
        engine_config=EngineConfig(mixed_batched_tokens=4096, decode_steps=8),
    )  # fmt: skip
    monkeypatch.setattr("jax.default_backend", lambda: "gpu")
    warm_up(llm)
    sizes = [(len(batch), len(batch[0].prompt_token_ids)) for batch in compiled]
    once = [(1, 1), (4, 1), (16, 1), (20, 1), (1, 32), (1, 64), (1, 128)]
    assert sizes == [*once, *once]  # 256 tokens leave no room for an answer
    firsts = [batch[0].prompt_token_ids[0] for batch in compiled]
    assert len(set(firsts)) == len(firsts)  # a prefix known to the cache would shorten the chunk
    assert [batch[0].params.temperature == 0 for batch in compiled] == [False] * 7 + [True] * 7


# --- with the real engine ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def real_server(tiny_model):
    flags = ["--port=0", "--max-num-seqs=2", "--max-model-len=256", "--served-model-name=tiny",
             "--no-warm-up"]  # fmt: skip
    command = [sys.executable, "-m", "gemma_jax.cli", "serve", tiny_model, *flags]
    with server_process.ServerProcess(command) as server:
        yield server


@pytest.mark.slow
def test_the_server_gives_the_tokens_of_llm(real_server, tiny_model):
    from gemma_jax import LLM, SamplingParams

    prompts = ["Once upon a time", "The fox", "a"]
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    with LLM(tiny_model, max_num_seqs=2, max_model_len=256) as llm:
        expected = [o.outputs[0].text for o in llm.generate(prompts, params, use_tqdm=False)]
    body = {"prompt": prompts, "temperature": 0, "max_tokens": 40, "ignore_eos": True}
    answer = httpx.post(real_server.url + "/v1/completions", json=body, timeout=120).json()
    assert [choice["text"] for choice in answer["choices"]] == expected


@pytest.mark.slow
def test_a_json_object_is_one(real_server):
    schema = {
        "type": "object",
        "properties": {"tame": {"type": "boolean"}, "kind": {"enum": ["fox", "owl"]}},
        "required": ["tame", "kind"],
        "additionalProperties": False,
    }
    body = {
        "messages": [{"role": "user", "content": "hi"}],
        "max_tokens": 100,
        "temperature": 0,
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}},
    }
    answer = httpx.post(real_server.url + "/v1/chat/completions", json=body, timeout=120).json()
    (choice,) = answer["choices"]
    assert choice["finish_reason"] == "stop"
    value = json.loads(choice["message"]["content"])
    assert value["kind"] in ("fox", "owl")
    assert isinstance(value["tame"], bool)


@pytest.mark.slow
def test_a_client_that_vanishes_frees_the_real_engine(real_server):
    body = {"prompt": ["a", "b"], "max_tokens": 250, "temperature": 0, "ignore_eos": True}
    body |= {"stream": True}
    url = real_server.url + "/v1/completions"
    with httpx.stream("POST", url, json=body, timeout=120) as stream:
        assert next(stream.iter_lines()).startswith("data: ")

    def is_idle():
        lines = httpx.get(real_server.url + "/metrics").text.splitlines()
        return {
            'gemma_jax:num_requests_running{model_name="tiny"} 0.0',
            'gemma_jax:kv_cache_usage_perc{model_name="tiny"} 0.0',
        } <= set(lines)

    server_process.wait_for(is_idle, seconds=20)
    assert real_server.terminate() == 0
