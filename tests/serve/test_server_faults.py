"""Clients that vanish, overload, signals, and the end of the engine's process."""

import asyncio
import contextlib
import json
import os
import signal
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
import server_process
from server_process import KEY, is_alive, wait_for

COMPLETIONS = "/v1/completions"
AUTH = {"Authorization": f"Bearer {KEY}"}


def metric(url, name):
    """The sum of a metric's samples."""
    lines = httpx.get(url + "/metrics").text.splitlines()
    return sum(float(x.rsplit(" ", 1)[1]) for x in lines if x.startswith("gemma_jax:" + name))


def is_idle(url):
    return metric(url, "num_requests_running") + metric(url, "num_requests_waiting") == 0


def begin_stream(url, body, path=COMPLETIONS):
    """Send a request over a socket of its own and read its first event."""
    host, port = url.removeprefix("http://").split(":")
    connection = socket.create_connection((host, int(port)), timeout=20)
    data = json.dumps(body | {"stream": True}).encode()
    connection.sendall(
        f"POST {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n".encode()
        + data
    )
    received = b""
    while b"data:" not in received:
        part = connection.recv(4096)
        assert part, received
        received += part
    return connection


# --- clients ------------------------------------------------------------------------------------


def test_a_client_that_vanishes_frees_its_place(server):
    wait_for(lambda: is_idle(server.url))
    before = metric(server.url, "request_success_total")
    streams = [begin_stream(server.url, {"prompt": "a", "max_tokens": 8000}) for _ in range(4)]
    wait_for(lambda: metric(server.url, "num_requests_running") == 4)
    for stream in streams:
        stream.close()
    wait_for(lambda: is_idle(server.url), seconds=5)
    assert metric(server.url, "request_success_total") == before + 4
    assert metric(server.url, 'request_success_total{finished_reason="abort"') >= 4


def test_a_client_that_vanishes_while_it_waits_for_a_whole_answer_frees_its_place(server):
    body = {"prompt": "a", "max_tokens": 8000, "n": 2}
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(server.url + COMPLETIONS, json=body, headers=AUTH, timeout=0.5)
    wait_for(lambda: is_idle(server.url), seconds=5)


async def post_all(url, bodies):
    """The answers to bodies that are sent at once."""
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(headers=AUTH, limits=limits, timeout=60) as http:
        return await asyncio.gather(*[http.post(url + COMPLETIONS, json=body) for body in bodies])


def test_overload_queues_then_refuses_and_answers_all_that_it_took(server):
    body = {"prompt": "a", "max_tokens": 300}
    answers = asyncio.run(post_all(server.url, [body] * 120))  # ten times what runs and waits
    taken = [a for a in answers if a.status_code == 200]
    refused = [a for a in answers if a.status_code == 429]
    assert len(taken) + len(refused) == 120
    assert len(taken) >= 12
    assert refused
    assert all(a.json()["usage"]["completion_tokens"] == 300 for a in taken)
    assert all(int(a.headers["retry-after"]) >= 1 for a in refused)
    assert refused[0].json()["error"]["code"] == "rate_limit_exceeded"
    wait_for(lambda: is_idle(server.url))


# --- the life of the server ----------------------------------------------------------------------


def test_a_server_is_unready_while_it_loads_and_its_engine_does_not_outlive_it():
    with server_process.start(engine={"loading_seconds": 1.0}, ready=False) as server:
        health = wait_for(lambda: _answer(server.url + "/health"), server)
        assert (health.status_code, health.json()) == (503, {"status": "starting"})
        early = httpx.post(server.url + COMPLETIONS, json={"prompt": "a"})
        assert early.status_code == 503
        assert "being loaded" in early.json()["error"]["message"]
        assert early.headers["retry-after"]
        assert "ready" not in server.errors()
        wait_for(lambda: httpx.get(server.url + "/health").status_code == 200, server)
        assert httpx.post(server.url + COMPLETIONS, json={"prompt": "a"}).status_code == 200
        assert server.errors().count("gemma-jax: ready after") == 1
        engine = server.engine_pid()
        assert is_alive(engine)
        server.kill()
        wait_for(lambda: not is_alive(engine), seconds=10)


