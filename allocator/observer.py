"""What a pool tells those who watch it: events, histograms, eviction facts, the sub-block index.

An observer overrides the calls it wants; `BlockPool.observe` looks them up once, so an unwatched pool pays nothing.
Observers are told after the change, must not raise and must not call the pool back.
"""

from typing import NamedTuple


class Publication(NamedTuple):
    """A block of `num_tokens` tokens that became findable under `key`.

    `parent` is the key of the block before it in its prefix, None for the first, and `depth` how many precede it.
    """

    block: int
    key: bytes
    parent: bytes | None
    depth: int
    num_tokens: int


class Observer:
    """Override what you want to be told; the defaults are never called."""

    def stored(self, publication: Publication) -> None:
        """Be told that a block is findable from now on."""

    def removed(self, block: int, key: bytes) -> None:
        """Be told that a block is no longer findable under `key`."""

    def cleared(self) -> None:
        """Be told that every block was unpublished at once; `removed` is not called for them."""

    def freed(self, block: int) -> None:
        """Be told that the last holder gave a published block back."""

    def reused(self, block: int) -> None:
        """Be told that a published block was found and held (once more)."""

    def quarantined(self, block: int, reason: str) -> None:
        """Be told that a block was taken out of service."""
