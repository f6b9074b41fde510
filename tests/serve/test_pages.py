"""Pages: none is lost or given twice, hits are complete, windows slide, rings never collide."""

import subprocess
import sys
from collections import OrderedDict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from gemma_jax.errors import ConfigError
from gemma_jax.serve.hash_chain import HashChain
from gemma_jax.serve.page_pool import PagePool
from gemma_jax.serve.pages import CacheSizes, KVPages, PageCount

PAGE, WINDOW = 4, 8


def kv_pages(full=20, window=20, ring=5, prefix_caching=True) -> KVPages:
    return KVPages(CacheSizes(PAGE, full, window, WINDOW, ring), prefix_caching)


def sequence(kv, tokens, namespace=0):
    """Attaches to whatever is cached of `tokens`."""
    return kv.attach(kv.match(tokens, kv.chain(namespace)))


def computed(kv, tokens, namespace=0):
    """A sequence that has computed all of `tokens`, a page at a time, and slid along."""
    pages = sequence(kv, tokens, namespace)
    for end in range(pages.num_cached + PAGE, len(tokens) + PAGE, PAGE):
        end = min(end, len(tokens))
        assert kv.grow(pages, end)
        kv.commit(pages, tokens, end)
        kv.slide(pages, end)
    return pages


# ---- the pool ---------------------------------------------------------------------------------


def test_a_pool_gives_every_page_once():
    pool = PagePool(3)
    assert sorted(pool.allocate() for _ in range(3)) == [0, 1, 2]
    assert pool.allocate() is None
    assert (pool.num_used, pool.num_free, pool.num_cached) == (3, 0, 0)


def test_known_pages_stay_matchable_until_the_oldest_of_them_is_needed():
    pool = PagePool(3)
    pages = {key: pool.allocate() for key in (b"a", b"b", b"c")}
    for key, page in pages.items():
        pool.register(page, key)
    for key in (b"b", b"a", b"c"):
        pool.release(pages[key])
    assert pool.num_cached == 3
    assert pool.allocate() == pages[b"b"]
    assert pool.lookup(b"b") is None
    assert pool.lookup(b"a") == pages[b"a"]


def test_free_pages_go_before_cached_ones():
    pool = PagePool(2)
    known, other = pool.allocate(), pool.allocate()
    pool.register(known, b"k")
    pool.release(known)
    pool.release(other)
    assert pool.allocate() == other
    assert pool.lookup(b"k") == known


def test_a_shared_page_is_free_after_its_last_holder():
    pool = PagePool(1)
    page = pool.allocate()
    pool.register(page, b"k")
    pool.acquire(page)
    pool.release(page)
    assert pool.allocate() is None
    pool.release(page)
    pool.acquire(page)  # from the cache
    assert (pool.holders(page), pool.num_cached) == (1, 0)


def test_the_first_page_of_a_content_keeps_its_key():
    pool = PagePool(2)
    first, second = pool.allocate(), pool.allocate()
    pool.register(first, b"k")
    pool.register(second, b"k")
    assert pool.lookup(b"k") == first
    pool.release(second)
    assert (pool.num_free, pool.num_cached) == (1, 0)


def test_releasing_or_sharing_a_free_page_is_refused():
    pool = PagePool(1)
    with pytest.raises(AssertionError, match="no holder"):
        pool.release(0)
    with pytest.raises(AssertionError, match="free"):
        pool.acquire(0)


class PoolMachine(RuleBasedStateMachine):
    """A pool against the plainest model of one."""

    def __init__(self):
        super().__init__()
        self.pool = PagePool(4)
        self.held: list[int] = []
        self.keys: dict[bytes, int] = {}
        self.cached: OrderedDict[int, None] = OrderedDict()

    @rule()
    def allocate(self):
        page = self.pool.allocate()
        free = set(range(4)) - set(self.held) - set(self.cached)
        if free:
            assert page in free
        elif self.cached:
            assert page == self.cached.popitem(last=False)[0]
            self.keys = {key: p for key, p in self.keys.items() if p != page}
        else:
            assert page is None
            return
        self.held.append(page)

    @precondition(lambda self: self.held)
    @rule(i=st.integers(0, 99))
    def release(self, i):
        page = self.held.pop(i % len(self.held))
        self.pool.release(page)
        if page not in self.held and page in self.keys.values():
            self.cached[page] = None

    @precondition(lambda self: self.held)
    @rule(i=st.integers(0, 99), key=st.sampled_from([b"a", b"b", b"c"]))
    def register(self, i, key):
        page = self.held[i % len(self.held)]
        self.pool.register(page, key)
        if page not in self.keys.values():
            self.keys.setdefault(key, page)

    @precondition(lambda self: self.keys)
    @rule(i=st.integers(0, 99))
    def share(self, i):
        page = list(self.keys.values())[i % len(self.keys)]
        self.pool.acquire(page)
        self.cached.pop(page, None)
        self.held.append(page)

    @invariant()
    def counts_agree(self):
        pool = self.pool
        assert [pool.holders(page) for page in range(4)] == [self.held.count(p) for p in range(4)]
        assert pool.num_used == len(set(self.held))
        assert pool.num_cached == len(self.cached)
        assert pool.num_free + pool.num_cached + pool.num_used == pool.num_pages
        for key in (b"a", b"b", b"c"):
            assert pool.lookup(key) == self.keys.get(key)


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


