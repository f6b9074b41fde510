"""One server with a fake engine for all tests that do not end it, and the official client."""

import importlib.util

import pytest
import server_process
from server_process import KEY

NEEDED = ("fastapi", "httpx", "openai", "prometheus_client", "schemathesis", "uvicorn")

if any(importlib.util.find_spec(name) is None for name in NEEDED):
    # An environment without the extra 'serve' and the group 'dev', such as that of the newest JAX.
    collect_ignore = [
        "test_api_errors.py",
        "test_chat_page.py",
        "test_openai_client.py",
        "test_serve_command.py",
        "test_server_faults.py",
        "test_server_fuzz.py",
    ]


def pytest_configure(config):
    config.addinivalue_line("markers", "browser: needs Chromium (skipped without it)")


@pytest.fixture(scope="session")
def server():
    """A ready server that asks for a key, runs 4 completions and queues 8."""
    settings = {"api_keys": [KEY], "max_queue": 8, "max_body_bytes": 100_000}
    with server_process.start(settings) as server:
        yield server


@pytest.fixture(scope="session")
def scripted_server():
    """The same with the real engine over a scripted model."""
    with server_process.start({"api_keys": [KEY]}, {"scripted": True}) as server:
        yield server


@pytest.fixture
def client(request):
    """The official client of that server, or of the one that a test's parameter names."""
    import openai

    server = request.getfixturevalue(getattr(request, "param", "server"))
    with openai.OpenAI(base_url=server.url + "/v1", api_key=KEY, max_retries=0) as client:
        yield client
