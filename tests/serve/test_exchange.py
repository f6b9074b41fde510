"""API requests through a fake engine: response objects, streams, tools, logprobs, usage."""

import json

import pytest
from replay_engine import ReplayEngine

from gemma_jax.errors import RequestError
from gemma_jax.outputs import Logprob
from gemma_jax.serve.exchange import open_exchange
from gemma_jax.serve.responses import token_bytes, token_text
from gemma_jax.text_side import TextSide

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HELLO = {"messages": [{"role": "user", "content": "Hello"}]}
TOOLS = [{"type": "function", "function": {"name": "find", "parameters": {"type": "object"}}}]
CALL = '<|tool_call>call:find{near:<|"|>Rome<|"|>}<tool_call|>'


@pytest.fixture(scope="module")
def text():
    return TextSide.load("nano")


def run(text, url, body, reply=None, tokens=3):
    """The whole response and the chunks of a body."""
    exchange = open_exchange(url, body, text, "m")
    engine = ReplayEngine(text, reply and (lambda request: reply), tokens=tokens)
    for request in exchange.requests:
        engine.add(request)
    chunks = []
    while not exchange.finished:
        pushed = [exchange.push(delta) for delta in engine.step()]
        chunks += [chunk for chunk in pushed if chunk is not None]
    return exchange, chunks


def joined(chunks, field, index=0):
    deltas = [c["delta"] for chunk in chunks for c in chunk["choices"] if c["index"] == index]
    return "".join(delta.get(field) or "" for delta in deltas)


def test_a_chat_is_answered_in_the_shape_of_the_api(text):
    exchange, _ = run(text, CHAT, HELLO, "Good day.")
    response = exchange.response()
    assert response["object"] == "chat.completion"
    assert response["id"].startswith("chatcmpl-")
    assert response["model"] == "m"
    (choice,) = response["choices"]
    assert choice["message"] == {"role": "assistant", "content": "Good day."}
    assert (choice["finish_reason"], choice["logprobs"]) == ("stop", None)
    usage = response["usage"]
    assert usage["prompt_tokens"] == len(exchange.requests[0].prompt_token_ids)
    assert usage["completion_tokens"] == len(text.tokenizer.encode("Good day.", add_bos=False)) + 1
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]


def test_a_thought_is_reasoning_under_both_names(text):
    body = HELLO | {"reasoning_effort": "low"}
    reply = "<|channel>thought\nLet me see.\n<channel|>Yes."
    exchange, chunks = run(text, CHAT, body, reply)
    message = exchange.response()["choices"][0]["message"]
    assert message["content"] == "Yes."
    assert message["reasoning"] == message["reasoning_content"] == "Let me see."
    assert joined(chunks, "reasoning") == joined(chunks, "reasoning_content") == "Let me see."
    assert joined(chunks, "content") == "Yes."


def test_tool_calls_are_parsed_whole_and_streamed(text):
    exchange, chunks = run(text, CHAT, HELLO | {"tools": TOOLS}, CALL + CALL)
    (choice,) = exchange.response()["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] is None
    calls = choice["message"]["tool_calls"]
    assert [json.loads(c["function"]["arguments"]) for c in calls] == [{"near": "Rome"}] * 2
    assert len({c["id"] for c in calls}) == 2

    streamed = [
        call
        for chunk in chunks
        for choice in chunk["choices"]
        for call in choice["delta"].get("tool_calls", [])
    ]
    assert [(c["index"], c["id"]) for c in streamed] == [(i, c["id"]) for i, c in enumerate(calls)]
    assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"


def test_a_stream_begins_with_the_role_and_ends_with_the_reason(text):
    exchange, chunks = run(text, CHAT, HELLO | {"stream": True}, "One two three four five six.")
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas[0]["role"] == "assistant"
    assert all("role" not in delta for delta in deltas[1:])
    assert joined(chunks, "content") == "One two three four five six."
    reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks]
    assert reasons == [None] * (len(chunks) - 1) + ["stop"]
    assert {(c["id"], c["created"], c["object"]) for c in chunks} == {
        (exchange.head.id, exchange.head.created, "chat.completion.chunk")
    }
    last = exchange.usage_chunk()
    assert last["choices"] == []
    assert last["usage"] == exchange.response()["usage"]


def test_chat_logprobs_have_a_position_a_token(text):
    body = HELLO | {"logprobs": True, "top_logprobs": 2}
    exchange, chunks = run(text, CHAT, body, "Good é.")
    positions = exchange.response()["choices"][0]["logprobs"]["content"]
    assert len(positions) == exchange.usage.completion_tokens
    assert all(len(p["top_logprobs"]) == 2 for p in positions)
    assert all(p["logprob"] == -0.5 for p in positions)
    data = bytes(byte for p in positions for byte in p["bytes"])
    assert data.decode() == "Good é.<turn|>"
    parts = [chunk["choices"][0]["logprobs"] for chunk in chunks]
    assert [p for part in parts if part for p in part["content"]] == positions


def test_completions_number_their_choices_by_prompt(text):
    body = {"prompt": ["one", "two"], "n": 2, "temperature": 1, "max_tokens": 64}
    exchange, _ = run(text, COMPLETIONS, body)
    response = exchange.response()
    assert response["object"] == "text_completion"
    assert [(c["index"], c["text"]) for c in response["choices"]] == [
        (0, "one"), (1, "one"), (2, "two"), (3, "two")
    ]  # fmt: skip


