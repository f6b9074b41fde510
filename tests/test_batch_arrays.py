"""Array forms of requests, at the edges of what their dtypes hold."""

import warnings

import numpy as np

from gemma_jax.batch_arrays import sampling_statics, sampling_table
from gemma_jax.sampling_params import SamplingParams
from gemma_jax.sequence import Sequence


def test_values_beyond_the_dtype_of_their_column_become_its_largest():
    params = SamplingParams(
        temperature=1e308, top_k=2**40, repetition_penalty=1e308, min_tokens=2**40, max_tokens=None
    )
    sequence = Sequence([2], params, 0, np.zeros(2, np.uint32), 7, (), None)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        table = sampling_table([sequence], 1, ())
    largest = np.finfo(np.float32).max
    assert (table.temperature[0], table.repetition_penalty[0]) == (largest, largest)
    assert (table.top_k[0], table.min_tokens[0]) == (2**31 - 1, 7)


def sequence(**params):
    return Sequence([2], SamplingParams(**params), 0, np.zeros(2, np.uint32), 7, (), None)


def test_in_batch_invariant_mode_no_neighbour_decides_how_many_candidates_a_row_has():
    asked = {"temperature": 1.0, "top_k": 20, "top_p": 0.9}
    alone, neighbours = [sequence(**asked)], [{}, {"top_k": 500}, {"temperature": 0.0}]
    batches = [alone, *([*alone, sequence(**{"temperature": 1.0} | n)] for n in neighbours)]
    usual = {sampling_statics(batch, 4096).candidates for batch in batches}
    assert usual == {64, 1024, 0}
    assert [sampling_statics(batch, 4096, True).candidates for batch in batches] == [64, 0, 0, 64]
    other = [sequence(temperature=1.0, top_k=65)]
    assert sampling_statics(other, 4096, True).candidates == 0
    assert sampling_statics([sequence(temperature=0.0)], 4096, True).candidates is None
