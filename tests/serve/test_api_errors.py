"""Every refusal of the server has the API's form, the right status, and the field at fault."""

import json
import socket

import httpx
import openai
import pytest
from server_process import KEY

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
USER = [{"role": "user", "content": "hi"}]
ERROR_FIELDS = {"message", "type", "param", "code"}


@pytest.fixture(scope="module")
def http(server):
    headers = {"Authorization": f"Bearer {KEY}"}
    with httpx.Client(base_url=server.url, headers=headers, timeout=30) as http:
        yield http


@pytest.fixture(scope="module")
def stranger(server):
    with httpx.Client(base_url=server.url, timeout=30) as http:
        yield http


def refusal(response, status):
    """The error object of a response that must have this status."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    error = response.json()["error"]
    assert set(error) == ERROR_FIELDS
    assert error["message"]
    return error


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (COMPLETIONS, {}, "prompt"),
        (COMPLETIONS, {"prompt": ""}, "prompt"),
        (COMPLETIONS, {"prompt": []}, "prompt"),
        (COMPLETIONS, {"prompt": [[1], "a", 5]}, "prompt"),
        (COMPLETIONS, {"prompt": [1, -1]}, "prompt"),
        (COMPLETIONS, {"prompt": [10**9]}, "prompt"),
        (COMPLETIONS, {"prompt": "\ud800"}, "prompt"),
        (COMPLETIONS, {"prompt": {"image": "x"}}, "prompt"),
        (COMPLETIONS, {"prompt": "a", "max_tokens": 0}, "max_tokens"),
        (COMPLETIONS, {"prompt": "a", "max_tokens": "5"}, "max_tokens"),
        (COMPLETIONS, {"prompt": "a", "temperature": -1}, "temperature"),
        (COMPLETIONS, {"prompt": "a", "temperature": True}, "temperature"),
        (COMPLETIONS, {"prompt": "a", "n": 1000}, "n"),
        (COMPLETIONS, {"prompt": "a", "n": 13}, "n"),  # more than run and wait
        (COMPLETIONS, {"prompt": "a", "n": 2, "temperature": 0}, "n"),
        (COMPLETIONS, {"prompt": "a", "stop": [""]}, "stop"),
        (COMPLETIONS, {"prompt": "a", "logprobs": 99}, "logprobs"),
        (COMPLETIONS, {"prompt": "a", "logit_bias": {"x": 1}}, "logit_bias"),
        (COMPLETIONS, {"prompt": "a", "logit_bias": {"999999999": 1}}, "logit_bias"),
        (COMPLETIONS, {"prompt": "a", "stop_token_ids": [10**12]}, "stop_token_ids"),
        (COMPLETIONS, {"prompt": "a", "seed": 10**30}, "seed"),
        (COMPLETIONS, {"prompt": "a", "stream": "yes"}, "stream"),
        (COMPLETIONS, {"prompt": "a", "suffix": "end"}, "suffix"),
        (COMPLETIONS, {"prompt": "a", "best_of": 3}, "best_of"),
        (COMPLETIONS, {"prompt": "a", "prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        (COMPLETIONS, {"prompt": "a", "stream_options": {"include_usage": True}}, "stream_options"),
        (CHAT, {}, "messages"),
        (CHAT, {"messages": []}, "messages"),
        (CHAT, {"messages": [{"role": "robot", "content": "x"}]}, "messages"),
        (CHAT, {"messages": [{"role": "user", "content": 5}]}, "messages"),
        (CHAT, {"messages": [{"role": "user", "content": "\udc00"}]}, "messages"),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages"),
        (CHAT, {"messages": USER, "tools": [{"type": "function"}]}, "tools"),
        (CHAT, {"messages": USER, "tool_choice": "required"}, "tool_choice"),
        (CHAT, {"messages": USER, "top_logprobs": 3}, "top_logprobs"),
        (CHAT, {"messages": USER, "response_format": {"type": "xml"}}, "response_format"),
        (CHAT, {"messages": USER, "reasoning_effort": "huge"}, "reasoning_effort"),
        (CHAT, {"messages": USER, "modalities": ["audio"]}, "modalities"),
        (CHAT, {"messages": USER, "chat_template_kwargs": {"x": 1}}, "chat_template_kwargs"),
        (CHAT, {"messages": USER, "max_completion_tokens": -3}, "max_completion_tokens"),
        (CHAT, {"messages": USER, "prompt": "a"}, "prompt"),
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": 3}, "prompt"),
        ("/tokenize", {"prompt": "\ud800"}, "prompt"),
        ("/tokenize", {"messages": [1]}, "messages"),
        ("/tokenize", {"prompt": "a", "add_special_tokens": 1}, "add_special_tokens"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": [1.5]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": [2**40]}, "tokens"),
    ],
)
def test_a_bad_field_is_named(http, path, body, param):
    content = json.dumps(body)  # with escapes: a lone surrogate has no other form
    response = http.post(path, content=content, headers={"Content-Type": "application/json"})
    error = refusal(response, 400)
    assert error["param"] == param, error
    assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, "/tokenize", "/detokenize"])
def test_an_unknown_field_is_refused_by_its_name(http, path):
    error = refusal(http.post(path, json={"max_token": 1}), 400)
    assert (error["param"], error["code"]) == ("max_token", "unknown_parameter")


def test_fields_that_change_nothing_are_accepted(http):
    body = {"messages": USER, "max_tokens": 2, "user": "me", "metadata": {}, "tools": None}
    assert http.post(CHAT, json=body).status_code == 200


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b'{"prompt": NaN}', b"\xff\xfe", b'"text"', b"[" * 100_000, b"1" * 5000, b"null"],
)
@pytest.mark.parametrize("path", [COMPLETIONS, "/tokenize"])
def test_a_body_that_is_no_json_object_is_refused(http, path, content):
    response = http.post(path, content=content, headers={"Content-Type": "application/json"})
    assert "body" in refusal(response, 400)["message"]


def test_a_body_has_to_be_declared_as_json(http):
    error = refusal(http.post(COMPLETIONS, content=b"{}"), 415)
    assert error["param"] == "Content-Type"


def test_a_body_that_is_too_large_is_refused(http):
    error = refusal(http.post(COMPLETIONS, json={"prompt": "a" * 100_001}), 413)
    assert "100000 bytes" in error["message"]
    assert http.get("/health").status_code == 200


def test_a_body_without_declared_length_is_cut_off_at_the_limit(server):
    sent = 0

    def parts():
        nonlocal sent
        for _ in range(10_000):
            sent += 10_000
            yield b"x" * 10_000

    headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
    try:
        response = httpx.post(server.url + COMPLETIONS, content=parts(), headers=headers)
        refusal(response, 413)
    except httpx.WriteError:
        pass  # the connection was closed before the answer was read
    assert sent < 50_000_000


def test_a_prompt_beyond_the_context_says_so(http):
    error = refusal(http.post(COMPLETIONS, json={"prompt": [5] * 9000}), 400)
    assert (error["code"], error["param"]) == ("context_length_exceeded", "prompt")
    long = [{"role": "user", "content": "fox " * 9000}]
    error = refusal(http.post(CHAT, json={"messages": long}), 400)
    assert (error["code"], error["param"]) == ("context_length_exceeded", "messages")


def test_another_model_is_not_found(http):
    for path, body in ((CHAT, {"messages": USER}), (COMPLETIONS, {"prompt": "a"})):
        error = refusal(http.post(path, json=body | {"model": "gpt"}), 404)
        assert (error["param"], error["code"]) == ("model", "model_not_found")


def test_other_paths_and_methods_are_refused_in_the_same_form(http):
    assert refusal(http.get("/v2"), 404)["code"] == "not_found"
    response = http.get(CHAT)
    refusal(response, 405)
    assert response.headers["allow"] == "POST"


@pytest.mark.parametrize(
    "header", [None, "", "Bearer", "Bearer wrong", f"Basic {KEY}", f"Bearer {KEY}x", KEY]
)
def test_without_the_key_nothing_is_answered(stranger, header):
    headers = {} if header is None else {"Authorization": header}
    for path in ("/v1/models", COMPLETIONS, "/tokenize", "/openapi.json", "/else"):
        response = stranger.post(path, headers=headers, json={})
        assert refusal(response, 401)["code"] == "invalid_api_key"
        assert response.headers["www-authenticate"] == "Bearer"


def test_state_is_open_to_everyone(stranger):
    for path in ("/", "/health", "/version", "/metrics"):
        assert stranger.get(path).status_code == 200


def test_the_official_client_gets_its_own_exceptions(server, client):
    with pytest.raises(openai.BadRequestError, match="temperature") as caught:
        client.completions.create(model="nano", prompt="a", temperature=-1)
    assert caught.value.param == "temperature"
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="gpt", prompt="a")
    with (
        openai.OpenAI(base_url=server.url + "/v1", api_key="wrong") as stranger,
        pytest.raises(openai.AuthenticationError),
    ):
        stranger.models.list()


def test_what_the_engine_refuses_is_429_and_what_it_gives_up_is_503(client):
    with pytest.raises(openai.RateLimitError, match="more pages"):
        client.completions.create(model="nano", prompt=["a", "REFUSE"])
    with pytest.raises(openai.InternalServerError, match="out of luck") as caught:
        client.completions.create(model="nano", prompt="FAIL")
    assert caught.value.status_code == 503
    with pytest.raises(openai.InternalServerError, match="internal error"):
        client.completions.create(model="nano", prompt="BUG")


def test_an_error_within_a_stream_is_its_last_event(client):
    stream = client.completions.create(model="nano", prompt="FAIL", stream=True)
    texts = []
    with pytest.raises(openai.APIError, match="out of luck"):
        texts.extend(chunk.choices[0].text for chunk in stream)
    assert texts == ["Once upon a"]


def test_a_broken_http_request_does_not_disturb_the_server(server, http):
    host, port = server.url.removeprefix("http://").split(":")
    for data in (b"\x00\xff\r\n\r\n", b"GET", b"POST /v1/completions HTTP/1.1\r\n", b""):
        with socket.create_connection((host, int(port)), timeout=5) as connection:
            connection.sendall(data)
    assert http.get("/health").status_code == 200


# --- what is not a refusal -----------------------------------------------------------------------


def test_tokenize_and_detokenize_are_inverse(http):
    answer = http.post("/tokenize", json={"prompt": "Once upon", "return_token_strs": True}).json()
    assert answer["count"] == len(answer["tokens"])
    assert answer["max_model_len"] == 8192
    assert answer["token_strs"] == ["<bos>", "Once", " upon"]
    back = http.post("/detokenize", json={"tokens": answer["tokens"]}).json()
    assert back == {"prompt": "<bos>Once upon"}
    bare = http.post("/tokenize", json={"prompt": "Once upon", "add_special_tokens": False}).json()
    assert bare["tokens"] == answer["tokens"][1:]
    chat = http.post("/tokenize", json={"messages": USER}).json()
    text = http.post("/detokenize", json={"tokens": chat["tokens"]}).json()["prompt"]
    assert text.endswith("<|turn>model\n")
    assert http.post("/detokenize", json={"tokens": []}).json() == {"prompt": ""}


def test_version_and_description_are_served(http):
    assert set(http.get("/version").json()) == {"version"}
    paths = http.get("/openapi.json").json()["paths"]
    assert {CHAT, COMPLETIONS, "/tokenize", "/health", "/metrics"} <= set(paths)


def test_the_description_lists_the_fields_that_are_served(http):
    from gemma_jax.serve import bodies

    paths = http.get("/openapi.json").json()["paths"]
    for path, fields in ((CHAT, bodies._CHAT_FIELDS), (COMPLETIONS, bodies._COMPLETION_FIELDS)):
        content = paths[path]["post"]["requestBody"]["content"]
        assert set(content["application/json"]["schema"]["properties"]) == set(fields)


def test_metrics_follow_a_request(http):
    def value(name):
        lines = http.get("/metrics").text.splitlines()
        return sum(float(x.rsplit(" ", 1)[1]) for x in lines if x.startswith("gemma_jax:" + name))

    names = (
        "generation_tokens_total",
        "request_success_total",
        "time_to_first_token_seconds_count",
    )
    before = [value(name) for name in names]
    http.post(COMPLETIONS, json={"prompt": "a", "max_tokens": 6, "n": 2})
    assert [value(n) - b for n, b in zip(names, before, strict=True)] == [12, 2, 2]
    assert value("num_requests_running") == 0
