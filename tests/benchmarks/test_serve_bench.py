"""`gemma-jax bench serve` against a tiny server that streams at known times."""

import asyncio
import json
import threading

import numpy as np
import pytest

from gemma_jax.benchmarks import cli
from gemma_jax.benchmarks.http_client import Answer, arrival_offsets
from gemma_jax.benchmarks.serve_metrics import result_fields
from gemma_jax.errors import ConfigError

GAP = 0.02  # seconds before every event


class SseServer:
    """Answers every completion and chat with `max_tokens` tokens, two an event, `GAP` apart."""

    def __init__(self):
        self.bodies = []
        self.keys = []
        self.live = self.most_live = 0
        self.fail_with = None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        self._server = self._call(asyncio.start_server(self._serve, "127.0.0.1", 0))
        port = self._server.sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"

    def _call(self, coroutine):
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(10)

    def close(self):
        async def stop():
            self._server.close()
            tasks = asyncio.all_tasks() - {asyncio.current_task()}
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

        self._call(stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    async def _serve(self, reader, writer):
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                lines = head.decode().split("\r\n")
                headers = dict(line.lower().split(": ", 1) for line in lines[1:] if line)
                body = await reader.readexactly(int(headers.get("content-length", 0)))
                self.keys.append(headers.get("authorization"))
                await self._answer(lines[0].split()[1], body, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def _answer(self, path, body, writer):
        if path == "/v1/models":
            text = json.dumps({"data": [{"id": "served"}]})
            writer.write(f"HTTP/1.1 200 OK\r\nContent-Length: {len(text)}\r\n\r\n{text}".encode())
            return
        body = json.loads(body)
        self.bodies.append(body)
        if self.fail_with and len(self.bodies) > 1:
            writer.write(self.fail_with)
            return
        self.live += 1
        self.most_live = max(self.most_live, self.live)
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        for event in self._events(path, body):
            data = f"data: {event}\n\n".encode()
            writer.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
            await writer.drain()
            await asyncio.sleep(GAP if "choices" in event else 0)
        self.live -= 1
        writer.write(b"0\r\n\r\n")
        await writer.drain()

    def _events(self, path, body):
        chat = path == "/v1/chat/completions"
        if chat:
            yield json.dumps({"choices": [{"delta": {"role": "assistant", "content": ""}}]})
        for _ in range(body["max_tokens"] // 2):
            piece = {"delta": {"content": "a b"}} if chat else {"text": "a b"}
            yield json.dumps({"choices": [{"index": 0, **piece}]})
        prompt = body["messages"][0]["content"].split() if chat else body["prompt"]
        usage = {"prompt_tokens": len(prompt), "completion_tokens": body["max_tokens"]}
        yield json.dumps({"choices": [], "usage": usage})
        yield "[DONE]"


@pytest.fixture
def server():
    server = SseServer()
    yield server
    server.close()


def run(server, *flags):
    return cli.main(["serve", "--base-url", server.url, *flags])


SHAPE = ["--num-prompts", "4", "--input-len", "6", "--output-len", "8"]


def test_the_result_has_the_fields_and_numbers_of_the_vllm_tool(server, tmp_path, capsys):
    flags = ["--save-result", "--save-detailed", "--result-dir", str(tmp_path / "results")]
    rows = tmp_path / "rows.jsonl"
    assert run(server, *SHAPE, *flags, "--output-json", str(rows)) == 0
    (path,) = (tmp_path / "results").iterdir()
    result = json.loads(path.read_text())
    assert path.name == f"openai-infqps-served-{result['date']}.json"
    statistics = {
        f"{kind}_{name}_ms"
        for kind in ("mean", "median", "std", "p99")
        for name in ("ttft", "tpot", "itl", "e2el")
    }
    assert statistics < set(result)
    assert (result["backend"], result["model_id"]) == ("openai", "served")
    assert (result["request_rate"], result["max_concurrency"]) == ("inf", None)
    assert (result["completed"], result["failed"], result["num_prompts"]) == (4, 0, 4)
    assert (result["total_input_tokens"], result["total_output_tokens"]) == (24, 32)
    assert result["output_throughput"] == pytest.approx(32 / result["duration"])
    assert result["total_token_throughput"] == pytest.approx(56 / result["duration"])
    # Four events with a gap between them.
    assert result["median_itl_ms"] == pytest.approx(1e3 * GAP, rel=0.5)
    assert result["mean_e2el_ms"] > 3e3 * GAP
    assert [len(itl) for itl in result["itls"]] == [3] * 4
    assert result["errors"] == [""] * 4

    row = json.loads(rows.read_text())
    assert (row["bench"], row["case"], row["status"]) == ("serve", "4x6+8 rate inf", "ok")
    assert row["device"]["kind"]
    assert len(row["samples_ms"]) == 4
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert last == row["result"] == {k: result[k] for k in last}


def test_prompts_are_random_ids_and_answers_have_a_fixed_length(server):
    assert run(server, *SHAPE, "--vocab-size", "500", "--num-warmups", "0") == 0
    assert len(server.bodies) == 4
    assert len({tuple(body["prompt"]) for body in server.bodies}) == 4
    for body in server.bodies:
        assert len(body["prompt"]) == 6
        assert all(400 <= token < 500 for token in body["prompt"])
        assert (body["max_tokens"], body["ignore_eos"], body["temperature"]) == (8, True, 0.0)


def test_a_chat_is_timed_from_its_first_token_not_from_its_role(server, tmp_path, capsys):
    flags = ["--backend", "openai-chat", "--model", "mine", "--no-ignore-eos"]
    assert run(server, *SHAPE, *flags) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["median_ttft_ms"] > 1e3 * GAP
    assert result["total_input_tokens"] == 24
    assert {body["model"] for body in server.bodies} == {"mine"}
    assert all("ignore_eos" not in body for body in server.bodies)


def test_concurrency_is_limited(server):
    assert run(server, *SHAPE, "--max-concurrency", "2") == 0
    assert server.most_live == 2


def test_a_sweep_is_plotted_with_its_numbers_beside_it(server, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    plot = tmp_path / "plots" / "sweep.png"
    assert run(server, *SHAPE, "--request-rate", "50", "100", "inf", "--plot", str(plot)) == 0
    assert plot.read_bytes().startswith(b"\x89PNG")
    results = json.loads(plot.with_suffix(".json").read_text())
    assert [result["request_rate"] for result in results] == [50, 100, "inf"]
    assert set(json.loads(capsys.readouterr().out.splitlines()[-1])["cases"]) == {
        f"4x6+8 rate {rate}" for rate in ("50", "100", "inf")
    }


@pytest.mark.parametrize(
    ("answer", "note"),
    [
        (b"HTTP/1.1 429 Too Many\r\nContent-Length: 4\r\n\r\nbusy", "HTTP 429: busy"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 15\r\n\r\ndata: [DONE]\n\n\n", "without usage"),
        (
            b'HTTP/1.1 200 OK\r\nContent-Length: 21\r\n\r\ndata: {"error": "x"}\n',
            "4 requests failed, the first: x",
        ),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\n", "ReadTimeout"),
    ],
)
def test_failed_requests_are_counted_and_explained(server, answer, note, tmp_path, capsys):
    server.fail_with = answer
    rows = tmp_path / "rows.jsonl"
    assert run(server, *SHAPE, "--timeout", "0.5", "--output-json", str(rows)) == 1
    row = json.loads(rows.read_text())
    assert (row["status"], row["result"]["failed"]) == ("error", 4)
    assert note in row["note"]


def test_an_api_key_is_sent_and_not_recorded(server, tmp_path):
    rows = tmp_path / "rows.jsonl"
    assert run(server, *SHAPE, "--api-key", "secret", "--output-json", str(rows)) == 0
    assert set(server.keys) == {"bearer secret"}
    assert "secret" not in rows.read_text()


def test_a_server_that_is_not_there_is_named(server):
    url = server.url.rsplit(":", 1)[0] + ":9"
    with pytest.raises(ConfigError, match=r"--base-url http://127.0.0.1:9 lists no models"):
        cli.main(["serve", "--base-url", url])


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--plot", "x.jpg"], r"--plot x.jpg: expected a file name that ends in .png"),
        (["--vocab-size", "7"], "--vocab-size 7: expected more than 400"),
    ],
)
def test_bad_values_of_serve_flags_are_refused(flags, message):
    with pytest.raises(ConfigError, match=message):
        cli.main(["serve", *flags])


@pytest.mark.parametrize("rate", [0.5, 20.0])
@pytest.mark.parametrize("burstiness", [0.5, 1.0])
def test_requests_arrive_at_the_asked_rate(rate, burstiness):
    offsets = arrival_offsets(20_000, rate, burstiness, seed=0)
    gaps = np.diff(offsets)
    assert offsets[0] == 0
    assert gaps.mean() == pytest.approx(1 / rate, rel=0.05)
    assert gaps.std() == pytest.approx(gaps.mean() / np.sqrt(burstiness), rel=0.05)


def test_an_infinite_rate_sends_all_at_once():
    assert arrival_offsets(3, float("inf"), 1.0, seed=0) == [0.0, 0.0, 0.0]


def test_latencies_leave_out_the_failed_and_the_first_token():
    good = Answer(ttft=0.1, itl=[0.2, 0.2], latency=0.5, prompt_tokens=3, output_tokens=5)
    single = Answer(ttft=0.3, latency=0.3, prompt_tokens=3, output_tokens=1)
    failed = Answer(error="HTTP 500")
    fields = result_fields([good, single, failed], duration=2.0)
    assert (fields["completed"], fields["failed"]) == (2, 1)
    assert fields["mean_ttft_ms"] == pytest.approx(200)
    assert fields["mean_tpot_ms"] == pytest.approx(100)
    assert fields["median_itl_ms"] == pytest.approx(200)
    assert fields["p99_e2el_ms"] == pytest.approx(498)
    assert fields["request_throughput"] == 1
