"""Which pages of the KV cache hold which positions of which sequence.

There are two pools. Full-attention layers keep page q (positions q · page … (q+1) · page - 1) of a
sequence until it ends. Sliding layers keep it only while a query can still see one of its
positions; their table is a ring of `ring_pages` entries, page q in entry q mod `ring_pages`.

Prefix cache: whole pages whose tokens are known are registered under their hash chain, and
stay matchable after release until their page is needed. A prefix of L tokens is usable when the
full pages 0 … L/page - 1 and the sliding pages that a query at L can see are all there. Only whole
pages are shared, so a shared page is never written.

No arrays here: the device tables are made from these lists by the engine.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from gemma_jax.errors import ConfigError
from gemma_jax.serve.hash_chain import HashChain
from gemma_jax.serve.page_pool import PagePool


@dataclass(frozen=True)
class CacheSizes:
    """Sizes of the paged KV cache.

    Attributes:
      page_size: tokens a page.
      num_full_pages: pages of the full-attention layers.
      num_window_pages: pages of the sliding layers; 0 if there are none.
      window: positions that a query of a sliding layer sees, its own included; 0 if there are none.
      ring_pages: entries of a row's sliding table.
    """

    page_size: int
    num_full_pages: int
    num_window_pages: int = 0
    window: int = 0
    ring_pages: int = 0

    def __post_init__(self):
        for name in ("page_size", "num_full_pages"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)}: expected at least 1")
        least = self.min_ring_pages(self.window, 1, self.page_size)
        if self.ring_pages < least:
            raise ConfigError(
                f"ring_pages={self.ring_pages}: a window of {self.window} tokens in pages of"
                f" {self.page_size} needs at least {least}"
            )
        if self.window and self.num_window_pages < 1:
            raise ConfigError(
                f"num_window_pages={self.num_window_pages}: sliding layers need at least 1"
            )

    @staticmethod
    def min_ring_pages(window: int, chunk: int, page_size: int) -> int:
        """Ring entries that let any `chunk` consecutive tokens be written in one call.

        The window of the first query and the chunk itself are window + chunk - 1 positions, which
        may begin anywhere in a page.
        """
        return (window + chunk + page_size - 3) // page_size + 1 if window else 0


@dataclass(frozen=True)
class PageCount:
    """Pages of the two pools."""

    full: int = 0
    window: int = 0

    def __add__(self, other: "PageCount") -> "PageCount":
        return PageCount(self.full + other.full, self.window + other.window)

    def __sub__(self, other: "PageCount") -> "PageCount":
        return PageCount(self.full - other.full, self.window - other.window)

    def within(self, other: "PageCount") -> bool:
        return self.full <= other.full and self.window <= other.window


NO_PAGES = PageCount()


@dataclass(frozen=True)
class PrefixHit:
    """Pages that already hold the first `num_tokens` of a sequence, not yet taken.

    Attributes:
      chain: of the sequence.
      num_tokens: whole pages of tokens.
      full: page ids of the full layers.
      window: absolute page index → page id of the sliding layers.
    """

    chain: HashChain
    num_tokens: int = 0
    full: tuple[int, ...] = ()
    window: dict[int, int] = field(default_factory=dict)


@dataclass(eq=False)
class SequencePages:
    """Pages that one sequence holds.

    Attributes:
      chain: keys of its whole pages.
      full: page ids of the full layers, by absolute page index.
      window: absolute page index → page id of the sliding layers, in ascending order.
      num_cached: tokens that came from the prefix cache.
      num_registered: whole pages already offered to the prefix cache.
      version: grows whenever either table changes.
    """

    chain: HashChain
    full: list[int] = field(default_factory=list)
    window: dict[int, int] = field(default_factory=dict)
    num_cached: int = 0
    num_registered: int = 0
    version: int = 0

    @property
    def count(self) -> PageCount:
        return PageCount(len(self.full), len(self.window))


class KVPages:
    """The pages of one engine."""

    def __init__(self, sizes: CacheSizes, prefix_caching: bool = True):
        self.sizes = sizes
        self.full = PagePool(sizes.num_full_pages)
        self.window = PagePool(sizes.num_window_pages)
        self.prefix_caching = prefix_caching

    @property
    def available(self) -> PageCount:
        """Pages that `grow` can still give."""
        return PageCount(self.full.num_available, self.window.num_available)

    @property
    def usage(self) -> float:
        """Share of pages in use in the fuller pool, from 0 to 1."""
        pools = [pool for pool in (self.full, self.window) if pool.num_pages]
        return max(pool.num_used / pool.num_pages for pool in pools)

    def chain(self, namespace: int = 0) -> HashChain:
        """An empty hash chain for a new sequence."""
        return HashChain(self.sizes.page_size, namespace)

    def match(self, tokens: Sequence[int], chain: HashChain) -> PrefixHit:
        """The longest usable prefix of `tokens`, at least one token shorter than they are."""
        if not self.prefix_caching:
            return PrefixHit(chain)
        size = self.sizes.page_size
        full: list[int] = []
        window: list[int | None] = []
        length, run = 0, 0  # run: sliding pages present without a gap up to here
        for q in range((len(tokens) - 1) // size):
            key = chain.keys(tokens, q + 1)[q]  # a page at a time: most prompts miss at once
            page = self.full.lookup(key)
            if page is None:
                break
            full.append(page)
            window.append(self.window.lookup(key))
            run = 0 if window[q] is None else run + 1
            if not self.sizes.window or run > q - self.first_visible((q + 1) * size):
                length = q + 1
        first = self.first_visible(length * size)
        held = {q: page for q in range(first, length) if (page := window[q]) is not None}
        return PrefixHit(chain, length * size, tuple(full[:length]), held)

    def attach(self, hit: PrefixHit) -> SequencePages:
        """A sequence that holds the pages of `hit`, which must still be valid."""
        for page in hit.full:
            self.full.acquire(page)
        for page in hit.window.values():
            self.window.acquire(page)
        return SequencePages(
            chain=hit.chain,
            full=list(hit.full),
            window=dict(hit.window),
            num_cached=hit.num_tokens,
            num_registered=len(hit.full),
        )

    def grow(self, pages: SequencePages, num_tokens: int) -> bool:
        """Takes pages until every position below `num_tokens` has one, or none and False.

        Release what no later query sees (`slide`) before, and stay below `ring_end`.
        """
        need = self.demand(pages, num_tokens)
        if need is NO_PAGES:
            return True
        if not need.within(self.available):
            return False
        pages.version += 1
        for q in range(len(pages.full), len(pages.full) + need.full):
            pages.full.append(_taken(self.full))
            if self.sizes.window:
                pages.window[q] = _taken(self.window)
        assert len(pages.window) <= self.sizes.ring_pages, "grown past ring_end"
        return True

    def demand(self, pages: SequencePages, num_tokens: int) -> PageCount:
        """Pages that `grow` would take."""
        more = self._pages(num_tokens) - len(pages.full)
        if more <= 0:
            return NO_PAGES
        return PageCount(more, more if self.sizes.window else 0)

    def peak(self, num_tokens: int) -> PageCount:
        """Most pages that a sequence holds at any time on its way to `num_tokens`."""
        count = self._pages(num_tokens)
        return PageCount(count, min(count, self.sizes.ring_pages))

    def idle(self, hit: PrefixHit) -> PageCount:
        """Pages of `hit` that no sequence holds now: taking them makes fewer available."""
        return PageCount(
            sum(not self.full.holders(page) for page in hit.full),
            sum(not self.window.holders(page) for page in hit.window.values()),
        )

    def fits(self, num_tokens: int) -> bool:
        """Whether a sequence of that length could run if it had every page."""
        every = PageCount(self.full.num_pages, self.window.num_pages)
        return self.peak(num_tokens).within(every)

    def commit(self, pages: SequencePages, tokens: Sequence[int], num_computed: int) -> None:
        """Registers the whole pages of the first `num_computed` tokens.

        K and V of these positions must be in the cache, or be written by a call already queued.
        """
        whole = num_computed // self.sizes.page_size
        if not self.prefix_caching or whole <= pages.num_registered:
            return
        keys = pages.chain.keys(tokens, whole)
        for q in range(pages.num_registered, whole):
            self.full.register(pages.full[q], keys[q])
            if q in pages.window:
                self.window.register(pages.window[q], keys[q])
        pages.num_registered = whole

    def slide(self, pages: SequencePages, next_position: int) -> None:
        """Releases the sliding pages that no query at `next_position` or later can see."""
        first = self.first_visible(next_position)
        while pages.window and (oldest := next(iter(pages.window))) < first:
            self.window.release(pages.window.pop(oldest))
            pages.version += 1

    def free(self, pages: SequencePages) -> None:
        """Releases every page, the last ones first, so that a prefix outlives what follows it."""
        for page in reversed(pages.full):
            self.full.release(page)
        for page in reversed(pages.window.values()):
            self.window.release(page)
        pages.full.clear()
        pages.window.clear()
        pages.version += 1

    def first_visible(self, position: int) -> int:
        """Absolute index of the first page that a sliding layer's query at `position` sees."""
        return max(0, position - self.sizes.window + 1) // self.sizes.page_size

    def ring_end(self, position: int) -> int | None:
        """End of the positions that a call whose first query is at `position` may write.

        Beyond it a page would take the ring entry of one that this query sees. None: no limit.
        """
        if not self.sizes.window:
            return None
        return (self.first_visible(position) + self.sizes.ring_pages) * self.sizes.page_size

    def full_table(self, pages: SequencePages) -> list[int]:
        """Page ids of the full layers, by absolute page index."""
        return list(pages.full)

    def ring_table(self, pages: SequencePages) -> list[int]:
        """Page ids of the sliding layers, `ring_pages` entries; 0 where none is held."""
        table = [0] * self.sizes.ring_pages
        for q, page in pages.window.items():
            table[q % self.sizes.ring_pages] = page
        return table

    def _pages(self, num_tokens: int) -> int:
        return -(-num_tokens // self.sizes.page_size)


def _taken(pool: PagePool) -> int:
    page = pool.allocate()
    assert page is not None, "counted as available"
    return page
