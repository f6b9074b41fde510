"""Which implementation each op of the network uses: one default and overrides by op."""

from collections.abc import Mapping
from dataclasses import dataclass

from gemma_jax.errors import ConfigError
from gemma_jax.pallas.dispatch import IMPLEMENTATIONS, Implementation

OPS = (
    "qkv_norm_rope", "prefill_attention", "decode_attention", "norm_matmul", "skinny_matmul",
    "residual_norm", "gelu_mul", "top_candidates",
)  # fmt: skip
DEFAULTS = ("auto", "reference", "pallas")


@dataclass(frozen=True)
class Kernels:
    """A default and the ops that differ from it; hashable, so that it can be static in `jax.jit`.

    Attributes:
      default: "auto" (the fastest that takes the inputs), "reference" (plain jax.numpy) or "pallas"
        (our kernels; interpreted on a CPU).
      overrides: (op, implementation) pairs, sorted.
    """

    default: str = "auto"
    overrides: tuple[tuple[str, str], ...] = ()

    def of(self, op: str) -> Implementation | None:
        """The implementation of `op`; None means automatic choice."""
        name = dict(self.overrides).get(op, self.default)
        return None if name == "auto" else name  # type: ignore[return-value]

    def __str__(self) -> str:
        return ",".join([self.default, *(f"{op}={name}" for op, name in self.overrides)])

    @classmethod
    def parse(cls, given: "str | Mapping[str, str] | Kernels") -> "Kernels":
        """Reads "auto", "pallas,decode_attention=reference" or {"decode_attention": "reference"}.

        Raises:
          ConfigError: an unknown op or implementation.
        """
        if isinstance(given, Kernels):
            return given
        if isinstance(given, Mapping):
            return cls._checked("auto", dict(given))
        if not isinstance(given, str):
            raise ConfigError(f"kernels={given!r}: expected text or a mapping op → implementation")
        default, *rest = [part.strip() for part in given.split(",")]
        if "=" in default:
            default, rest = "auto", [default, *rest]
        overrides: dict[str, str] = {}
        for part in rest:
            op, separator, name = (x.strip() for x in part.partition("="))
            if not separator:
                raise ConfigError(f"kernels={given!r}: expected op=implementation, got {part!r}")
            overrides[op] = name
        return cls._checked(default, overrides)

    @classmethod
    def _checked(cls, default: str, overrides: Mapping[str, str]) -> "Kernels":
        if default not in DEFAULTS:
            raise ConfigError(f"kernels={default!r}: expected one of {list(DEFAULTS)}")
        allowed = ["auto", *IMPLEMENTATIONS]
        for op, name in overrides.items():
            if op not in OPS:
                raise ConfigError(f"kernels: unknown op {op!r}; expected one of {list(OPS)}")
            if name not in allowed:
                raise ConfigError(f"kernels: {op}={name!r}: expected one of {allowed}")
        return cls(default, tuple(sorted(overrides.items())))


AUTO = Kernels()
"""Automatic choice everywhere."""
