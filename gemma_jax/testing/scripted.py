"""A model that says what a script tells it, for tests of everything above the model.

`ScriptedRunner` stands for `Runner` in a real `Engine`: requests are scheduled, chunked, paged,
decoded in several steps a call and stopped as ever, but the ids come from a function of the prompt.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from gemma_jax.call_arrays import Chunk, DecodeRows, PageTables, StepOutput
from gemma_jax.config import ModelConfig
from gemma_jax.engine_config import EngineConfig
from gemma_jax.kernels import AUTO
from gemma_jax.model.cache import CacheLayout, KVCache
from gemma_jax.numerics import Numerics
from gemma_jax.sampling import NO_ID, Logprobs, RowState, SamplingStatics, SamplingTable
from gemma_jax.serve.engine import Engine
from gemma_jax.text_side import TextSide

Respond = Callable[[list[int]], Sequence[int]]

MEMORY = 2**28
"""Bytes that the pages of a scripted engine are counted against; none are allocated."""


def scripted_engine(text_side: TextSide, respond: Respond, **settings: Any) -> Engine:
    """An engine over a `ScriptedRunner`.

    Args:
      text_side: of the model that it stands for.
      respond: prompt ids → the ids that are generated, an ending EOS included; what follows them
        is EOS again, or id 0 where the request has none.
      **settings: the fields of `EngineConfig`.
    """
    config = EngineConfig(**{"dtype": "float32", "prefix_caching": False} | settings)
    runner: Any = ScriptedRunner(text_side.config, respond)
    return Engine(runner, config, text_side.max_model_len, MEMORY, text_side.tokenizer)


class ScriptedRunner:
    """The methods of `Runner` that an engine calls; see `scripted_engine`.

    The prefix cache must be off, since a hit would hide the beginning of a prompt.
    """

    def __init__(self, config: ModelConfig, respond: Respond):
        self.config, self.numerics, self.kernels = config, Numerics("float32"), AUTO
        self._respond = respond
        self._tokens: dict[int, list[int]] = {}
        self._scripts: dict[int, Sequence[int]] = {}
        self._counts: dict[int, int] = {}

    def new_cache(self, *_: int) -> KVCache:
        """No arrays."""
        return KVCache((), ())

    def new_state(self, slots: int, penalties: bool = False) -> RowState:
        """No counts: a script knows no penalties."""
        del slots, penalties
        zeros: Any = np.zeros(0, np.int32)
        return RowState(zeros, zeros, zeros, zeros)

    def place[T](self, tree: T) -> T:
        """Arrays may stay where they are."""
        return tree

    def prefill(
        self,
        layout: CacheLayout,
        cache: KVCache,
        state: RowState,
        chunk: Chunk,
        tables: PageTables,
        table: SamplingTable,
        statics: SamplingStatics,
        *,
        has_past: bool,
        wants_token: bool,
    ) -> tuple[KVCache, RowState, StepOutput | None]:
        """As of `Runner`: the first id of the script where a prompt ends."""
        del layout, tables, has_past
        out = np.full((chunk.ids.shape[0], 1), NO_ID, np.int32)
        for row, length in enumerate(np.asarray(chunk.lengths)):
            if length == 0:
                continue
            slot, start = int(chunk.rows[row]), int(chunk.start[row])
            held = self._tokens.setdefault(slot, [])
            if len(held) < start:
                raise ValueError(
                    "a prompt begins inside a cached prefix: switch prefix_caching off"
                )
            held[start:] = chunk.ids[row, :length].tolist()
            if chunk.ends[row]:
                count = int(chunk.counts[row])
                self._scripts[slot] = self._respond(held[: len(held) - count])
                self._counts[slot] = count
                out[row] = self._next(slot, table, row)
        return cache, state, _output(out, statics) if wants_token else None

    def decode(
        self,
        layout: CacheLayout,
        cache: KVCache,
        state: RowState,
        rows: DecodeRows,
        tables: PageTables,
        table: SamplingTable,
        statics: SamplingStatics,
        *,
        max_steps: int,
    ) -> tuple[KVCache, RowState, StepOutput]:
        """As of `Runner`: the next ids of each row's script, up to its end or the row's limit."""
        del layout, tables
        out = np.full((rows.rows.shape[0], max_steps), NO_ID, np.int32)
        for row, limit in enumerate(np.asarray(rows.limits)):
            for step in range(limit):
                token = self._next(int(rows.rows[row]), table, row)
                if token == NO_ID:
                    break
                out[row, step] = token
        return cache, state, _output(out, statics)

    def score(
        self,
        layout: CacheLayout,
        cache: KVCache,
        chunk: Chunk,
        tables: PageTables,
        targets: Any,
        *,
        has_past: bool,
        k: int,
    ) -> tuple[KVCache, Logprobs]:
        """As of `Runner`: every given token has the log-probability of a generated one."""
        del layout, chunk, tables, has_past
        return cache, _logprobs(np.asarray(targets), k)

    def _next(self, slot: int, table: SamplingTable, row: int) -> int:
        """The next id of a slot; `NO_ID` once it has ended."""
        script, count = self._scripts[slot], self._counts[slot]
        stops = [token for token in np.asarray(table.stop_ids[row]).tolist() if token != NO_ID]
        ended = count > 0 and self._last(script, count - 1, stops) in stops
        if ended or count >= int(table.max_tokens[row]):
            return NO_ID
        self._counts[slot] += 1
        return self._last(script, count, stops)

    @staticmethod
    def _last(script: Sequence[int], count: int, stops: Sequence[int]) -> int:
        if count < len(script):
            return script[count]
        return stops[0] if stops else 0


def _output(tokens: np.ndarray, statics: SamplingStatics) -> StepOutput:
    if statics.logprobs is None:
        return StepOutput(jnp.asarray(tokens), None)
    return StepOutput(jnp.asarray(tokens), _logprobs(tokens, statics.logprobs))


def _logprobs(tokens: np.ndarray, k: int) -> Logprobs:
    """-0.5 for each id; the ids after it are the other candidates."""
    others = np.arange(k, dtype=np.int32)
    ids = np.maximum(tokens, 0)[..., None] + others
    values = (
        np.full(tokens.shape, -0.5, np.float32),
        np.ones(tokens.shape, np.int32),
        ids,
        np.broadcast_to(np.float32(-0.5) - others, ids.shape).astype(np.float32),
    )
    return Logprobs(*map(jnp.asarray, values))
