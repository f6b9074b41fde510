"""A model that answers at once, in the place of `LLM`, for tests of what surrounds it."""

from dataclasses import dataclass

import pytest

from gemma_jax.cli import options
from gemma_jax.errors import RequestError
from gemma_jax.generation_config import GenerationDefaults
from gemma_jax.outputs import CompletionOutput, Logprob, RequestOutput

EOS = 1


@dataclass
class Chunk:
    text: str
    finish_reason: str | None = None


class FakeLLM:
    """Continues a prompt with its own words in capitals, one token a character."""

    max_num_seqs = 2
    generation_defaults = GenerationDefaults(eos_token_ids=(EOS,), do_sample=True, top_k=64)

    def __init__(self, **settings):
        self.settings = settings
        self.calls = []
        self.fail_after = None
        self.closed = False

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.closed = True

    def generate(self, prompts, sampling_params=None, use_tqdm=True):
        if self.fail_after is not None and len(self.calls) >= self.fail_after:
            raise KeyboardInterrupt
        self.calls.append((prompts, sampling_params))
        return [self._output(p, s) for p, s in zip(prompts, sampling_params, strict=True)]

    def _output(self, prompt, params):
        ids = prompt.get("prompt_token_ids") or [ord(c) for c in prompt.get("prompt", "")]
        if not ids:
            return RequestOutput("0", "", [], finished=True, error="the prompt is empty")
        text = "".join(map(chr, ids)).upper()[: params.max_tokens]
        out = [*(ord(c) for c in text), EOS]
        logprobs = None
        if params.logprobs is not None:
            logprobs = [{t: Logprob(-0.25, 1), t + 1: Logprob(-2.0, 2)} for t in out]
        completion = CompletionOutput(0, text, out, logprobs=logprobs, finish_reason="stop")
        return RequestOutput("0", prompt.get("prompt"), ids, outputs=[completion], finished=True)

    def chat(self, messages, sampling_params=None, use_tqdm=True):
        texts = [" | ".join(m["content"] for m in conversation) for conversation in messages]
        return self.generate([{"prompt": text} for text in texts], sampling_params)

    def stream(self, prompt, sampling_params=None):
        if not prompt:
            raise RequestError("the prompt is empty")
        self.calls.append((prompt, sampling_params))
        for word in prompt.upper().split():
            yield Chunk(word + " ")
        yield Chunk("", "stop")

    def stream_chat(self, messages, sampling_params=None):
        self.calls.append((messages, sampling_params))
        text = messages[-1]["content"]
        if text == "too long":
            raise RequestError("the prompt is longer than the context")
        for word in f"{len(messages)} messages: {text}".split():
            if word == "interrupt":
                raise KeyboardInterrupt
            yield Chunk(word + " ")


@pytest.fixture
def llm(monkeypatch):
    """The fake model, which `options.load_model` returns."""
    fake = FakeLLM()
    monkeypatch.setattr(options, "load_model", lambda args: fake)
    return fake
