"""Programs compiled ahead of their requests: which, and that the requests then compile nothing."""

import jax
import pytest
from engine_helpers import complete, make_engine, request
from model_helpers import random_runner, shallow

from gemma_jax.serve import rehearsal

PROMPTS = [[2, *range(10, 10 + n)] for n in (5, 60, 3)]


@pytest.fixture(scope="module")
def runner():
    return random_runner(shallow("31b-tiny"))


@pytest.fixture
def compilations():
    """Seconds of every compilation by XLA from here on."""
    seen: list[float] = []

    def listen(event, seconds, **_):
        if event.endswith("backend_compile_duration"):
            seen.append(seconds)

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield seen
    jax.monitoring.unregister_event_duration_listener(listen)


def batch(prompts=PROMPTS):
    return [request(p, 12, f"r{i}", eos=()) for i, p in enumerate(prompts)]


def test_rehearsed_requests_compile_nothing_and_leave_no_trace(runner, compilations):
    engine = make_engine(runner)
    programs = engine.compile_for([batch(), batch(PROMPTS[:1])])
    assert programs >= 3
    assert len(compilations) >= programs
    assert not engine.has_work
    stats = engine.stats()
    assert (stats.generated_tokens, stats.device_calls, stats.kv_usage) == (0, 0, 0)
    compilations.clear()
    outputs = complete(engine, batch())
    assert [len(set(o.outputs[0].token_ids)) > 1 for o in outputs] == [True] * 3  # not made up
    again = complete(engine, batch(PROMPTS[:1]))
    assert compilations == []
    assert again[0].outputs[0].token_ids == outputs[0].outputs[0].token_ids
    # The whole pages of a rehearsed prompt hold nothing, and must not be found in the prefix cache.
    assert outputs[1].num_cached_tokens == 0


def test_running_requests_are_not_disturbed(runner):
    engine = make_engine(runner)
    engine.add(batch()[0])
    with pytest.raises(RuntimeError, match="requests are running"):
        engine.compile_for([])


def test_a_program_that_does_not_compile_ahead_is_left_to_its_call(runner, monkeypatch, caplog):
    class Broken(rehearsal.Rehearsal):
        def call(self, program, static, arrays):
            answer = super().call(program, static, arrays)
            self._compiling |= {key: self._pool.submit(int, "no") for key in self._compiling}
            return answer

    monkeypatch.setattr("gemma_jax.serve.engine.Rehearsal", Broken)
    engine = make_engine(runner)
    assert engine.compile_for([batch(PROMPTS[:1])]) > 0
    assert "compiling ahead failed: invalid literal" in caplog.text
    assert complete(engine, batch(PROMPTS[:1]))[0].outputs[0].token_ids


def test_no_prompt_is_scored_ahead(runner, monkeypatch):
    engine = make_engine(runner)
    monkeypatch.setattr(type(runner), "score", lambda *_, **__: pytest.fail("scored"))
    assert engine.compile_for([[request(PROMPTS[1], 12, "r", eos=(), prompt_logprobs=2)]]) > 0