def test_completion_logprobs_and_echo(text):
    exchange, chunks = run(text, COMPLETIONS, {"prompt": "a b", "logprobs": 2}, "A tree.")
    logprobs = exchange.response()["choices"][0]["logprobs"]
    assert "".join(logprobs["tokens"]) == "A tree.<turn|>"
    assert logprobs["text_offset"][:2] == [0, len(logprobs["tokens"][0])]
    assert set(logprobs["token_logprobs"]) == {-0.5}
    streamed = [c["choices"][0]["logprobs"]["text_offset"] for c in chunks]
    assert [offset for part in streamed for offset in part] == logprobs["text_offset"]

    ids = text.tokenizer.encode("A tree.")
    for prompt in ("A tree.", ids):
        exchange, chunks = run(text, COMPLETIONS, {"prompt": prompt, "echo": True}, " It grows.")
        assert exchange.response()["choices"][0]["text"] == "A tree. It grows."
        assert "".join(c["choices"][0]["text"] for c in chunks) == "A tree. It grows."


@pytest.mark.parametrize("prompt", ["<bos>A é\U0001f98a tree", "A é\U0001f98a tree", None])
def test_an_echo_has_the_logprobs_of_the_prompt_before_those_of_the_answer(text, prompt):
    ids = text.tokenizer.encode("A é\U0001f98a tree")
    body = {"prompt": prompt or ids, "echo": True, "logprobs": 2}
    exchange, chunks = run(text, COMPLETIONS, body, " It grows.")
    (choice,) = exchange.response()["choices"]
    logprobs = choice["logprobs"]
    count = len(ids)
    assert logprobs["token_logprobs"][:count] == [None] + [-1.5] * (count - 1)
    assert set(logprobs["token_logprobs"][count:]) == {-0.5}
    assert logprobs["top_logprobs"][0] is None
    assert all(len(top) == 2 for top in logprobs["top_logprobs"][1:])
    assert (logprobs["tokens"][0], logprobs["text_offset"][0]) == ("<bos>", 0)
    shown = list(zip(logprobs["tokens"], logprobs["text_offset"], strict=True))[1:-1]
    in_bytes = [choice["text"][offset] for token, offset in shown if "bytes:" in token]
    assert in_bytes == ["é"] * 2 + ["\U0001f98a"] * 4
    for token, offset in shown:
        assert "bytes:" in token or choice["text"][offset:].startswith(token)
    streamed = [c["choices"][0] for c in chunks]
    assert "".join(c["text"] for c in streamed) == choice["text"]
    for name, values in logprobs.items():
        assert [x for c in streamed for x in c["logprobs"][name]] == values


def test_a_prompt_alone_is_echoed_and_nothing_generated(text):
    body = {"prompt": ["a b", "c"], "echo": True, "logprobs": 0, "max_tokens": 0}
    exchange, _ = run(text, COMPLETIONS, body, "never said")
    response = exchange.response()
    assert [c["text"] for c in response["choices"]] == ["a b", "c"]
    assert [c["finish_reason"] for c in response["choices"]] == ["length"] * 2
    assert response["usage"]["completion_tokens"] == 0
    for choice, request in zip(response["choices"], exchange.requests, strict=True):
        assert len(choice["logprobs"]["tokens"]) == len(request.prompt_token_ids)
        assert choice["logprobs"]["top_logprobs"][1:] == [{}] * (len(request.prompt_token_ids) - 1)
    exchange, _ = run(text, COMPLETIONS, {"prompt": "a", "echo": True, "max_tokens": 0})
    assert exchange.response()["choices"][0]["logprobs"] is None


def test_prompt_logprobs_are_written_as_vllm_writes_them(text):
    ids = text.tokenizer.encode("a b")
    entries = {str(ids[1]): {"logprob": -1.5, "rank": 1, "decoded_token": "a"}}
    exchange, _ = run(text, COMPLETIONS, {"prompt": "a b", "prompt_logprobs": 1}, "x")
    (choice,) = exchange.response()["choices"]
    assert choice["prompt_logprobs"][:2] == [None, entries]
    assert (choice["text"], choice["logprobs"]) == ("x", None)
    exchange, _ = run(text, CHAT, HELLO | {"prompt_logprobs": 1}, "x")
    answered = exchange.response()["prompt_logprobs"]
    assert len(answered) == len(exchange.requests[0].prompt_token_ids)
    assert answered[0] is None
    plain, _ = run(text, CHAT, HELLO, "x")
    assert "prompt_logprobs" not in plain.response()


def test_a_failing_engine_leaves_its_reason(text):
    exchange, chunks = run(text, CHAT, HELLO, RuntimeError("out of pages"))
    assert exchange.error == "out of pages"
    assert chunks == []


def test_a_prompt_that_cannot_run_is_refused(text):
    with pytest.raises(RequestError, match="leave no room"):
        open_exchange(COMPLETIONS, {"prompt": [5] * 9000}, text, "m")
    with pytest.raises(RequestError, match=r"messages\[0\].role"):
        open_exchange(CHAT, {"messages": [{"role": "x", "content": ""}]}, text, "m")


@pytest.mark.parametrize(
    ("spelling", "data", "shown"),
    [
        ("\u2581the", b" the", " the"),
        ("<0x41>", b"A", "A"),
        ("<0xE2>", b"\xe2", "bytes:\\xe2"),
        (None, b"", ""),
    ],
)
def test_a_token_is_written_as_its_bytes(spelling, data, shown):
    entry = Logprob(-1.0, 1, spelling)
    assert (token_bytes(entry), token_text(entry)) == (data, shown)
