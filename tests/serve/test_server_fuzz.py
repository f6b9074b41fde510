"""Thousands of broken requests: no 5xx, no hang, every refusal names its field, nothing leaks."""

import json
import random
import socket

import httpx
import hypothesis
import pytest
import schemathesis
import schemathesis.checks
import server_process
from server_process import wait_for

pytestmark = pytest.mark.slow

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
PATHS = (CHAT, COMPLETIONS, "/tokenize", "/detokenize")
USER = [{"role": "user", "content": "hi"}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
BODIES = {
    CHAT: [
        {"messages": USER, "max_tokens": 5},
        {"messages": USER, "max_tokens": 3, "tools": [TOOL], "stream": True},
        {"messages": USER, "max_tokens": 3, "logprobs": True, "top_logprobs": 2, "n": 2},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}], "seed": 1},
        {"messages": USER, "max_tokens": 3, "response_format": {"type": "json_object"}},
    ],
    COMPLETIONS: [
        {"prompt": "hi", "max_tokens": 5, "temperature": 0.5, "top_p": 0.9, "top_k": 3},
        {"prompt": ["a", "b"], "max_tokens": 3, "logprobs": 2, "echo": False},
        {"prompt": [1, 2, 3], "max_tokens": 3, "logit_bias": {"5": 1}, "stop": ["x"]},
        {"prompt": [[1], [2]], "max_tokens": 3, "stop_token_ids": [4], "stream": True},
        {"prompt": [[1, 2], [3]], "max_tokens": 0, "echo": True, "logprobs": 1},
        {"prompt": "hi", "max_tokens": 2, "prompt_logprobs": 1},
    ],
    "/tokenize": [{"prompt": "hi"}, {"messages": USER, "tools": [TOOL]}],
    "/detokenize": [{"tokens": [1, 2, 3]}],
}
STRANGE = [
    None, True, False, 0, -1, 1, 2**31, 2**63, 2**64, 10**40, -(10**40), 0.0, 1e-320, 1e308,
    "", "a", "\x00", "\ud800", "<bos>", "<|turn>", "é" * 300, "a" * 5000, [], [[]], [None], {},
    {"": {}}, {"a": [1]}, [1, "a"], [[1], "a"], ["", ""], [[[[[[]]]]]],
]  # fmt: skip


@pytest.fixture(scope="module")
def fuzzed():
    engine = {"max_num_seqs": 8, "seconds_per_step": 0.0, "tokens_per_step": 64}
    with server_process.start({"max_queue": 512}, engine, max_model_len=256) as server:
        yield server


def check(response, body=None):
    """What must hold of every answer."""
    assert response.status_code < 500, (response.text, body)
    if response.status_code == 200:
        assert b'"error"' not in response.content, (response.text, body)
        return
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    if response.status_code in (400, 413, 415, 422):
        assert error["param"] is not None, (error, body)


def mutated(rng, value):
    """The value with something in it replaced, removed, repeated or added."""
    if rng.random() < 0.3 or not isinstance(value, dict | list) or not value:
        return rng.choice(STRANGE)
    copy = json.loads(json.dumps(value))
    key = rng.choice(list(copy)) if isinstance(copy, dict) else rng.randrange(len(copy))
    action = rng.random()
    if action < 0.15:
        del copy[key]
    elif action < 0.3 and isinstance(copy, list):
        copy.extend([copy[key]] * rng.randrange(1, 50))
    elif action < 0.3:
        copy[rng.choice(["n", "prompt", "messages", "x", "tools", ""])] = rng.choice(STRANGE)
    else:
        copy[key] = mutated(rng, copy[key])
    return copy


def bodies(count, seed):
    """Encoded bodies: mutations of valid ones, some of them broken below JSON."""
    rng = random.Random(seed)
    for _ in range(count):
        path = rng.choice(PATHS)
        value = rng.choice(BODIES[path])
        for _ in range(rng.randrange(1, 4)):
            value = mutated(rng, value)
        data = json.dumps(value).encode()
        kind = rng.random()
        if kind < 0.1:
            data = data[: rng.randrange(len(data))]
        elif kind < 0.2:
            data = bytearray(data)
            data[rng.randrange(len(data))] = rng.randrange(256)
        elif kind < 0.25:
            data = rng.randbytes(rng.randrange(200))
        yield path, bytes(data)


def state(server):
    """Open files and resident bytes of the HTTP process."""
    lines = dict(
        line.rsplit(" ", 1)
        for line in httpx.get(server.url + "/metrics").text.splitlines()
        if not line.startswith("#")
    )
    names = ("process_open_fds", "process_resident_memory_bytes")
    return [float(lines[name]) for name in names]


def is_idle(server):
    text = httpx.get(server.url + "/metrics").text
    return all(
        f'gemma_jax:num_requests_{name}{{model_name="nano"}} 0.0' in text
        for name in ("running", "waiting")
    )


def test_mutated_bodies_are_answered_or_refused_by_name(fuzzed):
    headers = {"Content-Type": "application/json"}
    with httpx.Client(base_url=fuzzed.url, timeout=20, headers=headers) as http:
        for path, data in bodies(500, seed=1):
            check(http.post(path, content=data), data)
        files, memory = state(fuzzed)
        statuses = set()
        for path, data in bodies(8000, seed=2):
            response = http.post(path, content=data)
            check(response, data)
            statuses.add(response.status_code)
        assert {200, 400} <= statuses
        wait_for(lambda: is_idle(fuzzed), seconds=10)
        assert http.post(COMPLETIONS, content=b'{"prompt": "a"}').status_code == 200
    files_after, memory_after = state(fuzzed)
    assert files_after <= files + 2
    assert memory_after < memory + 40e6


def test_bytes_that_are_not_http_do_not_disturb(fuzzed):
    rng = random.Random(3)
    host, port = fuzzed.url.removeprefix("http://").split(":")
    start = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    for _ in range(500):
        data = rng.choice([b"", b"GET / HTTP/1.1\r\n", start, start + b"Content-Length: 9\r\n\r\n"])
        with socket.create_connection((host, int(port)), timeout=5) as connection:
            connection.sendall(data + rng.randbytes(rng.randrange(300)))
    wait_for(lambda: is_idle(fuzzed), seconds=10)
    assert httpx.get(fuzzed.url + "/health").status_code == 200


def test_requests_made_from_the_description_are_answered_as_it_says(fuzzed):
    schema = schemathesis.openapi.from_url(fuzzed.url + "/openapi.json")
    settings = hypothesis.settings(
        max_examples=100, deadline=None, database=None, derandomize=True,
        suppress_health_check=list(hypothesis.HealthCheck),
    )  # fmt: skip
    names = ("status_code", "content_type", "response_schema")
    checks = [schemathesis.checks.CHECKS.get_one(f"{name}_conformance") for name in names]
    checks.append(schemathesis.checks.not_a_server_error)

    def run(case):
        case.call_and_validate(checks=checks, timeout=20)

    operations = [operation.ok() for operation in schema.get_all_operations()]
    assert len(operations) == 10
    for operation in operations:
        settings(hypothesis.given(case=operation.as_strategy())(run))()
    wait_for(lambda: is_idle(fuzzed), seconds=10)
