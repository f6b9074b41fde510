"""Makes the engine of a model in the process that runs it, and compiles what it will need."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from gemma_jax.serve.engine_process import LoadedEngine

if TYPE_CHECKING:
    from gemma_jax.llm import LLM


SERVING: dict[str, Any] = {"mixed_batched_tokens": 4096, "decode_steps": 8}
"""Settings of a server unless it asks for others: streams go on soon, and tokens come often."""


def load_engine(settings: Mapping[str, Any], warm: bool = True) -> LoadedEngine:
    """The engine of `LLM(**settings)` with `SERVING` under them, by default after `warm_up`."""
    from gemma_jax.llm import LLM  # JAX, in this process only

    llm = LLM(**SERVING | dict(settings))
    if warm:
        warm_up(llm)
    return LoadedEngine(llm.engine, llm.max_num_seqs)


def warm_up(llm: "LLM") -> None:
    """Run short requests, so that the programs of usual traffic are compiled.

    One request alone, then as many as run together, with the sampling of the checkpoint and
    greedily; other batch sizes, and prompts longer than a chunk, compile at their first use.
    """
    usual = llm.generation_defaults.sampling_params(ignore_eos=True)
    tokens = 2 * llm.engine_config.decode_steps
    for params in (
        usual.replace(max_tokens=tokens),
        usual.replace(temperature=0.0, max_tokens=tokens),
    ):
        for count in (1, llm.max_num_seqs):
            for number in range(count):
                llm.engine.add(llm.make_request([0], params, f"warm-up-{number}"))
            while llm.engine.has_work:
                llm.engine.step()
