"""One server with a fake engine for all tests that do not end it, and the official client."""

import pytest

pytest.importorskip("fastapi", reason="needs the extra 'serve'")

import openai
import server_process
from server_process import KEY


def pytest_configure(config):
    config.addinivalue_line("markers", "browser: needs Chromium (skipped without it)")


@pytest.fixture(scope="session")
def server():
    """A ready server that asks for a key, runs 4 completions and queues 8."""
    settings = {"api_keys": [KEY], "max_queue": 8, "max_body_bytes": 100_000}
    with server_process.start(settings) as server:
        yield server


@pytest.fixture
def client(server):
    with openai.OpenAI(base_url=server.url + "/v1", api_key=KEY, max_retries=0) as client:
        yield client
