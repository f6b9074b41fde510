"""Array forms of requests, at the edges of what their dtypes hold."""

import warnings

import numpy as np

from gemma_jax.batch_arrays import sampling_table
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
