"""A fixed number of pages: which are free, who holds one, and which still hold known content.

A page is in one of three states. *Used*: held by one or more sequences. *Cached*: held by none, but
its content has a key, so that a later sequence may take it over. *Free*: held by none, no content.
"""

from collections import OrderedDict


class PagePool:
    """Page ids 0 … `num_pages` - 1 with reference counts and a last-recently-used cache."""

    def __init__(self, num_pages: int):
        self._holders = [0] * num_pages
        self._keys: list[bytes | None] = [None] * num_pages
        self._page_of: dict[bytes, int] = {}
        self._free = list(range(num_pages - 1, -1, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()  # least recently used first

    @property
    def num_pages(self) -> int:
        return len(self._holders)

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    @property
    def num_used(self) -> int:
        return self.num_pages - self.num_available

    @property
    def num_available(self) -> int:
        """Pages that `allocate` can still give: free ones and cached ones."""
        return len(self._free) + len(self._cached)

    def holders(self, page: int) -> int:
        """Number of sequences that hold `page`."""
        return self._holders[page]

    def allocate(self) -> int | None:
        """A page for one holder, its content forgotten; None when every page is used.

        Free pages go first, then the cached page that was released longest ago.
        """
        if self._free:
            page = self._free.pop()
        elif self._cached:
            page, _ = self._cached.popitem(last=False)
            self._forget(page)
        else:
            return None
        self._holders[page] = 1
        return page

    def acquire(self, page: int) -> None:
        """Adds a holder to a used or cached page."""
        assert self._holders[page] or page in self._cached, f"page {page} is free"
        self._cached.pop(page, None)
        self._holders[page] += 1

    def release(self, page: int) -> None:
        """Takes one holder away; the last one leaves the page cached if it has a key."""
        assert self._holders[page] > 0, f"page {page} has no holder"
        self._holders[page] -= 1
        if self._holders[page]:
            return
        if self._keys[page] is None:
            self._free.append(page)
        else:
            self._cached[page] = None

    def register(self, page: int, key: bytes) -> None:
        """Makes the content of a used page known as `key`; an earlier page with that key stays."""
        assert self._holders[page] > 0, f"page {page} has no holder"
        if key not in self._page_of and self._keys[page] is None:
            self._page_of[key] = page
            self._keys[page] = key

    def lookup(self, key: bytes) -> int | None:
        """The used or cached page whose content is `key`."""
        return self._page_of.get(key)

    def _forget(self, page: int) -> None:
        key = self._keys[page]
        assert key is not None
        del self._page_of[key]
        self._keys[page] = None
