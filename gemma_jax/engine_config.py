"""How the network runs: dtype, rounding, limits and batch sizes."""

from collections.abc import Mapping
from dataclasses import dataclass

import jax

from gemma_jax.buckets import MIN_CHUNK
from gemma_jax.config import ModelConfig
from gemma_jax.errors import ConfigError, UnsupportedError
from gemma_jax.kernels import AUTO, Kernels
from gemma_jax.numerics import ROUNDINGS, Numerics, Rounding

DTYPES = ("auto", "bfloat16", "float32")
MAX_CHUNK = 2048
"""Longest prefill chunk in tokens; a longer one makes no matrix product faster."""
MAX_SCORE_BYTES = 4 * 2**30
"""Bound on the attention scores of one sequence's chunk, which plain attention writes to memory."""
SCORE_BYTES = 6
"""Bytes of one attention score: float32, and its probability in bfloat16."""
MIN_PLAIN_CHUNK = 256
"""Chunks are not cut below this, whatever their scores take."""
SMALLEST_BUDGET = 16
"""Fewest prompt tokens of a prefill call."""
SPARE_TOKENS = 131_072
"""Tokens of earlier prompts that the KV cache is sized to keep, where memory allows."""


@dataclass(frozen=True)
class EngineConfig:
    """Settings of `LLM`; `None` means a default that `resolve` derives.

    Attributes:
      dtype: "bfloat16", "float32", or "auto" for the checkpoint's own.
      rounding: whose bf16 rounding points to reproduce, "hf" or "vllm".
      fast_prefill: run KV-shared layers only on the prompt rows whose logits are wanted.
      batch_invariant: a request's tokens and logprobs are the same bits alone, in any batch,
        however its prompt is cut and whatever the prefix cache holds.
      kernels: "auto", "reference" (plain jax.numpy) or "pallas", and per-op overrides, for instance
        "auto,prefill_attention=triton" or a mapping op → implementation; see `Kernels`.
      max_model_len: most tokens of a sequence, prompt and output; the model's own limit by default.
      max_num_seqs: most sequences decoded at a time.
      max_num_batched_tokens: most prompt tokens of one prefill call, padding included.
      mixed_batched_tokens: the same while other requests decode; each of their decode calls then
        waits for one such call at most. `None` prefills every prompt first.
      max_queue: most completions that wait; beyond it requests are refused.
      prefix_caching: keep whole pages of earlier prompts and find them again.
      gpu_memory_utilization: share of the device's memory that weights and caches may take.
      decode_steps: tokens a sequence gets in one decode call at most.
      page_size: tokens a page of the KV cache.
      seed: of the requests that bring none.
    """

    dtype: str = "auto"
    rounding: Rounding = "hf"
    fast_prefill: bool = True
    batch_invariant: bool = False
    kernels: str | Mapping[str, str] | Kernels = "auto"
    max_model_len: int | None = None
    max_num_seqs: int = 64
    max_num_batched_tokens: int | None = None
    mixed_batched_tokens: int | None = None
    max_queue: int = 1_000_000
    prefix_caching: bool = True
    gpu_memory_utilization: float = 0.9
    decode_steps: int = 32
    page_size: int = 128
    seed: int = 0

    def __post_init__(self):
        if self.dtype == "float16":
            raise UnsupportedError(
                "dtype='float16': activations of Gemma 4 exceed its range (E2B overflows);"
                " use 'bfloat16' or 'float32'"
            )
        for name, allowed in (("dtype", DTYPES), ("rounding", ROUNDINGS)):
            if getattr(self, name) not in allowed:
                raise ConfigError(
                    f"{name}={getattr(self, name)!r}: expected one of {', '.join(allowed)}"
                )
        for name in ("fast_prefill", "prefix_caching", "batch_invariant"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name}={getattr(self, name)!r}: expected True or False")
        Kernels.parse(self.kernels)
        self._check_sizes()

    def _check_sizes(self) -> None:
        _check_int("max_num_seqs", self.max_num_seqs, 1)
        _check_int("decode_steps", self.decode_steps, 1)
        _check_int("page_size", self.page_size, MIN_CHUNK)
        _check_int("seed", self.seed, 0)
        if self.page_size % MIN_CHUNK:
            raise ConfigError(f"page_size={self.page_size}: expected a multiple of {MIN_CHUNK}")
        if self.max_model_len is not None:
            _check_int("max_model_len", self.max_model_len, 2)
        _check_int("max_queue", self.max_queue, 1)
        for name in ("max_num_batched_tokens", "mixed_batched_tokens"):
            if getattr(self, name) is not None:
                _check_int(name, getattr(self, name), SMALLEST_BUDGET)
                if self.rounding == "vllm" and getattr(self, name) < MIN_CHUNK:
                    raise ConfigError(
                        f"{name}={getattr(self, name)}: rounding='vllm' needs at least {MIN_CHUNK},"
                        " one tile of its attention"
                    )
        share = self.gpu_memory_utilization
        if not (isinstance(share, int | float) and 0 < share <= 1):
            raise ConfigError(f"gpu_memory_utilization={share!r}: expected a number in (0, 1]")

    def numerics(self, model: ModelConfig) -> Numerics:
        """The resolved precision rules.

        Raises:
          UnsupportedError: "auto" on a float16 checkpoint; `batch_invariant` where it cannot be.
        """
        dtype = model.dtype if self.dtype == "auto" else self.dtype
        if dtype == "float16":
            raise UnsupportedError(
                "dtype='auto': the checkpoint is float16, whose range E2B's activations exceed;"
                " ask for dtype='bfloat16' or 'float32'"
            )
        if self.batch_invariant:
            self._check_invariance(model)
        return Numerics(dtype, self.rounding, self.batch_invariant)

    def _check_invariance(self, model: ModelConfig) -> None:
        if model.enable_moe_block:
            raise UnsupportedError(
                "batch_invariant=True: experts are not promised the same bits in every batch yet;"
                " leave it out for this model"
            )
        if self.rounding == "vllm":
            raise UnsupportedError(
                "batch_invariant=True: rounding='vllm' follows kernels whose sums depend on the"
                " batch; use rounding='hf'"
            )
        kernels = Kernels.parse(self.kernels)
        if kernels.overrides:
            raise ConfigError(
                f"kernels={str(kernels)!r}: batch_invariant=True takes no implementation of single"
                " ops; use 'auto'"
            )
        if kernels.default == "reference" and jax.default_backend() == "gpu":
            raise UnsupportedError(
                "kernels='reference': batch_invariant=True needs our kernels on a GPU; use 'auto'"
            )

    def implementations(self) -> Kernels:
        """Which implementation each op uses; batch-invariant programs on a GPU use our kernels."""
        kernels = Kernels.parse(self.kernels)
        if self.batch_invariant and kernels == AUTO and jax.default_backend() == "gpu":
            return Kernels("pallas")
        return kernels

    def context_length(self, model: ModelConfig) -> int:
        """Most tokens of a sequence.

        Raises:
          ConfigError: `max_model_len` exceeds what the model was built for.
        """
        return model.context_length(self.max_model_len)

    def prefill_tokens(self) -> int:
        """Prompt tokens of one prefill call, a multiple of the shortest chunk."""
        default = 16_384 if jax.default_backend() == "gpu" else 2048
        return _whole_chunks(self.max_num_batched_tokens or default)

    def mixed_tokens(self) -> int:
        """Prompt tokens of one prefill call while other requests decode."""
        return min(_whole_chunks(self.mixed_batched_tokens or 2**31), self.prefill_tokens())

    def chunk_tokens(self, model: ModelConfig, max_model_len: int, plain: bool) -> int:
        """Most prompt tokens of one sequence in a prefill call, a multiple of the shortest chunk.

        Plain attention writes the scores of all keys, which bounds its chunks.
        """
        longest = min(MAX_CHUNK, self.prefill_tokens(), self.mixed_tokens())
        if plain:
            a_query = model.num_attention_heads * max_model_len * SCORE_BYTES
            longest = min(longest, max(MAX_SCORE_BYTES // a_query, MIN_PLAIN_CHUNK))
        return _whole_chunks(min(longest, -(-max_model_len // MIN_CHUNK) * MIN_CHUNK))

    def spare_pages(self) -> int:
        """Pages of each kind for prefixes, beyond what running requests need."""
        return SPARE_TOKENS // self.page_size if self.prefix_caching else 0


def _whole_chunks(tokens: int) -> int:
    return max(SMALLEST_BUDGET, tokens // MIN_CHUNK * MIN_CHUNK)


def _check_int(name: str, value: object, minimum: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
        raise ConfigError(f"{name}={value!r}: expected an integer of at least {minimum}")
