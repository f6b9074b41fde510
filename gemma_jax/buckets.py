"""The declared sizes that programs are compiled for; every request is padded up to one of them."""

from gemma_jax.errors import CapacityError

MIN_CHUNK = 32
"""Shortest prefill chunk: one tile of vLLM's attention, whose rounding we can reproduce."""

ID_LIST_BUCKETS = (4, 16, 64, 256, 1024)
"""Stop ids or biased ids of a request; a request with more is refused."""


def decode_row_buckets(max_rows: int) -> tuple[int, ...]:
    """Rows of a decode call: 1, 4, 16, 64, 128, 256, … below `max_rows`, and `max_rows`.

    Few, because each is a program; a step reads the same weights for one row or sixty.
    """
    sizes = (1, 4, 16, *_powers(64, max_rows))
    return (*(s for s in sizes if s < max_rows), max_rows)


def prefill_row_buckets(max_rows: int) -> tuple[int, ...]:
    """Rows of a prefill call: 1, 4, 8, 16, 32, … below `max_rows`, and `max_rows`."""
    sizes = (1, *_powers(4, max_rows))
    return (*(s for s in sizes if s < max_rows), max_rows)


def chunk_buckets(max_chunk: int) -> tuple[int, ...]:
    """Prefill chunk lengths in tokens: powers of two from `MIN_CHUNK`, and `max_chunk`."""
    return (*_powers(MIN_CHUNK, max_chunk), max_chunk)


def length_buckets(max_len: int, page_size: int) -> tuple[int, ...]:
    """Widths of a page table in tokens: one page times 1, 4, 16, 64, … up to `max_len`.

    Few, because each is a program; plain attention reads every page that a table has room for.
    """
    sizes = (page_size * 4**n for n in range(16))
    return (*(s for s in sizes if s < max_len), max_len)


def pick(value: int, buckets: tuple[int, ...], what: str) -> int:
    """The smallest bucket that holds `value`."""
    for bucket in buckets:
        if value <= bucket:
            return bucket
    raise CapacityError(f"{what}={value}: exceeds the largest declared size, {buckets[-1]}")


def _powers(first: int, below: int) -> list[int]:
    sizes = []
    while first < below:
        sizes.append(first)
        first *= 2
    return sizes