# ---- keys -------------------------------------------------------------------------------------


def test_a_page_key_depends_on_every_earlier_token_and_the_namespace():
    tokens = [1, 2, 3, 4, 5, 6, 7, 8]
    key = HashChain(PAGE).keys(tokens, 2)
    assert HashChain(PAGE).keys([*tokens, 9], 2)[:2] == key
    other = HashChain(PAGE).keys([0, *tokens[1:]], 2)
    assert set(other).isdisjoint(key)
    assert set(HashChain(PAGE, namespace=1).keys(tokens, 2)).isdisjoint(key)


# ---- prefix hits ------------------------------------------------------------------------------


def test_a_hit_is_whole_pages_and_leaves_a_token_to_compute():
    kv = kv_pages()
    tokens = list(range(12))
    kv.free(computed(kv, tokens))
    assert kv.match(tokens, kv.chain()).num_tokens == 8
    assert kv.match([*tokens, 0], kv.chain()).num_tokens == 12
    assert kv.match([*tokens[:9], 99, 99, 99, 99], kv.chain()).num_tokens == 8
    assert kv.match([99, *tokens[1:]], kv.chain()).num_tokens == 0
    assert kv.match(tokens[:4], kv.chain()).num_tokens == 0


def test_a_hit_takes_the_pages_that_hold_the_prefix():
    kv = kv_pages()
    tokens = list(range(17))
    first = computed(kv, tokens)
    second = sequence(kv, tokens)
    assert second.num_cached == 16
    assert second.full == first.full[:4]
    # A query at 16 sees positions 9 … 16: pages 2 and 3.
    assert second.window == {2: first.window[2], 3: first.window[3]}
    assert kv.full.holders(first.full[0]) == 2
    assert kv.grow(second, 17)
    assert second.full[4] != first.full[4]


