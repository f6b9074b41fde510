"""An engine without a model: it replays texts, with the interface of the real one."""

import collections
import itertools
import time

from gemma_jax.errors import CapacityError
from gemma_jax.outputs import Logprob
from gemma_jax.serve.request import CompletionDelta
from gemma_jax.text_side import TextSide
from gemma_jax.tokenizer import IncrementalDetokenizer

EOS = 106


class ReplayEngine:
    """Generates the tokens of `reply(request)`, a few a step, for a few requests at a time.

    Args:
      text: whose tokenizer is used.
      reply: request -> text; by default the prompt again, without its BOS.
      running: most completions at a time; further ones wait, `queue` of them at most.
      tokens: a step adds to each running completion.
      delay: seconds a step takes.
    """

    def __init__(self, text, reply=None, *, running=4, queue=10**9, tokens=4, delay=0.0):
        self.text, self.reply = text, reply or self.echo
        self.running, self.queue, self.tokens, self.delay = running, queue, tokens, delay
        self.requests = collections.deque(maxlen=1000)  # the last ones that were added
        self.aborted = []
        self.most_completions = 0
        self._live = {}

    def echo(self, request):
        return self.text.tokenizer.decode(request.prompt_token_ids[1:], skip_special_tokens=False)

    def add(self, request):
        if len(self._live) + request.params.n > self.running + self.queue:
            raise CapacityError("the queue is full; retry later")
        self.requests.append(request)
        for index in range(request.params.n):
            self._live[request.request_id, index] = self._deltas(request, index)
        self.most_completions = max(self.most_completions, len(self._live))

    def abort(self, request_id):
        self.aborted.append(request_id)
        for key in [key for key in self._live if key[0] == request_id]:
            del self._live[key]

    @property
    def has_work(self):
        return bool(self._live)

    def step(self):
        time.sleep(self.delay)
        deltas = []
        for key in list(itertools.islice(self._live, self.running)):
            delta = next(self._live[key])
            deltas.append(delta)
            if delta.finish_reason is not None:
                del self._live[key]
        return deltas

    def _deltas(self, request, index):
        tokenizer, params = self.text.tokenizer, request.params
        answer = self.reply(request)
        if isinstance(answer, Exception):
            yield CompletionDelta(
                request.request_id, index, "", [], finish_reason="error", error=str(answer)
            )
        k, last = params.prompt_logprobs, request.max_tokens
        if k is not None or last == 0:
            rest = request.prompt_token_ids[1:]
            scored = None if k is None else [None, *(self._position(i, k, -1.5) for i in rest)]
            reason = None if last else "length"
            yield CompletionDelta(
                request.request_id, index, "", [], finish_reason=reason, prompt_logprobs=scored
            )
        ids = [*tokenizer.encode(answer, add_bos=False), EOS]
        detokenizer = IncrementalDetokenizer(tokenizer, params.skip_special_tokens)
        last = min(len(ids), request.max_tokens)
        for start in range(0, last, self.tokens):
            new = ids[start : min(start + self.tokens, last)]
            shown = [token for token in new if token != EOS]
            text = detokenizer.push(shown)
            reason = None
            if start + self.tokens >= last:
                text += detokenizer.finish()
                reason = "stop" if new[-1] == EOS else "length"
            logprobs = None
            if params.logprobs is not None:
                logprobs = [self._position(token, params.logprobs) for token in new]
            yield CompletionDelta(request.request_id, index, text, new, logprobs, reason)

    def _position(self, token, k, logprob=-0.5):
        def entry(token_id, logprob, rank):
            return Logprob(logprob, rank, self.text.tokenizer.id_to_token(token_id))

        others = {200 + i: entry(200 + i, -2.0 - i, i + 2) for i in range(k - 1)}
        return {token: entry(token, logprob, 1)} | others


class ReplayLLM:
    """Stands for `LLM` where only its text side and engine are used."""

    def __init__(self, **options):
        self.text_side = TextSide.load("nano")
        self.engine = ReplayEngine(self.text_side, **options)
        self.max_num_seqs = self.engine.running

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass
