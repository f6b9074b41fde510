"""Keys of whole pages: a page is known by its tokens and by every token before it."""

import hashlib
from array import array
from collections.abc import Sequence

KEY_BYTES = 16
"""Long enough that two different prefixes never meet, by chance or by intent."""


class HashChain:
    """The page keys of one token sequence, computed once as the sequence grows.

    Key q is the hash of key q - 1 and the tokens of page q. Sequences of another `namespace` share
    no key.
    """

    def __init__(self, page_size: int, namespace: int = 0):
        self._page_size = page_size
        self._root = _digest(namespace.to_bytes(8, "little"))
        self._keys: list[bytes] = []

    def keys(self, tokens: Sequence[int], num_pages: int) -> Sequence[bytes]:
        """At least the first `num_pages` keys of `tokens`, which may only have grown since."""
        size = self._page_size
        assert num_pages * size <= len(tokens), "only whole pages have a key"
        while len(self._keys) < num_pages:
            start = len(self._keys) * size
            page = array("I", tokens[start : start + size])
            parent = self._keys[-1] if self._keys else self._root
            self._keys.append(_digest(parent + page.tobytes()))
        return self._keys


def _digest(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=KEY_BYTES).digest()
