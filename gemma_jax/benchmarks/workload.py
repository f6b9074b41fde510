"""A workload: how many requests of how many prompt tokens, each generating how many tokens."""

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from gemma_jax.errors import ConfigError

if TYPE_CHECKING:
    import numpy as np

_NAME = re.compile(r"(\d+)x(\d+)\+(\d+)")


@dataclass(frozen=True)
class Workload:
    """`num_requests` prompts of `input_len` tokens, each continued by exactly `output_len`."""

    num_requests: int
    input_len: int
    output_len: int

    def __post_init__(self):
        for name in ("num_requests", "input_len", "output_len"):
            if getattr(self, name) < 1:
                raise ConfigError(
                    f"{name}={getattr(self, name)}: a workload needs an integer of at least 1"
                )

    @classmethod
    def parse(cls, name: str) -> Self:
        """The workload of a name such as "8x2048+1": requests x prompt tokens + generated tokens.

        Raises:
          ConfigError: another form, or a zero.
        """
        match = _NAME.fullmatch(name)
        if match is None:
            raise ConfigError(
                f"workload={name!r}: expected REQUESTSxPROMPT+GENERATED, for instance 8x2048+1"
            )
        return cls(*map(int, match.groups()))

    @property
    def name(self) -> str:
        return f"{self.num_requests}x{self.input_len}+{self.output_len}"

    @property
    def prompt_tokens(self) -> int:
        return self.num_requests * self.input_len

    @property
    def generated_tokens(self) -> int:
        return self.num_requests * self.output_len

    def prompts(self, rng: "np.random.Generator", vocab_size: int) -> list[dict[str, list[int]]]:
        """Fresh random token-id prompts."""
        ids = rng.integers(0, vocab_size, (self.num_requests, self.input_len))
        return [{"prompt_token_ids": row} for row in ids.tolist()]
