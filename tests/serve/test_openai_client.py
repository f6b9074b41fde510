"""The official OpenAI client, unchanged, against a live server with a scripted engine."""

import asyncio
import itertools
import json
import runpy
from pathlib import Path

import httpx
import openai
import pytest
from server_process import KEY

STORY = "Once upon a time there was a little fox."
USER = [{"role": "user", "content": "tell me"}]


def ask(word):
    return [{"role": "user", "content": word}]


# --- completions ---------------------------------------------------------------------------------


def test_a_completion_has_text_finish_reason_and_usage(client):
    answer = client.completions.create(model="nano", prompt="Hello", max_tokens=10)
    assert answer.object == "text_completion"
    assert answer.choices[0].text == STORY[: len(answer.choices[0].text)] != ""
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.completion_tokens == 10
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 10
    assert answer.usage.prompt_tokens_details.cached_tokens == 1


def test_completions_default_to_16_tokens(client):
    assert client.completions.create(model="nano", prompt="a").usage.completion_tokens == 16


def test_every_form_of_prompt_is_taken(client, server):
    ids = [2, 300, 301]
    for prompt, choices in (("a", 1), (["a", "b"], 2), (ids, 1), ([ids, ids, ids], 3)):
        answer = client.completions.create(model="nano", prompt=prompt, max_tokens=2)
        assert [c.index for c in answer.choices] == list(range(choices))
    assert answer.usage.prompt_tokens == 9


def test_n_completions_of_two_prompts_are_numbered_by_prompt(client):
    answer = client.completions.create(
        model="nano", prompt=["SHORT", "other"], n=2, max_tokens=50, echo=True
    )
    texts = [c.text for c in sorted(answer.choices, key=lambda c: c.index)]
    assert texts[:2] == ["SHORTHello there, friend!"] * 2
    assert all(text.startswith("other" + STORY) for text in texts[2:])
    assert [c.finish_reason for c in answer.choices] == ["stop", "stop", "length", "length"]


def test_a_stop_string_is_left_out_unless_asked_for(client):
    request = {"model": "nano", "prompt": "a", "max_tokens": 50, "stop": [" little"]}
    (choice,) = client.completions.create(**request).choices
    assert choice.text == "Once upon a time there was a"
    assert (choice.finish_reason, choice.stop_reason) == ("stop", " little")
    more = {"include_stop_str_in_output": True}
    (choice,) = client.completions.create(**request, extra_body=more).choices
    assert choice.text.endswith("was a little")


def test_completion_logprobs_have_offsets_into_the_text(client):
    answer = client.completions.create(model="nano", prompt="a", max_tokens=5, logprobs=2)
    (choice,) = answer.choices
    logprobs = choice.logprobs
    assert "".join(logprobs.tokens) == choice.text
    assert logprobs.token_logprobs == [-0.5] * 5
    assert all(len(top) == 2 for top in logprobs.top_logprobs)
    for token, offset in zip(logprobs.tokens, logprobs.text_offset, strict=True):
        assert choice.text[offset:].startswith(token)


def test_a_streamed_completion_is_the_whole_one(client):
    request = {"model": "nano", "prompt": "a", "max_tokens": 20, "logprobs": 1}
    whole = client.completions.create(**request).choices[0]
    chunks = list(client.completions.create(**request, stream=True))
    assert "".join(c.choices[0].text for c in chunks) == whole.text
    assert [c.choices[0].finish_reason for c in chunks][-2:] == [None, "length"]
    for name in ("tokens", "text_offset"):
        parts = [getattr(c.choices[0].logprobs, name) for c in chunks]
        assert list(itertools.chain(*parts)) == getattr(whole.logprobs, name)


def ids_of(server, text):
    answer = httpx.post(
        server.url + "/tokenize", json={"prompt": text}, headers={"Authorization": f"Bearer {KEY}"}
    )
    return answer.json()["tokens"]


