"""Small record files for tests, and a model that scores from a table."""

import json

from gemma_jax.config import ModelConfig
from gemma_jax.outputs import CompletionOutput, Logprob, RequestOutput

VOCAB = 64
HEADER = {
    "format": "gemma-jax-records/1",
    "engine": "transformers",
    "dtype": "bfloat16",
    "model": {"name": "m", "vocab_size": VOCAB, "config_sha256": "c1", "weights_sha256": "w1"},
    "settings": {"max_num_seqs": 4},
}


def row(row_id, prompt, top, **fields):
    """A row whose tokens are its best candidates; `top` is a list of [[id, logprob], …]."""
    tokens = [at[0][0] for at in top]
    return {"id": row_id, "prompt_token_ids": prompt, "token_ids": tokens, "top": top} | fields


def write(path, rows, header=HEADER):
    """A record file of these rows."""
    path.write_text("".join(json.dumps(x) + "\n" for x in [{"header": header}, *rows]))
    return path


class TableModel:
    """In the place of `LLM`: a function of the tokens so far gives the candidates."""

    model_config = ModelConfig(vocab_size=VOCAB, sliding_window=8, num_hidden_layers=6)
    max_model_len, max_num_seqs = 32, 4

    def __init__(self, table):
        self._table = table

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def _step(self, prefix):
        return {token: Logprob(value) for token, value in self._table(tuple(prefix))}

    def score(self, token_ids, logprobs=0):
        return [None] + [self._step(token_ids[:i]) for i in range(1, len(token_ids))]

    def generate(self, prompts, params, use_tqdm=False):
        return [
            self._greedy(p["prompt_token_ids"], q) for p, q in zip(prompts, params, strict=True)
        ]

    def _greedy(self, prompt, params):
        ids, steps = list(prompt), []
        for _ in range(params.max_tokens):
            steps.append(self._step(ids))
            ids.append(min(steps[-1], key=lambda i: (-steps[-1][i].logprob, i)))
        completion = CompletionOutput(0, "", ids[len(prompt) :], logprobs=steps)
        return RequestOutput("0", None, prompt, outputs=[completion], finished=True)
