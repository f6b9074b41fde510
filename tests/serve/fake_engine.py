"""An engine without a model: replays scripted text, with the interface of the real one."""

import functools
import os
import time

import numpy as np

from gemma_jax.errors import CapacityError
from gemma_jax.outputs import Logprob
from gemma_jax.sequence import Sequence, TokenLogprobs
from gemma_jax.serve.engine_process import LoadedEngine
from gemma_jax.serve.request import CompletionDelta, EngineStats
from gemma_jax.text_side import TextSide

STORY = "Once upon a time there was a little fox. She lived in the wood. "
SCRIPTS = {
    "THINK": "<|channel>thought\nLet me see.<channel|>The answer is 4.<turn|>",
    "CALL": '<|tool_call>call:weather{city:<|"|>Oslo<|"|>,days:2}<tool_call|><|tool_response>',
    "SHORT": "Hello there, friend!<turn|>",
    "JSON": '{"name": "fox"}<turn|>',
}
"""The model's answer to a prompt with this word in it; another gets the story, for ever."""


class FakeEngine:
    """Every step gives each running completion a few tokens.

    A prompt with CRASH ends the process, FAIL ends with an error, REFUSE is not taken, and BUG
    raises.
    """

    def __init__(self, max_num_seqs=4, tokens_per_step=3, seconds_per_step=0.002):
        self._tokenizer = TextSide.load("nano").tokenizer
        self._slots, self._burst, self._seconds = max_num_seqs, tokens_per_step, seconds_per_step
        self._waiting, self._running = [], []
        self._prompt_tokens = self._generated = self._calls = 0
        self._story = self._tokenizer.encode(STORY, add_bos=False)

    @property
    def has_work(self):
        return bool(self._waiting or self._running)

    def stats(self):
        return EngineStats(
            waiting=len(self._waiting),
            running=len(self._running),
            kv_usage=len(self._running) / self._slots,
            prompt_tokens=self._prompt_tokens,
            generated_tokens=self._generated,
            device_calls=self._calls,
        )

    def add(self, request):
        prompt = self._tokenizer.decode(request.prompt_token_ids, skip_special_tokens=False)
        prompt = prompt.rsplit("<|turn>user", 1)[-1]
        if "REFUSE" in prompt:
            raise CapacityError("the prompt needs more pages than there are")
        if "BUG" in prompt:
            raise ZeroDivisionError("a bug")
        script = next((text for word, text in SCRIPTS.items() if word in prompt), None)
        ids = self._story if script is None else self._tokenizer.encode(script, add_bos=False)
        self._prompt_tokens += len(request.prompt_token_ids)
        for index in range(request.params.n):
            sequence = Sequence(
                request.prompt_token_ids, request.params, index, np.zeros(2, np.uint32),
                request.max_tokens, request.eos_ids, self._tokenizer,
            )  # fmt: skip
            self._waiting.append((request.request_id, prompt, sequence, ids))
            if request.max_tokens == 0:
                sequence.finish_reason = "length"

    def abort(self, request_id):
        for entries in (self._waiting, self._running):
            entries[:] = [entry for entry in entries if entry[0] != request_id]

    def step(self):
        time.sleep(self._seconds)
        self._calls += 1
        while self._waiting and len(self._running) < self._slots:
            self._running.append(self._waiting.pop(0))
        deltas = [self._advance(*entry) for entry in self._running]
        self._running = [entry for entry in self._running if not entry[2].finished]
        return deltas

    def _advance(self, request_id, prompt, sequence, ids):
        if "CRASH" in prompt and sequence.token_ids:
            os._exit(3)
        if "FAIL" in prompt and sequence.token_ids:
            sequence.finish_reason = "error"
            return CompletionDelta(
                request_id, sequence.index, "", [], finish_reason="error", error="out of luck"
            )
        text, gained = "", []
        while len(gained) < self._burst and not sequence.finished:
            token = ids[len(sequence.token_ids) % len(ids)]
            text += sequence.append(token, TokenLogprobs(-0.5, 1, [token, 300], [-0.5, -1.5]))
            gained.append(token)
        self._generated += len(gained)
        k, scored = sequence.params.prompt_logprobs, None
        if k is not None and len(gained) == len(sequence.token_ids):  # its first delta
            rest = sequence.prompt_token_ids[1:]
            scored = [None, *(self._logprobs(token, k) for token in rest)]
        logprobs = [self._logprobs(token, sequence.params.logprobs or 0) for token in gained]
        return CompletionDelta(
            request_id, sequence.index, text, gained,
            None if sequence.params.logprobs is None else logprobs,
            sequence.finish_reason, sequence.stop_reason, num_cached_tokens=1,
            prompt_logprobs=scored,
        )  # fmt: skip

    def _logprobs(self, token, k):
        def entry(token_id, rank):
            return Logprob(0.5 - rank, rank, self._tokenizer.id_to_token(token_id))

        best = [token, *(i for i in range(300, 321) if i != token)][: max(k, 1)]
        return {token_id: entry(token_id, rank) for rank, token_id in enumerate(best, start=1)}


def build(max_num_seqs=4, loading_seconds=0.0, **settings):
    """Return a loaded fake engine."""
    time.sleep(loading_seconds)
    return LoadedEngine(FakeEngine(max_num_seqs, **settings), max_num_seqs)


def build_scripted(max_num_seqs=4):
    """Return the real engine over a model that says the same as the fake one."""
    from gemma_jax.testing.scripted import scripted_engine

    text_side = TextSide.load("nano")
    tokenizer = text_side.tokenizer

    def respond(prompt_ids):
        prompt = tokenizer.decode(prompt_ids, skip_special_tokens=False)
        prompt = prompt.rsplit("<|turn>user", 1)[-1]
        script = next((text for word, text in SCRIPTS.items() if word in prompt), STORY)
        return tokenizer.encode(script, add_bos=False)

    engine = scripted_engine(text_side, respond, max_num_seqs=max_num_seqs, decode_steps=3)
    return LoadedEngine(engine, max_num_seqs)


def factory(scripted=False, **settings):
    """Return what the engine's process calls."""
    return functools.partial(build_scripted if scripted else build, **settings)
