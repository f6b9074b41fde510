"""Pure functions from logits to tokens, and the per-row arrays that they read.

Order of operations for one row, as in vLLM: raw log-probabilities; logit bias, suppressed and
too-early stop ids; penalties; then the argmax (temperature 0), or temperature, min_p, top_k, top_p
and a Gumbel draw. The noise of a request depends on its key, its token count and the token id only,
so the draw itself does not depend on the batch; logits may, by a bf16 rounding.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax

from gemma_jax.kernels import AUTO, Kernels
from gemma_jax.numerics import Numerics
from gemma_jax.pallas.head import top_candidates

NO_ID = -1
"""Padding of id lists, and the token of a row that did not produce one."""
FUSED_STOP_IDS = 8
"""Up to so many stop ids are compared with every id, which XLA fuses with the soft cap before and
the argmax after it: no float32 logits in memory. A longer list is scattered."""

FEW_CANDIDATES = 64
"""Rows with a top_k of at most this are filtered among so many in every batch-invariant program."""


@jax.tree_util.register_dataclass
@dataclass
class SamplingTable:
    """Sampling parameters of every row, constant while a request runs.

    Shapes: [B], but `key` uint32 [B, 2], `stop_ids` int32 [B, n] padded with `NO_ID`, and
    `bias_ids` / `bias_values` [B, m] padded with `NO_ID` / 0.
    """

    temperature: jax.Array
    top_k: jax.Array
    top_p: jax.Array
    min_p: jax.Array
    presence_penalty: jax.Array
    frequency_penalty: jax.Array
    repetition_penalty: jax.Array
    min_tokens: jax.Array
    max_tokens: jax.Array
    key: jax.Array
    stop_ids: jax.Array
    bias_ids: jax.Array
    bias_values: jax.Array


@jax.tree_util.register_dataclass
@dataclass
class RowState:
    """Progress of every row.

    Attributes:
      token: [B] int32, the newest token, not yet in the cache.
      position: [B] int32, the position of `token`.
      count: [B] int32, tokens generated so far.
      finished: [B] bool; finished and empty rows neither advance nor write.
      prompt_seen: [B, V] bool and
      output_counts: [B, V] int32, present only when a row has a penalty.
    """

    token: jax.Array
    position: jax.Array
    count: jax.Array
    finished: jax.Array
    prompt_seen: jax.Array | None = None
    output_counts: jax.Array | None = None


def empty_state(slots: int, vocab_size: int | None = None) -> RowState:
    """The state of `slots` empty slots; with `vocab_size` it counts ids for penalties too."""
    zeros = jnp.zeros(slots, jnp.int32)
    state = RowState(zeros, zeros, zeros, jnp.ones(slots, bool))
    if vocab_size is not None:
        state.prompt_seen = jnp.zeros((slots, vocab_size), bool)
        state.output_counts = jnp.zeros((slots, vocab_size), jnp.int32)
    return state


@dataclass(frozen=True)
class SamplingStatics:
    """What a batch needs, fixed at compile time: each new combination compiles again.

    Attributes:
      greedy: every row has temperature 0.
      candidates: ids kept before top_p and the draw; 0 sorts the whole vocabulary, `None` when no
        row has top_k, top_p or min_p.
      penalties: some row has a presence, frequency or repetition penalty.
      logprobs: alternatives reported a token; `None` reports no log-probabilities at all.
      batch_invariant: what a row draws is the same with `FEW_CANDIDATES` and with all.
    """

    greedy: bool = True
    candidates: int | None = None
    penalties: bool = False
    logprobs: int | None = None
    batch_invariant: bool = False


@jax.tree_util.register_dataclass
@dataclass
class Logprobs:
    """Raw log-probabilities of one step: the sampled token's, its rank (1 = best), and the top k.

    Shapes: [B], [B], [B, k], [B, k]; ids of the top k best first, ties to the lower id.
    """

    sampled: jax.Array
    rank: jax.Array
    top_ids: jax.Array
    top: jax.Array


def token_logprobs(logits: jax.Array, tokens: jax.Array, k: int) -> Logprobs:
    """Log-probabilities of `tokens` [...] and of the k best ids under `logits` float32 [..., V]."""
    logprobs = jax.nn.log_softmax(logits, axis=-1)
    sampled = jnp.take_along_axis(logprobs, tokens[..., None], axis=-1)
    rank = 1 + jnp.sum(logprobs > sampled, axis=-1, dtype=jnp.int32)
    top, top_ids = lax.top_k(logprobs, k)
    return Logprobs(sampled[..., 0], rank, top_ids.astype(jnp.int32), top)


def sample(
    logits: jax.Array,
    table: SamplingTable,
    state: RowState,
    statics: SamplingStatics,
    kernels: Kernels = AUTO,
    allowed: jax.Array | None = None,
) -> jax.Array:
    """The next token of every row, int32 [B], from logits float32 [B, V].

    `allowed`, uint32 [B, ceil(V / 32)], has bit i of word j set where id 32 j + i may be drawn.
    """
    if allowed is not None:
        logits = _forbid(logits, allowed)
    logits = _bias(logits, table)
    logits = _forbid_early_stop(logits, table, state.count)
    if statics.penalties:
        logits = _penalise(logits, table, state)
    best = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    if statics.greedy:
        return best
    drawn = _draw(logits, table, state.count, statics, kernels)
    return jnp.where(table.temperature == 0.0, best, drawn)


def _bias(logits: jax.Array, table: SamplingTable) -> jax.Array:
    if table.bias_ids.shape[1] == 0:
        return logits
    rows = jnp.arange(logits.shape[0])[:, None]
    ids = jnp.where(table.bias_ids == NO_ID, logits.shape[1], table.bias_ids)
    return logits.at[rows, ids].add(table.bias_values, mode="drop")


def _forbid(logits: jax.Array, allowed: jax.Array) -> jax.Array:
    bits = (allowed[:, :, None] >> jnp.arange(32, dtype=jnp.uint32)) & 1
    mask = bits.reshape(allowed.shape[0], -1)[:, : logits.shape[1]]
    return jnp.where(mask == 1, logits, -jnp.inf)


def _forbid_early_stop(logits: jax.Array, table: SamplingTable, count: jax.Array) -> jax.Array:
    """-inf at the stop ids of rows that have fewer than min_tokens."""
    early = (count < table.min_tokens)[:, None]
    stop_ids = jnp.where(early, table.stop_ids, NO_ID)
    if stop_ids.shape[1] <= FUSED_STOP_IDS:
        ids = jnp.arange(logits.shape[1])
        for column in range(stop_ids.shape[1]):
            logits = jnp.where(ids == stop_ids[:, column, None], -jnp.inf, logits)
        return logits
    rows = jnp.arange(logits.shape[0])[:, None]
    where = jnp.where(stop_ids == NO_ID, logits.shape[1], stop_ids)
    return logits.at[rows, where].set(-jnp.inf, mode="drop")


def _penalise(logits: jax.Array, table: SamplingTable, state: RowState) -> jax.Array:
    """Repetition over prompt and output; frequency and presence over the output only."""
    counts, prompt_seen = state.output_counts, state.prompt_seen
    assert counts is not None
    assert prompt_seen is not None
    seen = prompt_seen | (counts > 0)
    repetition = jnp.where(seen, table.repetition_penalty[:, None], 1.0)
    logits = jnp.where(logits > 0, logits / repetition, logits * repetition)
    logits -= table.frequency_penalty[:, None] * counts.astype(jnp.float32)
    return logits - table.presence_penalty[:, None] * (counts > 0).astype(jnp.float32)


def _draw(
    logits: jax.Array,
    table: SamplingTable,
    count: jax.Array,
    statics: SamplingStatics,
    kernels: Kernels,
) -> jax.Array:
    temperature = jnp.where(table.temperature == 0.0, 1.0, table.temperature)[:, None]
    logits = logits / temperature
    noise = jax.vmap(_gumbel, in_axes=(0, 0, None))(table.key, count, logits.shape[1])
    if statics.candidates is None:
        return jnp.argmax(logits + noise, axis=-1).astype(jnp.int32)
    if statics.candidates:
        kept, ids = top_candidates(
            logits, statics.candidates, None, numerics=Numerics("float32"),
            implementation=kernels.of("top_candidates"),
        )  # fmt: skip
    else:
        kept, ids = lax.top_k(logits, logits.shape[1])
    kept = _filter_alike(kept, table) if statics.batch_invariant else _filter(kept, table)
    best = jnp.argmax(kept + jnp.take_along_axis(noise, ids, axis=-1), axis=-1)
    return jnp.take_along_axis(ids, best[:, None], axis=-1)[:, 0].astype(jnp.int32)


def _gumbel(key: jax.Array, count: jax.Array, size: int) -> jax.Array:
    step_key = jax.random.fold_in(jax.random.wrap_key_data(key), count)
    return jax.random.gumbel(step_key, (size,), jnp.float32)


def _filter_alike(kept: jax.Array, table: SamplingTable) -> jax.Array:
    """`_filter` that adds as many probabilities for a row, however many candidates there are.

    `lax.top_k` and `top_candidates` order alike, so the first `FEW_CANDIDATES` are the same ones.
    """
    few = min(FEW_CANDIDATES, kept.shape[1])
    # Compiled by itself, whatever surrounds it.
    first = lax.optimization_barrier(_filter(lax.optimization_barrier(kept[:, :few]), table))
    rest = kept.shape[1] - few
    if not rest:
        return first
    first = jnp.pad(first, ((0, 0), (0, rest)), constant_values=-jnp.inf)
    needs_few = (table.top_k > 0) & (table.top_k <= few)
    return jnp.where(needs_few[:, None], first, _filter(kept, table))


def _filter(kept: jax.Array, table: SamplingTable) -> jax.Array:
    """-inf where min_p, top_k or top_p drops a candidate; `kept` [B, n] is sorted, best first."""
    rank = jnp.arange(kept.shape[1])
    min_p = jnp.log(table.min_p)[:, None]  # -inf when off
    keep = kept >= kept[:, :1] + min_p
    keep &= (table.top_k[:, None] <= 0) | (rank < table.top_k[:, None])
    probabilities = jax.nn.softmax(jnp.where(keep, kept, -jnp.inf), axis=-1)
    before = jnp.cumsum(probabilities, axis=-1) - probabilities
    keep &= (table.top_p[:, None] >= 1.0) | (before < table.top_p[:, None])
    return jnp.where(keep, kept, -jnp.inf)


def advance(
    state: RowState, table: SamplingTable, tokens: jax.Array, active: jax.Array
) -> RowState:
    """The state after `active` rows took `tokens` [B]; stop ids and max_tokens finish a row.

    `position` of an active row must already be the position of its new token.
    """
    count = jnp.where(active, state.count + 1, state.count)
    stopped = jnp.any(tokens[:, None] == table.stop_ids, axis=-1) | (count >= table.max_tokens)
    counts = state.output_counts
    if counts is not None:
        rows = jnp.arange(tokens.shape[0])
        counts = counts.at[rows, tokens].add(active.astype(counts.dtype))
    return RowState(
        token=jnp.where(active, tokens, state.token),
        position=state.position,
        count=count,
        finished=state.finished | (active & stopped),
        prompt_seen=state.prompt_seen,
        output_counts=counts,
    )
