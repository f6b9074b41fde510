"""Which implementation of an op runs: a named one or an error, else the best that can.

Names: `reference` is the definition in plain jax.numpy, `xla` a plain-jnp formulation made for
speed, `cudnn` NVIDIA's library, `triton` and `mosaic` our kernels. `pallas` means the faster of the
last two. A name never falls back; `None` always finds something, `reference` at the latest.
"""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from gemma_jax.errors import ConfigError, UnsupportedError
from gemma_jax.pallas.device import Device, current_device

Implementation = Literal["reference", "xla", "cudnn", "triton", "mosaic", "pallas"]
IMPLEMENTATIONS: tuple[Implementation, ...] = (
    "reference", "xla", "cudnn", "triton", "mosaic", "pallas",
)  # fmt: skip
PALLAS: tuple[Implementation, ...] = ("mosaic", "triton")
_log = logging.getLogger("gemma_jax.kernels")
_logged: set[tuple[str, str, str]] = set()


@dataclass(frozen=True)
class Choice:
    """One way to run an op.

    Attributes:
      run: the implementation; all of an op take the same arguments.
      unsupported: given the device, says why these inputs cannot be taken; None if they can.
      preferred: given the device, whether automatic choice may take it: it beats what follows.
    """

    run: Callable[..., Any]
    unsupported: Callable[[Device], str | None] = lambda device: None
    preferred: Callable[[Device], bool] = lambda device: True


def dispatch(
    op: str,
    implementation: Implementation | None,
    choices: Mapping[str, Choice],
    shape: str,
) -> Callable[..., Any]:
    """The implementation to call; see `resolve`."""
    return choices[resolve(op, implementation, choices, shape)].run


def resolve(
    op: str,
    implementation: Implementation | None,
    choices: Mapping[str, Choice],
    shape: str,
) -> str:
    """The name of the implementation to call.

    Args:
      op: name of the op, for messages.
      implementation: a name, or None to let the order of `choices` decide.
      choices: name → way to run it on these inputs, best first; `reference` takes everything.
      shape: the inputs in short, for messages and the log.
    Raises:
      UnsupportedError: the op has no implementation of that name, or it cannot take these inputs.
      ConfigError: no op has an implementation of that name.
    """
    device = current_device()
    if implementation is None:
        return _automatic(op, choices, shape, device)
    if implementation not in IMPLEMENTATIONS:
        raise ConfigError(
            f"implementation={implementation!r} of {op}: expected one of {list(IMPLEMENTATIONS)}"
        )
    if implementation == "pallas":
        return _pallas(op, choices, shape, device)
    if implementation not in choices:
        raise UnsupportedError(
            f"{op}: has no implementation {implementation!r}; it has {list(choices)}"
        )
    reason = choices[implementation].unsupported(device)
    if reason is not None:
        raise UnsupportedError(f"{op}: {implementation} cannot take {shape}: {reason}")
    return implementation


def _automatic(op: str, choices: Mapping[str, Choice], shape: str, device: Device) -> str:
    """Our kernels and libraries on a GPU, the reference on a CPU."""
    name = "reference"
    if device.is_gpu:
        fitting = (
            n for n, c in choices.items() if c.preferred(device) and c.unsupported(device) is None
        )
        name = next(fitting, "reference")
    key = (op, shape, name)
    if key not in _logged:
        _logged.add(key)
        _log.info("%s %s: %s on %s", op, shape, name, device.kind)
    return name


def _pallas(op: str, choices: Mapping[str, Choice], shape: str, device: Device) -> str:
    reasons = {}
    for name in (n for n in choices if n in PALLAS):
        reason = choices[name].unsupported(device)
        if reason is None:
            return name
        reasons[name] = reason
    said = "; ".join(f"{name}: {reason}" for name, reason in reasons.items()) or "it has none"
    raise UnsupportedError(f"{op}: no Pallas kernel takes {shape}: {said}")


def needs_gpu_or_interpreter(minimum: tuple[int, int]) -> Callable[[Device], str | None]:
    """The check of a Triton kernel: a CPU interprets it, a GPU needs that compute capability."""

    def check(device: Device) -> str | None:
        if device.capability is None or device.capability >= minimum:
            return None
        have = "{}.{}".format(*device.capability)
        return f"needs compute capability {minimum[0]}.{minimum[1]}, {device.kind} has {have}"

    return check