def _answer(url):
    with contextlib.suppress(httpx.TransportError):
        return httpx.get(url)


def test_sigterm_while_the_model_loads_ends_at_once():
    with server_process.start(engine={"loading_seconds": 60}, ready=False) as server:
        wait_for(lambda: _answer(server.url + "/health"), server)
        begin = time.monotonic()
        assert server.terminate() == 0, server.errors()
        assert time.monotonic() - begin < 8


def test_sigterm_under_load_ends_what_runs_and_nothing_else():
    with server_process.start() as server, ThreadPoolExecutor(1) as pool:
        bodies = [{"prompt": "a", "max_tokens": 900}] * 8
        answers = pool.submit(asyncio.run, post_all(server.url, bodies))
        wait_for(lambda: metric(server.url, "num_requests_running") == 4)
        engine = server.engine_pid()
        os.kill(engine, signal.SIGTERM)  # the whole group may get it
        assert server.terminate() == 0, server.errors()
        for answer in answers.result():
            assert answer.json()["usage"]["completion_tokens"] == 900
        with pytest.raises(httpx.ConnectError):
            httpx.get(server.url + "/health")
        assert not is_alive(engine)


def test_neither_a_request_nor_a_drain_takes_longer_than_it_may():
    settings = {"request_timeout": 1.0, "drain_timeout": 0.3}
    with server_process.start(settings, {"seconds_per_step": 0.05}) as server:
        body = {"prompt": "a", "max_tokens": 8000}
        answer = httpx.post(server.url + COMPLETIONS, json=body, timeout=20)
        assert answer.status_code == 504
        assert answer.json()["error"]["code"] == "timeout"
        wait_for(lambda: is_idle(server.url), seconds=5)
        body["stream"] = True
        with httpx.stream("POST", server.url + COMPLETIONS, json=body) as stream:
            lines = stream.iter_lines()
            assert next(lines).startswith("data: ")
            begin = time.monotonic()
            server.process.send_signal(signal.SIGTERM)
            last = [line for line in lines if line][-1]
        assert "stopping" in json.loads(last.removeprefix("data: "))["error"]["message"]
        assert server.process.wait(10) == 0
        assert time.monotonic() - begin < 8


@pytest.mark.parametrize("how", ["from within", pytest.param("killed", marks=pytest.mark.slow)])
def test_the_end_of_the_engine_ends_requests_with_an_error_and_the_server_with_a_code(how):
    with server_process.start() as server:
        engine = server.engine_pid()
        stream = begin_stream(server.url, {"prompt": "a", "max_tokens": 8000})
        if how == "killed":
            os.kill(engine, signal.SIGKILL)
        else:
            answer = httpx.post(server.url + COMPLETIONS, json={"prompt": "CRASH"}, timeout=20)
            assert answer.status_code == 503
            assert "ended unexpectedly" in answer.json()["error"]["message"]
        received = b""
        while part := stream.recv(65_536):
            received += part
        stream.close()
        assert b"ended unexpectedly" in received
        assert b"[DONE]" not in received
        assert server.process.wait(10) == 1
        assert "error: the engine's process has ended unexpectedly" in server.errors()


def test_a_port_that_is_taken_is_said_before_anything_is_loaded(server):
    port = int(server.url.rsplit(":", 1)[1])
    with pytest.raises(AssertionError, match=f"port={port}: cannot be listened on"):
        server_process.start({"port": port})


def test_a_reader_that_does_not_read_does_not_hold_up_the_others(server):
    lazy = [begin_stream(server.url, {"prompt": "a", "max_tokens": 8000}) for _ in range(2)]
    begin = threading.Event()
    begin.wait(0.2)
    body = {"prompt": "a", "max_tokens": 30}
    answer = httpx.post(server.url + COMPLETIONS, json=body, headers=AUTH, timeout=10)
    assert answer.status_code == 200
    for stream in lazy:
        stream.close()
    wait_for(lambda: is_idle(server.url), seconds=10)