@pytest.mark.parametrize("client", ["scripted_server"], indirect=True)
@pytest.mark.parametrize("max_tokens", [0, 1])
def test_an_evaluation_harness_reads_the_logprobs_of_its_prompts(
    client, scripted_server, max_tokens
):
    prompts = [ids_of(scripted_server, text) for text in ("The fox is in the wood.", "A")]
    answer = client.completions.create(
        model="nano", prompt=prompts, max_tokens=max_tokens, echo=True, logprobs=1, temperature=0,
        seed=1234,
    )  # fmt: skip
    assert [c.index for c in answer.choices] == [0, 1]
    for choice, ids in zip(answer.choices, prompts, strict=True):
        logprobs, count = choice.logprobs, len(ids) + max_tokens
        assert choice.finish_reason == "length"
        assert (logprobs.token_logprobs[0], logprobs.top_logprobs[0]) == (None, None)
        assert logprobs.token_logprobs[1:] == [-0.5] * (count - 1)
        assert all(max(top.values()) == -0.5 for top in logprobs.top_logprobs[1:])
        assert "".join(logprobs.tokens) == "<bos>" + choice.text
        assert logprobs.text_offset[-1] == len(choice.text) - len(logprobs.tokens[-1])
    usage = answer.usage
    assert usage.completion_tokens == 2 * max_tokens
    assert usage.prompt_tokens == sum(map(len, prompts))


@pytest.mark.parametrize("client", ["server", "scripted_server"], indirect=True)
def test_a_streamed_echo_begins_with_the_prompt_and_its_logprobs(client):
    request = {"model": "nano", "prompt": "One", "max_tokens": 5, "echo": True, "logprobs": 1}
    whole = client.completions.create(**request).choices[0]
    parts = [c.choices[0] for c in client.completions.create(**request, stream=True)]
    assert "".join(p.text for p in parts) == whole.text
    for name, values in whole.logprobs:
        assert list(itertools.chain(*(getattr(p.logprobs, name) for p in parts))) == values


@pytest.mark.parametrize("client", ["scripted_server"], indirect=True)
def test_prompt_logprobs_are_given_by_both_endpoints(client):
    more = {"prompt_logprobs": 2}
    answer = client.completions.create(model="nano", prompt="One", max_tokens=2, extra_body=more)
    first, *rest = answer.choices[0].prompt_logprobs
    assert first is None
    assert all(len(position) == 2 for position in rest)
    answer = client.chat.completions.create(
        model="nano", messages=ask("SHORT"), max_tokens=2, extra_body=more
    )
    assert len(answer.prompt_logprobs) == answer.usage.prompt_tokens


# --- chat ----------------------------------------------------------------------------------------


def test_a_chat_answer_is_a_message_of_the_assistant(client):
    answer = client.chat.completions.create(model="nano", messages=ask("SHORT"))
    (choice,) = answer.choices
    assert answer.object == "chat.completion"
    assert (choice.message.role, choice.message.content) == ("assistant", "Hello there, friend!")
    assert choice.finish_reason == "stop"
    assert choice.message.tool_calls is None


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_a_chat_answer_ends_at_either_limit(client, name):
    answer = client.chat.completions.create(model="nano", messages=USER, **{name: 7})
    assert answer.usage.completion_tokens == 7
    assert answer.choices[0].finish_reason == "length"


def test_a_chat_without_a_limit_takes_the_rest_of_the_context(client):
    answer = client.chat.completions.create(
        model="nano", messages=[*USER, *[{"role": "user", "content": "x " * 4050}]]
    )
    assert answer.usage.total_tokens == 8192


def test_a_streamed_chat_has_one_head_role_first_and_usage_last(client):
    stream = client.chat.completions.create(
        model="nano", messages=ask("SHORT"), stream=True, stream_options={"include_usage": True}
    )
    *chunks, last = list(stream)
    assert len({(c.id, c.created, c.model, c.object) for c in [*chunks, last]}) == 1
    assert chunks[0].choices[0].delta.role == "assistant"
    assert all(c.choices[0].delta.role is None for c in chunks[1:])
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == "Hello there, friend!"
    reasons = [c.choices[0].finish_reason for c in chunks]
    assert reasons == [None] * (len(chunks) - 1) + ["stop"]
    assert all(c.usage is None for c in chunks)
    assert last.choices == []
    assert last.usage.completion_tokens > 3


def test_several_streamed_choices_come_apart_by_index(client):
    stream = client.chat.completions.create(model="nano", messages=ask("SHORT"), n=3, stream=True)
    texts = {}
    for chunk in stream:
        for choice in chunk.choices:
            texts[choice.index] = texts.get(choice.index, "") + (choice.delta.content or "")
    assert texts == dict.fromkeys(range(3), "Hello there, friend!")


