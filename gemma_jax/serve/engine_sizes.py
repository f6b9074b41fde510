"""What an engine's settings come to for one model: pages of the KV cache, limits of a call."""

from gemma_jax.buckets import chunk_buckets, prefill_row_buckets
from gemma_jax.engine_config import EngineConfig
from gemma_jax.model.cache import page_bytes
from gemma_jax.runner import STEP_BLOCK, Runner
from gemma_jax.serve.cache_plan import plan_cache
from gemma_jax.serve.pages import CacheSizes
from gemma_jax.serve.scheduler_limits import SchedulerLimits


def cache_sizes(
    runner: Runner, config: EngineConfig, *, max_model_len: int, longest_chunk: int, memory: int
) -> CacheSizes:
    """Pages of both kinds for the runner's model; see `plan_cache`."""
    model = runner.config
    sliding = any(layer.is_sliding for layer in model.owner_layers)
    return plan_cache(
        page_size=config.page_size,
        page_bytes=page_bytes(model, config.page_size, runner.numerics.jnp_dtype.itemsize),
        memory=memory,
        window=model.sliding_window if sliding else 0,
        max_chunk=longest_chunk,
        max_model_len=max_model_len,
        max_num_seqs=config.max_num_seqs,
        prefill_tokens=config.prefill_tokens(),
        spare_pages=config.spare_pages(),
    )


def scheduler_limits(config: EngineConfig, longest_chunk: int) -> SchedulerLimits:
    """What the scheduler may put into one call."""
    budget = max(config.prefill_tokens(), longest_chunk)
    return SchedulerLimits(
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=budget,
        mixed_budget=min(budget, config.mixed_tokens()),
        row_buckets=prefill_row_buckets(config.max_num_seqs),
        chunk_buckets=chunk_buckets(longest_chunk),
        decode_steps=config.decode_steps,
        decode_steps_waiting=min(STEP_BLOCK, config.decode_steps),
        max_queue=config.max_queue,
        prompts_first=config.mixed_batched_tokens is None,
    )
