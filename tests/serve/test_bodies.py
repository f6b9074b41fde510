"""Request bodies: what they become, and which field an error names."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gemma_jax.errors import GemmaError, RequestError, UnsupportedError
from gemma_jax.generation_config import GenerationDefaults
from gemma_jax.serve.bodies import chat_request, completion_request, field_of

HELLO = {"messages": [{"role": "user", "content": "Hello"}]}
DEFAULTS = GenerationDefaults(do_sample=True, temperature=0.7, top_k=64, top_p=0.95)
TOOL = {"type": "function", "function": {"name": "f"}}


def test_a_plain_chat_takes_the_defaults_of_the_checkpoint_and_all_the_context():
    request = chat_request(HELLO, DEFAULTS)
    params = request.params
    assert (params.temperature, params.top_k, params.top_p) == (0.7, 64, 0.95)
    assert params.max_tokens is None
    assert params.logprobs is None
    assert (request.tools, request.thinking, request.stream) == ([], False, False)


def test_special_tokens_stay_in_the_text_of_a_chat_for_the_parser():
    assert not chat_request(HELLO).params.skip_special_tokens
    assert chat_request(HELLO).hide_special_tokens
    assert not chat_request(HELLO | {"skip_special_tokens": False}).hide_special_tokens


def test_a_plain_completion_has_16_tokens():
    request = completion_request({"prompt": "Once"}, DEFAULTS)
    assert request.prompts == ["Once"]
    assert request.params.max_tokens == 16
    assert request.params.skip_special_tokens


def test_fields_of_a_chat_reach_its_parameters():
    body = HELLO | {
        "model": "m", "max_completion_tokens": 7, "n": 2, "stop": "end", "seed": 3, "top_k": 5,
        "temperature": 1, "min_p": 0.1, "logprobs": True, "top_logprobs": 4, "logit_bias": {"9": 1},
        "stream": True, "stream_options": {"include_usage": True}, "user": "u", "top_p": None,
    }  # fmt: skip
    request = chat_request(body, DEFAULTS)
    params = request.params
    assert (request.model, request.stream, request.include_usage) == ("m", True, True)
    assert (params.max_tokens, params.n, params.seed, params.top_k) == (7, 2, 3, 5)
    assert (params.temperature, params.top_p, params.min_p) == (1.0, 0.95, 0.1)
    assert (params.stop, params.logit_bias, params.logprobs) == (("end",), {9: 1.0}, 4)


def test_an_echo_with_logprobs_asks_for_those_of_the_prompt():
    request = completion_request({"prompt": "a", "echo": True, "logprobs": 2, "max_tokens": 1})
    assert (request.params.logprobs, request.params.prompt_logprobs) == (2, 2)
    assert (request.prompt_only, request.prompt_logprobs) == (False, False)
    request = completion_request({"prompt": "a", "echo": True, "max_tokens": 0})
    assert (request.prompt_only, request.params.prompt_logprobs) == (True, None)
    request = completion_request({"prompt": "a", "prompt_logprobs": 3})
    assert (request.params.prompt_logprobs, request.prompt_logprobs) == (3, True)
    assert chat_request(HELLO | {"prompt_logprobs": 0}).params.prompt_logprobs == 0


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("a", ["a"]),
        (["a", "b"], ["a", "b"]),
        ([2, 5], [[2, 5]]),
        ([[2, 5], [7]], [[2, 5], [7]]),
        (["a", [7]], ["a", [7]]),
    ],
)
def test_every_form_of_prompt_is_read(prompt, prompts):
    assert completion_request({"prompt": prompt}).prompts == prompts


@pytest.mark.parametrize(
    ("fields", "thinking"),
    [
        ({}, False),
        ({"reasoning_effort": "none"}, False),
        ({"reasoning_effort": "low"}, True),
        ({"chat_template_kwargs": {"enable_thinking": True}}, True),
        ({"chat_template_kwargs": {"enable_thinking": False}, "reasoning_effort": "high"}, False),
    ],
)
def test_thinking_is_asked_for_in_either_way(fields, thinking):
    assert chat_request(HELLO | fields).thinking is thinking


def test_tools_are_offered_unless_the_choice_is_none():
    assert chat_request(HELLO | {"tools": [TOOL]}).tools == [TOOL]
    assert chat_request(HELLO | {"tools": [TOOL], "tool_choice": "none"}).tools == []


def test_a_response_format_becomes_a_grammar():
    assert chat_request(HELLO | {"response_format": {"type": "text"}}).grammar is None
    assert "lark" in chat_request(HELLO | {"response_format": {"type": "json_object"}}).grammar


@pytest.mark.parametrize(
    ("fields", "error", "param"),
    [
        ({"messages": None}, RequestError, "messages"),
        ({"messages": "hi"}, RequestError, "messages"),
        ({"model": 5}, RequestError, "model"),
        ({"n": 10**6}, RequestError, "n"),
        ({"n": 0}, RequestError, "n"),
        ({"temperature": "hot"}, RequestError, "temperature"),
        ({"temperature": -1}, RequestError, "temperature"),
        ({"top_p": 2}, RequestError, "top_p"),
        ({"max_tokens": 1.5}, RequestError, "max_tokens"),
        ({"max_completion_tokens": 0}, RequestError, "max_completion_tokens"),
        ({"max_completion_tokens": 3, "max_tokens": 4}, RequestError, "max_completion_tokens"),
        ({"stop": ["x"] * 65}, RequestError, "stop"),
        ({"stop": [1]}, RequestError, "stop"),
        ({"seed": 2**64}, RequestError, "seed"),
        ({"logit_bias": {"a": 1}}, RequestError, "logit_bias"),
        ({"logprobs": 3}, RequestError, "logprobs"),
        ({"top_logprobs": 3}, RequestError, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, RequestError, "top_logprobs"),
        ({"stream": "yes"}, RequestError, "stream"),
        ({"stream_options": {"include_usage": True}}, RequestError, "stream_options"),
        ({"stream": True, "stream_options": {"x": True}}, RequestError, "stream_options"),
        ({"tools": {}}, RequestError, "tools"),
        ({"tool_choice": "auto"}, RequestError, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": "required"}, UnsupportedError, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": TOOL}, UnsupportedError, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": "maybe"}, RequestError, "tool_choice"),
        ({"reasoning_effort": "huge"}, RequestError, "reasoning_effort"),
        ({"chat_template_kwargs": {"x": 1}}, UnsupportedError, "chat_template_kwargs"),
        (
            {"chat_template_kwargs": {"enable_thinking": 1}},
            RequestError,
            "chat_template_kwargs",
        ),
        ({"response_format": {"type": "xml"}}, UnsupportedError, "response_format"),
        ({"parallel_tool_calls": False}, UnsupportedError, "parallel_tool_calls"),
        ({"audio": {}}, UnsupportedError, "audio"),
        ({"functions": [TOOL]}, UnsupportedError, "functions"),
        ({"prompt": "x"}, RequestError, "prompt"),
        ({"temprature": 1}, RequestError, "temprature"),
    ],
)
def test_a_bad_chat_field_is_refused_by_name(fields, error, param):
    with pytest.raises(error) as raised:
        chat_request(HELLO | fields)
    assert field_of(raised.value) == param


@pytest.mark.parametrize(
    ("fields", "error", "param"),
    [
        ({"prompt": None}, RequestError, "prompt"),
        ({"prompt": ""}, RequestError, "prompt"),
        ({"prompt": []}, RequestError, "prompt"),
        ({"prompt": [[]]}, RequestError, "prompt"),
        ({"prompt": [1, "a"]}, RequestError, "prompt"),
        ({"prompt": ["a", 1]}, RequestError, "prompt"),
        ({"prompt": {"a": 1}}, RequestError, "prompt"),
        ({"prompt": [True]}, RequestError, "prompt"),
        ({"suffix": "end"}, UnsupportedError, "suffix"),
        ({"best_of": 2}, UnsupportedError, "best_of"),
        ({"echo": True, "logprobs": 1, "prompt_logprobs": 2}, RequestError, "prompt_logprobs"),
        ({"stream": True, "prompt_logprobs": 1}, RequestError, "prompt_logprobs"),
        ({"prompt_logprobs": 21}, RequestError, "prompt_logprobs"),
        ({"max_tokens": 0}, RequestError, "max_tokens"),
        ({"max_tokens": False, "echo": True}, RequestError, "max_tokens"),
        ({"max_tokens": 0, "min_tokens": 1, "echo": True}, RequestError, "min_tokens"),
        ({"logprobs": True}, RequestError, "logprobs"),
        ({"messages": []}, RequestError, "messages"),
    ],
)
def test_a_bad_completion_field_is_refused_by_name(fields, error, param):
    with pytest.raises(error) as raised:
        completion_request({"prompt": "a"} | fields)
    assert field_of(raised.value) == param


@pytest.mark.parametrize("body", [[], "x", 5, True, None])
def test_a_body_that_is_no_object_is_refused(body):
    with pytest.raises(RequestError, match="body is a JSON"):
        chat_request(body)


def test_unsupported_fields_may_ask_for_nothing():
    neutral = {"best_of": 1, "suffix": "", "echo": False, "use_beam_search": False}
    completion_request({"prompt": "a"} | neutral)
    chat_request(HELLO | {"parallel_tool_calls": True, "modalities": ["text"], "audio": None})


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=5,
)
NAMES = st.sampled_from(
    "model messages prompt n temperature top_p top_k min_p seed stop stop_token_ids ignore_eos "
    "max_tokens max_completion_tokens min_tokens presence_penalty logit_bias logprobs top_logprobs "
    "prompt_logprobs "
    "stream stream_options tools tool_choice response_format chat_template_kwargs echo suffix "
    "reasoning_effort best_of user x".split()
)


def refusal(read, body):
    try:
        read(body)
    except GemmaError as error:
        return error
    return None


@settings(max_examples=100, deadline=None)
@given(st.dictionaries(NAMES, JSON, max_size=4))
def test_any_refusal_names_a_field_of_the_body(fields):
    for read, body in (
        (chat_request, HELLO | fields),
        (completion_request, {"prompt": "a"} | fields),
    ):
        error = refusal(read, body)
        assert error is None or field_of(error) in body
