"""An engine behind a URL: any OpenAI-compatible completions endpoint that gives logprobs.

Prompts are sent as token ids. Tokens come back as ids where the server knows vLLM's
`return_token_ids` and `return_tokens_as_token_ids`; otherwise their texts are looked up in the
model's vocabulary, which must be unambiguous. Teacher forcing echoes the sequence as a prompt.
"""

import http.client
import json
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from gemma_jax.errors import CapacityError, ConfigError, RecordError
from gemma_jax.parity.foreign import completion_row
from gemma_jax.parity.identity import model_identity
from gemma_jax.parity.records import Stream

if TYPE_CHECKING:
    from gemma_jax.parity.engines import Job

ID_FIELDS = {"return_token_ids": True, "return_tokens_as_token_ids": True}
TIMEOUT_SECONDS = 600.0


def record_url(job: "Job") -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Header and rows of the endpoint at the option `url`, `batch` requests at a time.

    Raises:
      ConfigError: the URL cannot be reached, or refuses the request.
      CapacityError: the server is overloaded or failed.
      RecordError: an answer lacks logprobs or token ids.
    """
    client = _Client(job)
    with ThreadPoolExecutor(job.batch) as pool:
        rows = list(pool.map(client.row, job.requests))
    header = {
        "engine": "openai",
        "url": job.options["url"],
        "served_model": client.served_model,
        "model": model_identity(job.model),
    }
    return header | ({"dtype": job.dtype} if job.dtype != "auto" else {}), rows


class _Client:
    def __init__(self, job: "Job"):
        self._job = job
        self._url = job.options["url"].rstrip("/")
        if not self._url.startswith(("http://", "https://")):
            raise ConfigError(f"--url {self._url}: expected http://… or https://…")
        self._fields = ID_FIELDS | job.options.get("extra_body", {})
        self.served_model = job.options.get("served_model") or self._first_model()
        self._ids_of = _vocabulary(job.model)

    def row(self, stream: Stream) -> dict[str, Any]:
        """The row of one request."""
        prompt = stream.prompt.tolist()
        body: dict[str, Any] = {
            "model": self.served_model,
            "prompt": stream.sequence if self._job.teacher_force else prompt,
            "temperature": 0,
            "logprobs": self._job.logprobs,
            **self._fields,
        }
        where = f"{self._url}, prompt {stream.id!r}"
        if not self._job.teacher_force:
            body |= {"max_tokens": self._job.max_tokens, "ignore_eos": True}
            row = completion_row(self._post("/completions", body), where, self._ids_of)
            return {"id": stream.id, "token_ids": row["token_ids"], "top": row["top"]}
        body |= {"max_tokens": 1, "echo": True}
        row = completion_row(self._post("/completions", body), where, self._ids_of)
        part = slice(len(prompt), len(stream.sequence))
        top = row["top"][part]
        if len(top) != len(stream.tokens):
            raise RecordError(f"{where}: the server does not echo the prompt's logprobs")
        return {"id": stream.id, "token_ids": stream.tokens.tolist(), "top": top}

    def _first_model(self) -> str:
        try:
            return str(self._send("/models", None)["data"][0]["id"])
        except (KeyError, IndexError, TypeError):
            raise ConfigError(f"{self._url}/models lists no model; give --served-model") from None

    def _post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        return self._send(path, json.dumps(body).encode())

    def _send(self, path: str, data: bytes | None) -> dict[str, Any]:
        headers = {"Content-Type": "application/json"}
        if key := self._job.options.get("api_key"):
            headers["Authorization"] = f"Bearer {key}"
        request = urllib.request.Request(f"{self._url}{path}", data, headers)
        try:
            with urllib.request.urlopen(request, timeout=TIMEOUT_SECONDS) as answer:
                return json.loads(answer.read())
        except urllib.error.HTTPError as error:
            reason = error.read().decode(errors="replace")[:500]
            kind = CapacityError if error.code == 429 or error.code >= 500 else ConfigError
            raise kind(f"{self._url}{path} answers {error.code}: {reason}") from None
        except (OSError, http.client.HTTPException) as error:
            reason = getattr(error, "reason", error)
            raise ConfigError(f"{self._url}{path} cannot be reached: {reason}") from None
        except ValueError as error:
            raise ConfigError(f"{self._url}{path} does not answer in JSON: {error}") from None


def _vocabulary(model: str) -> dict[str, int]:
    """Text of a token → id, texts that several tokens share left out; {} without a tokenizer."""
    from gemma_jax.model_source import resolve_model
    from gemma_jax.tokenizer import Tokenizer

    path = resolve_model(model)
    tokenizer = Tokenizer.from_dir(path if path.is_dir() else path.parent)
    if tokenizer is None:
        return {}
    ids_of: dict[str, int] = {}
    shared = set()
    for token_id in range(tokenizer.vocab_size):
        text = tokenizer.decode([token_id], skip_special_tokens=False)
        shared |= {text} if text in ids_of else set()
        ids_of[text] = token_id
    return {text: token_id for text, token_id in ids_of.items() if text not in shared}