def _keys(tokens):
    return list(HashChain(PAGE).keys(tokens, len(tokens) // PAGE))


@settings(max_examples=200, deadline=None)
@given(
    window=st.integers(1, 13),
    full_gone=st.sets(st.integers(0, 5)),
    window_gone=st.sets(st.integers(0, 5)),
)
def test_a_hit_is_the_longest_prefix_with_all_that_its_first_query_sees(
    window, full_gone, window_gone
):
    ring = CacheSizes.min_ring_pages(window, 24, PAGE)
    kv = KVPages(CacheSizes(PAGE, 12, 12, window, ring))
    tokens = list(range(25))
    keys = _keys(tokens)
    for pool, gone in ((kv.full, full_gone), (kv.window, window_gone)):
        for q in range(6):
            page = pool.allocate()
            if q not in gone:
                pool.register(page, keys[q])
            pool.release(page)

    def usable(n):
        visible = {p // PAGE for p in range(max(0, n * PAGE - window + 1), n * PAGE)}
        return not (full_gone & set(range(n)) or window_gone & visible)

    hit = kv.match(tokens, kv.chain())
    assert hit.num_tokens == PAGE * max(n for n in range(7) if usable(n))
    assert len(hit.full) == hit.num_tokens // PAGE
    pages = kv.attach(hit)
    assert set(pages.window) == set(range(kv.first_visible(hit.num_tokens), len(hit.full)))


def test_without_prefix_caching_nothing_is_found_or_kept():
    kv = kv_pages(prefix_caching=False)
    tokens = list(range(13))
    kv.free(computed(kv, tokens))
    assert kv.match(tokens, kv.chain()).num_tokens == 0
    assert kv.full.num_free == kv.full.num_pages


def test_namespaces_share_nothing():
    kv = kv_pages()
    tokens = list(range(13))
    kv.free(computed(kv, tokens, namespace=1))
    assert kv.match(tokens, kv.chain(2)).num_tokens == 0
    assert kv.match(tokens, kv.chain(1)).num_tokens == 12


def test_a_prefix_outlives_what_follows_it():
    kv = kv_pages(full=6, window=6)
    tokens = list(range(21))
    kv.free(computed(kv, tokens))
    other = sequence(kv, [99] * 8)
    assert kv.grow(other, 8)  # two pages: the free sixth and the cached fifth
    assert [kv.full.lookup(key) is None for key in _keys(tokens)] == [False] * 4 + [True]


# ---- growing and sliding ----------------------------------------------------------------------


def test_growing_takes_all_or_nothing():
    kv = kv_pages(full=4, window=3)
    pages = sequence(kv, [0])
    assert not kv.grow(pages, 13)  # four sliding pages
    assert kv.available == PageCount(4, 3)
    assert pages.count == PageCount()
    assert kv.grow(pages, 12)
    assert kv.grow(pages, 11)
    assert kv.available == PageCount(1, 0)


def test_sliding_releases_what_no_later_query_sees():
    kv = kv_pages()
    pages = sequence(kv, [0])
    assert kv.grow(pages, 16)
    kv.slide(pages, 10)  # sees 3 … 10
    assert list(pages.window) == [0, 1, 2, 3]
    kv.slide(pages, 11)  # sees 4 … 11
    assert list(pages.window) == [1, 2, 3]
    assert len(pages.full) == 4


def test_versions_tell_when_a_table_changed():
    kv = kv_pages()
    pages = sequence(kv, [0])
    assert kv.grow(pages, 12)
    version = pages.version
    assert kv.grow(pages, 12)
    kv.slide(pages, 8)
    assert pages.version == version
    kv.slide(pages, 11)
    assert pages.version > version


def test_ring_tables_put_page_q_in_entry_q_mod_ring():
    kv = kv_pages(ring=5)
    pages = computed(kv, list(range(24)))
    assert list(pages.window) == [4, 5]
    table = kv.ring_table(pages)
    assert len(table) == 5
    assert (table[4], table[0]) == (pages.window[4], pages.window[5])
    assert table[1:4] == [0, 0, 0]
    assert kv.full_table(pages) == pages.full


@given(st.integers(1, 40), st.integers(1, 40), st.integers(1, 9))
def test_the_ring_holds_any_chunk_beside_its_window(window, chunk, page):
    ring = CacheSizes.min_ring_pages(window, chunk, page)
    spans = [
        (start + chunk - 1) // page - (start - window + 1) // page + 1
        for start in range(window, window + page)
    ]
    assert ring == max(spans)


@given(st.integers(1, 20), st.integers(1, 5), st.integers(0, 3), st.integers(0, 100))
def test_positions_below_the_ring_end_collide_with_none_that_is_visible(window, page, spare, start):
    ring = CacheSizes.min_ring_pages(window, 1, page) + spare
    kv = KVPages(CacheSizes(page, 1, 1, window, ring))
    end = kv.ring_end(start)
    assert end is not None
    assert end > start
    pages = {p // page for p in range(max(0, start - window + 1), end)}
    assert len({q % ring for q in pages}) == len(pages)
    assert len({q % ring for q in pages | {end // page}}) == len(pages)  # and no further


def test_models_without_sliding_layers_use_one_pool():
    kv = KVPages(CacheSizes(PAGE, 4))
    tokens = list(range(13))
    pages = computed(kv, tokens)
    assert kv.ring_end(5) is None
    assert kv.ring_table(pages) == []
    assert kv.usage == 1.0
    kv.free(pages)
    assert kv.match(tokens, kv.chain()).num_tokens == 12


def test_fits_says_whether_the_whole_cache_would_do():
    kv = kv_pages(full=10, window=3, ring=5)
    assert kv.fits(12)
    assert not kv.fits(13)  # four sliding pages
    assert kv_pages(full=10, window=5, ring=5).fits(40)
    assert not kv_pages(full=10, window=5, ring=5).fits(41)


def test_usage_is_that_of_the_fuller_pool():
    kv = kv_pages(full=10, window=5)
    assert kv.grow(sequence(kv, [0]), 8)
    assert kv.usage == 0.4


@pytest.mark.parametrize(
    ("sizes", "name"),
    [
        ({"page_size": 0}, "page_size=0"),
        ({"num_full_pages": 0}, "num_full_pages=0"),
        ({"ring_pages": 2}, "ring_pages=2.* at least 3"),
        ({"num_window_pages": 0}, "num_window_pages=0"),
    ],
)
def test_impossible_sizes_are_refused_by_name(sizes, name):
    good = {"page_size": 4, "num_full_pages": 8, "num_window_pages": 8, "window": 8}
    with pytest.raises(ConfigError, match=name):
        CacheSizes(**{**good, "ring_pages": 5, **sizes})


def test_pages_and_scheduler_import_no_arrays():
    code = (
        "import sys, gemma_jax.serve.scheduler;"
        "sys.exit(' '.join({'jax', 'numpy', 'flax'} & set(sys.modules)) or 0)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
