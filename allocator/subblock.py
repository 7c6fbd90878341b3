"""Sub-block reuse: where no full block matches any more, part of one may.

After the last full hit a prompt may go on like a cached block and then part from it, or end inside it: chat turns do.
The index finds, among the blocks that follow the same prefix, the one with the longest common run of tokens;
`BlockTable.adopt` copies it on write. Nothing is found across namespaces.

Invariant: an entry names a key that can be found now, and the tokens its block really holds.
"""

from collections.abc import Sequence
from itertools import takewhile
from typing import NamedTuple

from allocator.observer import Observer

MAX_SIBLINGS = 32  # blocks compared in one look-up, the newest first


class Place(NamedTuple):
    """Where a block stands: after which key (empty for the first), in whose namespace, beginning with which token."""

    parent: bytes
    namespace: bytes
    scope: bytes
    first_token: int


class PartialHit(NamedTuple):
    """A cached block whose first `num_tokens` tokens are the prompt's next ones."""

    block_id: int
    block_hash: bytes
    num_tokens: int


class SubBlockIndex(Observer):
    """The tokens of published blocks by the prefix they follow."""

    def __init__(self) -> None:
        self._siblings: dict[Place, dict[bytes, tuple[int, ...]]] = {}
        self._places: dict[bytes, Place] = {}

    def add(self, key: bytes, place: Place, token_ids: Sequence[int]) -> None:
        """Remember the tokens of a block that was just published under `key`."""
        if key not in self._places:
            self._places[key] = place
            self._siblings.setdefault(place, {})[key] = tuple(token_ids)

    def longest(self, place: Place, token_ids: Sequence[int]) -> tuple[bytes, int] | None:
        """Return the key with the longest common run with `token_ids`, and its length."""
        best: tuple[bytes, int] | None = None
        siblings = self._siblings.get(place, {})
        for _, (key, tokens) in zip(range(MAX_SIBLINGS), reversed(siblings.items()), strict=False):
            run = sum(1 for _ in takewhile(_are_equal, zip(tokens, token_ids, strict=False)))
            if best is None or run > best[1]:
                best = key, run
        return best

    def removed(self, _block: int, key: bytes) -> None:
        """Forget a block that can no longer be found."""
        place = self._places.pop(key, None)
        if place is not None:
            siblings = self._siblings[place]
            del siblings[key]
            if not siblings:
                del self._siblings[place]

    def cleared(self) -> None:
        """Forget everything."""
        self._siblings.clear()
        self._places.clear()

    def __len__(self) -> int:
        return len(self._places)


def _are_equal(pair: tuple[int, int]) -> bool:
    return pair[0] == pair[1]
