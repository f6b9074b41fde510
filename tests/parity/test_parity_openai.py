"""`record --engine openai-url` against a small server in this process."""

import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from gemma_jax.cli import EXIT_BAD_INPUT, EXIT_FAILED, EXIT_OK, main
from gemma_jax.parity.records import read_record

PROMPTS = [
    {"id": "a", "prompt_token_ids": [2, 3000]},
    {"id": 7, "prompt_token_ids": [2, 3010, 3011]},
]


class Server:
    """Answers completions: after token t come t + 1 (-0.25) and t + 2 (-2.0)."""

    def __init__(self):
        self.bodies, self.headers = [], []
        self.status, self.name_of = 200, lambda token: f"token_id:{token}"
        self.gives_ids = True
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                self.answer({"data": [{"id": "served"}]})

            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                server.bodies.append(body)
                server.headers.append(dict(self.headers))
                self.answer(server.completion(body))

            def answer(self, value):
                data = json.dumps(value).encode()
                self.send_response(server.status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_):
                pass

        self.http = HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}/v1"

    def completion(self, body):
        if self.status != 200:
            return {"error": {"message": "no room"}}
        tokens = list(body["prompt"])
        first = 0 if body.get("echo") else len(tokens)
        for _ in range(body["max_tokens"]):
            tokens.append(tokens[-1] + 1)
        steps = [
            None if i == 0 else {self.name_of(t + 1): -0.25, self.name_of(t + 2): -2.0}
            for i, t in enumerate([0, *tokens[:-1]])
        ]
        shown = tokens[first:]
        choice = {
            "text": "",
            "logprobs": {
                "tokens": [self.name_of(t) for t in shown],
                "token_logprobs": [None if s is None else s.get(self.name_of(t), -9.0)
                                   for t, s in zip(shown, steps[first:], strict=True)],
                "top_logprobs": steps[first:],
            },
        }  # fmt: skip
        return {
            "model": "served",
            "choices": [choice | ({"token_ids": shown} if self.gives_ids else {})],
        }


@pytest.fixture
def server():
    server = Server()
    thread = threading.Thread(target=server.http.serve_forever, args=(0.01,))
    thread.start()
    yield server
    server.http.shutdown()
    thread.join()
    server.http.server_close()


@pytest.fixture
def record(server, tmp_path, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps(x) + "\n" for x in PROMPTS))
    output = tmp_path / "r.jsonl"

    def run(*flags):
        source = [] if "--teacher-force" in flags else ["--prompts", str(prompts)]
        code = main(
            ["parity", "record", "--engine", "openai-url", "--url", server.url, "--max-tokens", "3",
             "--logprobs", "2", "--output", str(output), *source, *flags]
        )  # fmt: skip
        return code, output

    return run


def test_tokens_and_candidates_of_a_server_become_a_record(record, server):
    code, path = record("--dtype", "bfloat16")
    assert code == EXIT_OK
    got = read_record(path)
    assert [s.id for s in got.streams] == ["a", 7]
    assert got.streams[0].tokens.tolist() == [3001, 3002, 3003]
    assert got.streams[1].candidates.as_pairs()[0] == [[3012, -0.25], [3013, -2.0]]
    assert (got.engine, got.dtype, got.model["name"]) == ("openai", "bfloat16", "nano")
    assert server.bodies[0]["temperature"] == 0
    assert {body["model"] for body in server.bodies} == {"served"}
    assert server.headers[0]["Authorization"] == "Bearer secret"
    assert "secret" not in path.read_text()


def test_given_tokens_are_scored_by_echo(record, server, tmp_path):
    given = tmp_path / "given.jsonl"
    rows = [{"id": "a", "prompt_token_ids": [2, 3000], "token_ids": [3001, 99, 100]}]
    given.write_text("".join(json.dumps(x) + "\n" for x in [{"header": {}}, *rows]))
    code, path = record("--teacher-force", str(given))
    assert code == EXIT_OK
    (stream,) = read_record(path).streams
    assert stream.tokens.tolist() == [3001, 99, 100]
    assert stream.candidates.as_pairs() == [
        [[3001, -0.25], [3002, -2.0]],
        [[3002, -0.25], [3003, -2.0], [99, -9.0]],
        [[100, -0.25], [101, -2.0]],
    ]
    assert server.bodies[0]["echo"] is True


def test_server_that_gives_texts_is_understood_through_the_vocabulary(record, server):
    from importlib import resources

    from gemma_jax.tokenizer import Tokenizer

    tokenizer = Tokenizer.from_dir(str(resources.files("gemma_jax") / "data" / "nano"))
    server.gives_ids, server.name_of = False, lambda token: tokenizer.decode([token], False)
    code, path = record()
    assert code == EXIT_OK
    assert read_record(path).streams[0].tokens.tolist() == [3001, 3002, 3003]


def test_token_text_that_is_not_in_the_vocabulary_is_named(record, server, capsys):
    server.name_of = lambda token: f"?{token}?"
    code, path = record()
    assert (code, path.exists()) == (EXIT_BAD_INPUT, False)
    assert "has no known id; ask the server for ids" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("status", "code"), [(429, EXIT_FAILED), (500, EXIT_FAILED), (404, EXIT_BAD_INPUT)]
)
def test_refusals_of_the_server_are_told_apart(record, server, status, code, capsys):
    server.status = status
    assert record("--served-model", "x")[0] == code
    assert f"answers {status}: " in capsys.readouterr().err


def test_unreachable_server_is_bad_input(record, server, capsys):
    assert record("--url", "http://127.0.0.1:9/v1", "--served-model", "x")[0] == EXIT_BAD_INPUT
    assert "cannot be reached" in capsys.readouterr().err
    assert record("--url", "127.0.0.1:9")[0] == EXIT_BAD_INPUT
