"""LLM: generate, chat, stream and score agree; endings, bad input, and interruptions."""

import json

import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models, normalizers

from gemma_jax import LLM, SamplingParams, text_side
from gemma_jax.config import FULL
from gemma_jax.engine_config import EngineConfig
from gemma_jax.errors import (
    CheckpointError,
    ConfigError,
    RequestError,
    UnsupportedError,
)
from gemma_jax.testing.checkpoint import write_checkpoint
from gemma_jax.testing.configs import TINY_CONFIGS

pytestmark = pytest.mark.usefixtures("quick_compilation")

SPECIAL = ["<pad>", "<eos>", "<bos>", "<unk>", "<|turn>", "<turn|>"]
LETTERS = list("▁abcdefghijklmnopqrstuvwxyz\nHé.")
VOCAB = len(SPECIAL) + 256 + len(LETTERS)
A = VOCAB - len(LETTERS) + 1  # the id of "a"
CONTEXT = 64
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


def write_tokenizer(folder):
    """A byte-fallback tokenizer of single letters, built as Gemma's is."""
    names = [*SPECIAL, *(f"<0x{b:02X}>" for b in range(256)), *LETTERS]
    vocab = {token: i for i, token in enumerate(names)}
    backend = tokenizers.Tokenizer(
        models.BPE(vocab, [], byte_fallback=True, unk_token="<unk>", fuse_unk=True)
    )
    backend.normalizer = normalizers.Replace(" ", "▁")
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence(steps)
    backend.add_special_tokens(SPECIAL)
    backend.save(str(folder / "tokenizer.json"))


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A checkpoint of one layer with a tokenizer; its defaults sample with top_k 64."""
    config = TINY_CONFIGS["e2b-tiny"].replace(
        num_hidden_layers=1, layer_types=(FULL,), num_kv_shared_layers=0,
        vocab_size=VOCAB, vocab_size_per_layer_input=VOCAB, sliding_window=24,
        max_position_embeddings=256,
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("llm") / "model"
    write_checkpoint(config, folder, dtype="float32")
    write_tokenizer(folder)
    return folder


def load(model, **settings):
    """One size of everything, so that few programs are compiled."""
    sizes = {"max_model_len": CONTEXT, "page_size": CONTEXT, "max_num_batched_tokens": 64,
             "max_num_seqs": 2, "decode_steps": 8}  # fmt: skip
    return LLM(model, **(sizes | settings))


@pytest.fixture(scope="module")
def llm(model):
    with load(model) as llm:
        yield llm


def one(llm, prompt="hello", params=GREEDY):
    """The only completion of one prompt."""
    (output,) = llm.generate(prompt, params, use_tqdm=False)
    (completion,) = output.outputs
    return completion


# --- generate ----------------------------------------------------------------------------------


def test_every_form_of_a_prompt_gives_the_same_output(llm):
    ids = llm.tokenizer.encode("hello")
    forms = ["hello", {"prompt": "hello"}, ids, {"prompt_token_ids": ids}, np.array(ids)]
    streams = [one(llm, form).token_ids for form in forms]
    assert all(stream == streams[0] for stream in streams)
    assert len(streams[0]) == 12


def test_an_output_has_its_fields(llm):
    (output,) = llm.generate("hello", GREEDY, use_tqdm=False)
    assert output.prompt == "hello"
    assert output.prompt_token_ids == llm.tokenizer.encode("hello")
    assert output.prompt_token_ids[0] == 2
    assert output.prompt_logprobs is None
    assert output.finished
    assert output.error is None
    completion = output.outputs[0]
    assert completion.index == 0
    assert completion.text == llm.tokenizer.decode(completion.token_ids)
    assert completion.logprobs is None
    assert completion.cumulative_logprob is None
    assert (completion.finish_reason, completion.stop_reason) == ("length", None)
    (again,) = llm.generate(output.prompt_token_ids, GREEDY, use_tqdm=False)
    assert again.prompt is None
    assert again.request_id != output.request_id


def test_outputs_keep_the_order_of_the_prompts(llm):
    prompts = ["a", "hello world", "b", "hello", "zebra"]  # batches sort them by length
    outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
    assert [o.prompt for o in outputs] == prompts
    assert [o.outputs[0].token_ids for o in outputs] == [one(llm, p).token_ids for p in prompts]
    assert llm.generate([], GREEDY, use_tqdm=False) == []


def test_params_pair_with_prompts(llm):
    params = [GREEDY.replace(max_tokens=n) for n in (3, 1, 2)]
    outputs = llm.generate(["a", "b", "c"], params, use_tqdm=False)
    assert [len(o.outputs[0].token_ids) for o in outputs] == [3, 1, 2]
    with pytest.raises(RequestError, match="2 entries for 3 prompts"):
        llm.generate(["a", "b", "c"], params[:2], use_tqdm=False)


def test_n_completions_differ_by_seed_and_repeat_with_it(llm):
    params = SamplingParams(n=3, temperature=1.0, seed=11, max_tokens=8, ignore_eos=True)
    (first,) = llm.generate("hello", params, use_tqdm=False)
    (second,) = llm.generate("hello", params, use_tqdm=False)
    streams = [c.token_ids for c in first.outputs]
    assert [c.index for c in first.outputs] == [0, 1, 2]
    assert len({tuple(s) for s in streams}) == 3
    assert streams == [c.token_ids for c in second.outputs]
    assert one(llm, params=params.replace(n=1)).token_ids == streams[0]
    mixed = llm.generate(["zebra", "hello"], params.replace(n=1), use_tqdm=False)
    assert mixed[1].outputs[0].token_ids == streams[0]


def test_requests_without_a_seed_differ_and_follow_the_seed_of_the_engine(model, llm):
    params = SamplingParams(temperature=1.0, max_tokens=8, ignore_eos=True)
    with load(model, seed=5) as a, load(model, seed=5) as b, load(model, seed=6) as c:
        streams = [[one(x, params=params).token_ids for _ in range(2)] for x in (a, b, c)]
    assert streams[0] == streams[1]
    assert streams[0][0] != streams[0][1]
    assert streams[0][0] != streams[2][0]


def test_unset_params_are_those_of_the_generation_config(llm):
    defaults = llm.generation_defaults.sampling_params()
    assert (defaults.temperature, defaults.top_k, defaults.top_p) == (1.0, 64, 0.95)
    (output,) = llm.generate("hello", use_tqdm=False)
    assert len(output.outputs[0].token_ids) <= 16


# --- stream, score, chat -----------------------------------------------------------------------


def test_a_stream_joins_to_what_generate_gives(llm):
    whole = one(llm)
    chunks = list(llm.stream("hello", GREEDY))
    assert "".join(c.text for c in chunks) == whole.text
    assert [t for c in chunks for t in c.token_ids] == whole.token_ids
    assert [c.finish_reason for c in chunks] == [None] * (len(chunks) - 1) + ["length"]
    assert len(chunks) > 1


def test_score_agrees_with_the_logprobs_of_generate_and_of_the_prompt(llm):
    params = GREEDY.replace(logprobs=5, prompt_logprobs=5)
    (output,) = llm.generate("hello", params, use_tqdm=False)
    completion = output.outputs[0]
    ids = output.prompt_token_ids + completion.token_ids
    scored = llm.score(ids, logprobs=5)
    assert scored[0] is None
    assert len(scored) == len(ids)
    reported = [*output.prompt_logprobs, *completion.logprobs]
    for token, a, b in zip(ids[1:], scored[1:], reported[1:], strict=True):
        assert token in a
        assert list(a) == list(b)
        np.testing.assert_allclose(
            [x.logprob for x in a.values()], [x.logprob for x in b.values()], atol=2e-4
        )
        assert [x.rank for x in list(a.values())[:5]] == [1, 2, 3, 4, 5]
    best = [next(iter(position)) for position in completion.logprobs]
    assert best == completion.token_ids
    total = sum(
        p[t].logprob for p, t in zip(completion.logprobs, completion.token_ids, strict=True)
    )
    assert completion.cumulative_logprob == pytest.approx(total)
    assert completion.logprobs[0][best[0]].decoded_token == llm.tokenizer.id_to_token(best[0])


def test_the_sampled_token_is_reported_beside_the_best_ones(llm):
    params = SamplingParams(temperature=3.0, seed=1, max_tokens=12, logprobs=1, ignore_eos=True)
    completion = one(llm, params=params)
    sizes = {len(position) for position in completion.logprobs}
    assert sizes <= {1, 2}
    assert 2 in sizes
    for position, token in zip(completion.logprobs, completion.token_ids, strict=True):
        (best, first), *rest = position.items()
        assert first.rank == 1
        assert (token == best) or (rest[0][0] == token and rest[0][1].rank > 1)


def test_chat_is_generate_on_the_rendered_turns(llm):
    messages = [{"role": "user", "content": "hi"}]
    text = "<bos><|turn>user\nhi<turn|>\n<|turn>model\n"
    (output,) = llm.chat(messages, GREEDY, use_tqdm=False)
    assert output.prompt == text
    assert output.prompt_token_ids.count(2) == 1
    assert output.outputs[0].token_ids == one(llm, text).token_ids
    several = llm.chat([messages, messages], GREEDY, use_tqdm=False)
    assert [o.outputs[0].token_ids for o in several] == [output.outputs[0].token_ids] * 2
    streamed = [t for c in llm.stream_chat(messages, GREEDY) for t in c.token_ids]
    assert streamed == output.outputs[0].token_ids


# --- endings -----------------------------------------------------------------------------------

LETTER_BIAS = {A: 100.0, A + 1: 100.0}  # only "a" and "b" can be drawn


def letters(**changes):
    base = {"temperature": 1.0, "seed": 3, "max_tokens": 24, "logit_bias": LETTER_BIAS}
    return SamplingParams(**(base | changes))


def test_a_stop_string_over_several_tokens_ends_the_text_before_it(llm):
    free = one(llm, params=letters())
    assert set(free.text) == {"a", "b"}
    stop = free.text[9:13]
    at = free.text.index(stop)
    stopped = one(llm, params=letters(stop=["zz", stop]))
    assert stopped.text == free.text[:at]
    assert stopped.token_ids == free.token_ids[: at + 4]
    assert (stopped.finish_reason, stopped.stop_reason) == ("stop", stop)
    kept = one(llm, params=letters(stop=stop, include_stop_str_in_output=True))
    assert kept.text == free.text[: at + 4]
    streamed = list(llm.stream("hello", letters(stop=stop)))
    assert "".join(c.text for c in streamed) == stopped.text
    assert streamed[-1].stop_reason == stop


def test_a_stop_string_of_one_row_leaves_the_others_running(llm):
    free = one(llm, params=letters())
    params = [letters(stop=free.text[4:8]), letters()]
    stopped, other = llm.generate(["hello"] * 2, params, use_tqdm=False)
    assert stopped.outputs[0].finish_reason == "stop"
    assert other.outputs[0].token_ids == free.token_ids


def test_a_stop_id_is_reported_and_eos_is_not(llm):
    free = one(llm)
    stop = free.token_ids[6]
    at = free.token_ids.index(stop) + 1
    hit = one(llm, params=GREEDY.replace(stop_token_ids=(stop,)))
    assert hit.token_ids == free.token_ids[:at]
    assert (hit.finish_reason, hit.stop_reason) == ("stop", stop)
    late = one(llm, params=GREEDY.replace(stop_token_ids=(stop,), min_tokens=at + 1))
    assert len(late.token_ids) > at
    assert stop not in late.token_ids[:at]
    ended = letters(stop_token_ids=[A], logit_bias={A: 100.0})
    assert one(llm, params=ended).text == ""
    assert one(llm, params=ended.replace(include_stop_str_in_output=True)).text == "a"
    eos = one(llm, params=letters(logit_bias={1: 100.0}))
    assert (eos.token_ids, eos.finish_reason, eos.stop_reason) == ([1], "stop", None)
    assert eos.text == ""
    held = one(llm, params=letters(logit_bias={1: 100.0}, min_tokens=3))
    assert len(held.token_ids) >= 4 or held.token_ids[-1] == 1
    assert 1 not in held.token_ids[:3]
    ignored = one(llm, params=letters(logit_bias={1: 100.0}, ignore_eos=True, max_tokens=5))
    assert (ignored.token_ids, ignored.finish_reason) == ([1] * 5, "length")


def test_min_tokens_holds_back_stop_strings(llm):
    free = one(llm, params=letters())
    first = free.text[0]
    assert one(llm, params=letters(stop=first)).token_ids == free.token_ids[:1]
    held = one(llm, params=letters(stop=first, min_tokens=5))
    assert len(held.token_ids) >= 5
    assert held.finish_reason == "stop"


def test_the_context_limit_ends_a_completion_by_length(llm):
    prompt = llm.tokenizer.encode("hello " * 9)
    completion = one(llm, prompt, GREEDY.replace(max_tokens=None))
    assert len(completion.token_ids) == CONTEXT - len(prompt)
    assert completion.finish_reason == "length"
    capped = one(llm, prompt, GREEDY.replace(max_tokens=500))
    assert capped.token_ids == completion.token_ids


def test_suppressed_tokens_are_never_generated(model, tmp_path):
    with load(model) as llm:
        best = one(llm).token_ids[0]
    for file in model.iterdir():
        (tmp_path / file.name).symlink_to(file)
    config = json.loads((model / "generation_config.json").read_text())
    (tmp_path / "generation_config.json").unlink()
    config |= {"suppress_tokens": [best], "eos_token_id": [1, 5]}
    (tmp_path / "generation_config.json").write_text(json.dumps(config))
    with load(tmp_path) as llm:
        assert best not in one(llm).token_ids
        turn_end = one(llm, params=letters(logit_bias={5: 100.0}))
        assert (turn_end.token_ids, turn_end.finish_reason) == ([5], "stop")


def test_detokenize_off_gives_ids_only(llm):
    completion = one(llm, params=GREEDY.replace(detokenize=False))
    assert completion.text == ""
    assert completion.token_ids == one(llm).token_ids


# --- bad prompts -------------------------------------------------------------------------------

BAD_PROMPTS = {
    "empty text": ("", "prompt='': is empty"),
    "no ids": ({"prompt_token_ids": []}, "is empty"),
    "outside the vocabulary": ([2, VOCAB], rf"\[1\]={VOCAB}.*\[0, {VOCAB}\)"),
    "negative id": ({"prompt_token_ids": [-1]}, r"\[0\]=-1"),
    "id that is no integer": ({"prompt_token_ids": [2, 1.5]}, r"\[1\]=1\.5: expected an integer"),
    "longer than the context": ([2] * CONTEXT, f"{CONTEXT} tokens leave no room.*max_model_len"),
    "unknown field": ({"prompt": "a", "priority": 1}, "priority"),
    "text and ids": ({"prompt": "a", "prompt_token_ids": [2]}, "exactly one of"),
    "text of another type": ({"prompt": 5}, "expected text"),
    "text as ids": ({"prompt_token_ids": "2 5"}, "expected token ids"),
    "another type": (5, "expected text or token ids, got int"),
}


@pytest.mark.parametrize("name", BAD_PROMPTS)
def test_a_bad_prompt_raises_alone_and_is_an_error_row_in_a_list(llm, name):
    prompt, message = BAD_PROMPTS[name]
    with pytest.raises(RequestError, match=message):
        llm.generate(prompt, GREEDY, use_tqdm=False)
    good, bad, other = llm.generate(["hello", prompt, "zebra"], GREEDY, use_tqdm=False)
    assert good.outputs[0].token_ids == one(llm).token_ids
    assert len(other.outputs[0].token_ids) == 12
    with pytest.raises(RequestError, match=message):
        raise RequestError(bad.error)
    assert (bad.outputs, bad.finished) == ([], True)


@pytest.mark.parametrize("key", ["image", "images", "audio", "video", "multi_modal_data"])
def test_media_are_refused(llm, key):
    with pytest.raises(UnsupportedError, match=f"{key}.*only text"):
        llm.generate({"prompt": "a", key: b"x"}, GREEDY, use_tqdm=False)


@pytest.mark.parametrize("kind", ["image", "audio"])
def test_media_parts_of_a_message_are_refused(llm, kind):
    parts = [{"type": kind, kind: "x.png"}, {"type": "text", "text": "what is it?"}]
    with pytest.raises((UnsupportedError, RequestError), match=kind):
        llm.chat([{"role": "user", "content": parts}], GREEDY, use_tqdm=False)


def test_one_bad_conversation_does_not_lose_the_others(llm):
    good = [{"role": "user", "content": "hi"}]
    outputs = llm.chat([good, [{"role": "wizard", "content": "hi"}]], GREEDY, use_tqdm=False)
    assert outputs[0].outputs[0].token_ids
    assert "wizard" in outputs[1].error


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"temperature": float("nan")}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"n": 2, "temperature": 0.0}, "n is 2 with temperature 0"),
    ],
)
def test_bad_sampling_params_raise_when_built(params, message):
    with pytest.raises(RequestError, match=message):
        SamplingParams(**params)


def test_ids_of_params_outside_the_vocabulary_are_refused(llm):
    for params in ({"logit_bias": {VOCAB: 1.0}}, {"stop_token_ids": [VOCAB]}):
        with pytest.raises(RequestError, match=str(VOCAB)):
            llm.generate("a", SamplingParams(**params), use_tqdm=False)


def test_more_ids_than_the_programs_take_are_an_error_of_that_request_only(llm, monkeypatch):
    monkeypatch.setattr(text_side, "ID_LIST_BUCKETS", (4, 8))
    many = GREEDY.replace(logit_bias=dict.fromkeys(range(9), 1.0))
    good, bad = llm.generate(["hello", "hello"], [GREEDY, many], use_tqdm=False)
    assert good.outputs[0].token_ids == one(llm).token_ids
    assert "logit_bias (with suppressed ids): 9 ids; at most 8" in bad.error


def test_logprobs_of_one_request_are_not_reported_for_its_neighbour(llm):
    params = [GREEDY.replace(logprobs=1), GREEDY]
    asked, silent = (o.outputs[0] for o in llm.generate(["a", "b"], params, use_tqdm=False))
    assert asked.cumulative_logprob is not None
    assert (silent.cumulative_logprob, silent.logprobs) == (None, None)


def test_a_stream_has_one_completion_and_checks_its_prompt_at_the_call(llm):
    with pytest.raises(RequestError, match="n=2"):
        llm.stream("a", SamplingParams(n=2))
    with pytest.raises(RequestError, match="is empty"):
        llm.stream("")


def test_score_checks_its_ids(llm):
    for ids, message in (([], "empty"), ([VOCAB], str(VOCAB)), ([2] * 65, "65 tokens")):
        with pytest.raises(RequestError, match=message):
            llm.score(ids)
    with pytest.raises(RequestError, match="logprobs=21"):
        llm.score([2, 3], logprobs=21)
    assert llm.score([2]) == [None]


# --- life --------------------------------------------------------------------------------------


def test_ctrl_c_in_the_middle_leaves_the_model_usable(llm, monkeypatch):
    expected = one(llm).token_ids
    decode = llm.runner.decode

    def interrupted(*args, **options):
        decode(*args, **options)  # the donated cache is gone, as in a real interruption
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(llm.runner, "decode", interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.generate(["hello", "a"], GREEDY, use_tqdm=False)
    assert one(llm).token_ids == expected


def test_an_abandoned_stream_leaves_the_model_usable(llm):
    expected = one(llm).token_ids
    stream = llm.stream("hello", GREEDY)
    next(stream)
    stream.close()
    assert one(llm).token_ids == expected


def test_a_closed_model_says_so(model):
    with load(model) as llm:
        pass
    with pytest.raises(RuntimeError, match="closed"):
        llm.generate("a", GREEDY, use_tqdm=False)
    llm.close()


def test_without_a_tokenizer_ids_work_and_text_says_what_to_do(model, tmp_path, llm):
    for file in model.iterdir():
        if file.name != "tokenizer.json":
            (tmp_path / file.name).symlink_to(file)
    ids = llm.tokenizer.encode("hello")
    with load(tmp_path) as bare:
        completion = one(bare, ids)
        assert completion.token_ids == one(llm).token_ids
        assert completion.text == ""
        for call in (
            lambda: bare.generate("hello", GREEDY, use_tqdm=False),
            lambda: bare.generate(ids, SamplingParams(stop="a"), use_tqdm=False),
            lambda: bare.chat([{"role": "user", "content": "hi"}], GREEDY, use_tqdm=False),
        ):
            with pytest.raises(RequestError, match=r"needs a tokenizer.*tokenizer\.json"):
                call()
    with load(tmp_path, tokenizer=model) as given:
        assert one(given).text == one(llm).text


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"dtype": "float16"}, UnsupportedError, "float16.*bfloat16"),
        ({"dtype": "int8"}, ConfigError, "dtype='int8'"),
        ({"tensor_parallel_size": 2}, UnsupportedError, "tensor_parallel_size=2"),
        ({"kernels": "mosaic"}, ConfigError, "kernels='mosaic'.*'auto', 'reference', 'pallas'"),
        ({"kernels": {"gemm": "xla"}}, ConfigError, "unknown op 'gemm'.*prefill_attention"),
        ({"kernels": "auto,gelu_mul"}, ConfigError, "op=implementation.*'gelu_mul'"),
        ({"kernels": "gelu_mul=fast"}, ConfigError, "gelu_mul='fast'.*'triton'"),
        ({"kernels": 3}, ConfigError, "kernels=3: expected text or a mapping"),
        ({"rounding": "torch"}, ConfigError, "rounding='torch'.*hf, vllm"),
        ({"fast_prefill": 1}, ConfigError, "fast_prefill=1"),
        ({"batch_invariant": "yes"}, ConfigError, "batch_invariant='yes'"),
        (
            {"batch_invariant": True, "rounding": "vllm"},
            UnsupportedError,
            "batch_invariant=True.*rounding='hf'",
        ),
        (
            {"batch_invariant": True, "kernels": "gelu_mul=triton"},
            ConfigError,
            "gelu_mul=triton.*batch_invariant=True.*use 'auto'",
        ),
        ({"max_model_len": 257}, ConfigError, "max_model_len=257.*256"),
        ({"max_model_len": 0}, ConfigError, "max_model_len=0"),
        ({"max_num_seqs": 0}, ConfigError, "max_num_seqs=0"),
        ({"max_num_batched_tokens": 3}, ConfigError, "max_num_batched_tokens=3"),
        ({"page_size": 33}, ConfigError, "page_size=33.*multiple of 32"),
        ({"gpu_memory_utilization": 1.5}, ConfigError, "gpu_memory_utilization=1.5"),
        ({"seed": -1}, ConfigError, "seed=-1"),
        ({"lora_path": "x"}, UnsupportedError, "LoRA.*merge"),
        ({"max_sequences": 4}, TypeError, "max_sequences.*allowed: .*max_num_seqs"),
    ],
)
def test_a_bad_setting_raises_naming_it_and_what_is_allowed(model, settings, error, message):
    with pytest.raises(error, match=message):
        LLM(model, **settings)


def test_a_missing_model_raises(tmp_path):
    with pytest.raises(CheckpointError, match="no such file or directory"):
        LLM(str(tmp_path / "nothing"))
    with pytest.raises((CheckpointError, ConfigError), match=r"config\.json"):
        LLM(tmp_path)


def test_experts_are_not_promised_to_be_batch_invariant():
    engine = EngineConfig(batch_invariant=True)
    assert engine.numerics(TINY_CONFIGS["e2b-tiny"]).batch_invariant
    with pytest.raises(UnsupportedError, match="batch_invariant=True: experts"):
        engine.numerics(TINY_CONFIGS["26b-a4b-tiny"])


def test_a_float16_checkpoint_needs_a_dtype(model, tmp_path):
    for file in model.iterdir():
        if file.name != "config.json":
            (tmp_path / file.name).symlink_to(file)
    config = json.loads((model / "config.json").read_text()) | {"dtype": "float16"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedError, match=r"float16.*'bfloat16' or 'float32'"):
        load(tmp_path)


def test_a_tokenizer_of_another_model_is_refused(model, tmp_path):
    names = [*SPECIAL, *(f"<0x{b:02X}>" for b in range(256)), *(f"w{i}" for i in range(100))]
    backend = tokenizers.Tokenizer(models.BPE({t: i for i, t in enumerate(names)}, []))
    backend.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ConfigError, match=f"{len(names)} tokens.*{VOCAB}"):
        load(model, tokenizer=tmp_path)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda llm: llm.generate([3], {"temperature": 1}), "sampling_params="),
        (lambda llm: llm.generate([[3], [4]], [SamplingParams(), None]), r"sampling_params\[1\]"),
        (lambda llm: llm.stream([3], {"temperature": 1}), "sampling_params="),
        (lambda llm: llm.stream([3], SamplingParams(prompt_logprobs=1)), "prompt_logprobs"),
        (lambda llm: llm.chat({"role": "user", "content": "a"}), "messages="),
        (lambda llm: llm.chat("hi"), "messages='hi'"),
        (lambda llm: llm.score([3, 4], 1.5), "logprobs=1.5"),
        (lambda llm: llm.score([3, 4], "x"), "logprobs='x'"),
    ],
)
def test_arguments_of_a_wrong_type_are_named(llm, call, message):
    with pytest.raises(RequestError, match=message):
        call(llm)


def test_a_stream_carries_the_logprobs_that_generate_gives(llm):
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=2)
    (output,) = llm.generate([3, 4, 5], params, use_tqdm=False)
    streamed = [x for chunk in llm.stream([3, 4, 5], params) for x in chunk.logprobs or []]
    assert streamed == output.outputs[0].logprobs


def test_generation_config_ids_outside_the_vocabulary_are_refused(tmp_path):
    folder = tmp_path / "model"
    write_checkpoint(TINY_CONFIGS["e2b-tiny"], folder, 0, "float32")
    (folder / "generation_config.json").write_text('{"eos_token_id": 99999999}')
    with pytest.raises(ConfigError, match="eos_token_id has 99999999"):
        LLM(folder)