def test_chat_logprobs_have_bytes_and_the_best_alternatives(client):
    answer = client.chat.completions.create(
        model="nano", messages=USER, max_tokens=4, logprobs=True, top_logprobs=2
    )
    content = answer.choices[0].logprobs.content
    assert [entry.token for entry in content] == ["Once", " upon", " a", " time"]
    assert [bytes(entry.bytes).decode() for entry in content] == [e.token for e in content]
    assert [len(entry.top_logprobs) for entry in content] == [2] * 4
    assert content[0].top_logprobs[0].token == "Once"
    silent = client.chat.completions.create(model="nano", messages=USER, max_tokens=4)
    assert silent.choices[0].logprobs is None


@pytest.mark.parametrize("client", ["server", "scripted_server"], indirect=True)
def test_a_thought_is_reasoning_and_not_content(client):
    request = {
        "model": "nano", "messages": ask("THINK"),
        "extra_body": {"chat_template_kwargs": {"enable_thinking": True}},
    }  # fmt: skip
    message = client.chat.completions.create(**request).choices[0].message
    assert (message.reasoning, message.content) == ("Let me see.", "The answer is 4.")
    assert message.reasoning_content == message.reasoning
    deltas = [c.choices[0].delta for c in client.chat.completions.create(**request, stream=True)]
    assert "".join(getattr(d, "reasoning", None) or "" for d in deltas) == "Let me see."
    assert "".join(d.content or "" for d in deltas) == "The answer is 4."


@pytest.mark.parametrize("client", ["server", "scripted_server"], indirect=True)
def test_a_tool_call_is_parsed_whole_and_streamed(client):
    parameters = {"type": "object", "properties": {"city": {"type": "string"}}}
    tool = {"type": "function", "function": {"name": "weather", "parameters": parameters}}
    request = {"model": "nano", "messages": ask("CALL"), "tools": [tool]}
    (choice,) = client.chat.completions.create(**request).choices
    assert choice.finish_reason == "tool_calls"
    (call,) = choice.message.tool_calls
    assert call.function.name == "weather"
    assert json.loads(call.function.arguments) == {"city": "Oslo", "days": 2}
    arguments, reasons = "", []
    for chunk in client.chat.completions.create(**request, stream=True):
        reasons.append(chunk.choices[0].finish_reason)
        for part in chunk.choices[0].delta.tool_calls or ():
            arguments += part.function.arguments or ""
    assert json.loads(arguments) == {"city": "Oslo", "days": 2}
    assert reasons[-1] == "tool_calls"


@pytest.mark.parametrize("client", ["server", "scripted_server"], indirect=True)
def test_without_tools_a_call_is_content(client):
    answer = client.chat.completions.create(model="nano", messages=ask("CALL"), tool_choice="none")
    assert answer.choices[0].message.tool_calls is None
    assert "weather" in answer.choices[0].message.content


def test_a_json_schema_gives_a_message_that_parses(client):
    schema = {"name": "pet", "schema": {"type": "object", "properties": {"name": {}}}}
    answer = client.chat.completions.create(
        model="nano", messages=ask("JSON"),
        response_format={"type": "json_schema", "json_schema": schema},
    )  # fmt: skip
    assert json.loads(answer.choices[0].message.content) == {"name": "fox"}


# --- the rest ------------------------------------------------------------------------------------


def test_models_are_listed_with_their_context(client):
    (model,) = client.models.list().data
    assert (model.id, model.max_model_len) == ("nano", 8192)
    assert client.models.retrieve("nano").id == "nano"
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("other")
    assert caught.value.code == "model_not_found"


async def async_texts(url, key, count):
    async with openai.AsyncOpenAI(base_url=url + "/v1", api_key=key, max_retries=0) as client:

        async def one():
            stream = await client.chat.completions.create(
                model="nano", messages=ask("SHORT"), stream=True
            )
            return "".join([c.choices[0].delta.content or "" async for c in stream])

        return await asyncio.gather(*[one() for _ in range(count)])


def test_concurrent_streams_each_get_their_own_text(server):
    texts = asyncio.run(async_texts(server.url, KEY, 12))  # as many as run and wait
    assert texts == ["Hello there, friend!"] * 12


def test_the_example_runs(server, capsys):
    file = Path(__file__).parents[2] / "examples" / "openai_client.py"
    runpy.run_path(str(file))["main"](server.url + "/v1", KEY)
    assert capsys.readouterr().out.startswith("Once upon a time")
