"""The prefix cache seen from a sequence: what it finds, what it offers, and what is being computed for it. Knows no order and no time.

Without a cache (None) nothing is found or offered, and every question has its plain answer.
Invariant: a block is offered only when all of its tokens are known and their KV has been computed.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from allocator import BlockPool, Match, PrefixCache
from service.engine.request import Sequence

NO_MATCH = Match(block_ids=(), num_tokens=0, num_free_hits=0)


class Prefixes:
    """Match and publish the blocks of sequences."""

    def __init__(self, pool: BlockPool, cache: PrefixCache | None) -> None:
        self._pool = pool
        self._cache = cache

    def namespace(self, identity: str) -> bytes:
        """Derive a tenant's namespace; without a prefix cache it only says who is charged."""
        raw = identity.encode()
        return raw if self._cache is None else self._cache.namespace_of(raw)

    # ── Finding ──────────────────────────────────────────────────────────────────────────────────

    def match(self, sequence: Sequence, extent: Literal["whole", "partial"]) -> Match:
        """Look for cached blocks, leaving at least one token to compute, and those whose logprobs are wanted."""
        if self._cache is None:
            return NO_MATCH
        request = sequence.request
        hashes = self._hash(sequence)
        max_tokens = sequence.num_tokens - 1
        if request.lacks_prompt_logprobs:
            max_tokens = min(max_tokens, len(request.prompt_logprobs))
        token_ids = sequence.tokens if extent == "partial" else ()
        return self._cache.match(hashes, max_tokens, token_ids, request.namespace)

    def computing(self, running: Iterable[Sequence]) -> list[Sequence]:
        """List the running sequences that have blocks whose hash is known and whose KV is not computed yet."""
        if self._cache is None:
            return []
        return [sequence for sequence in running if sequence.num_published < len(sequence.hashes)]

    def is_awaiting(self, sequence: Sequence, computing: list[Sequence]) -> bool:
        """Say whether the first block that `sequence` does not find is being computed by one of `computing` that comes before it.

        Nothing is remembered: whatever becomes of the other one, the next step asks again.
        """
        if not computing:
            return False
        hashes = self._hash(sequence)
        # A hash covers all tokens before its block, so who shares a later block shares the first one that is being computed.
        before = [s for s in computing if s.rank < sequence.rank and _have_in_common(s.num_published, s.hashes, hashes)]
        if not before:
            return False
        match = self.match(sequence, "whole")
        index = len(match.block_ids)
        if (index + 1) * self._pool.block_size > match.num_lookup_tokens:
            return False
        return any(s.num_published <= index and _have_in_common(index, s.hashes, hashes) for s in before)

    # ── Offering ─────────────────────────────────────────────────────────────────────────────────

    def publish(self, sequence: Sequence) -> None:
        """Make the blocks that are now full and computed findable."""
        num_full = min(sequence.num_computed, sequence.num_tokens) // self._pool.block_size
        if self._cache is None or sequence.num_published >= num_full:
            return
        block_ids, hashes, block_size = sequence.table.block_ids, self._hash(sequence), self._pool.block_size
        wants_tokens, namespace = self._cache.has_sub_blocks, sequence.request.namespace
        for index in range(sequence.num_published, num_full):
            token_ids = sequence.tokens[index * block_size : (index + 1) * block_size] if wants_tokens else ()
            parent = hashes[index - 1] if index else None
            self._cache.publish(block_ids[index], hashes[index], parent, index, token_ids, namespace)
        sequence.num_published = num_full

    def publish_tail(self, sequence: Sequence) -> None:
        """Let what a sequence that ends has computed of its last block be found: the next turn of a chat begins with it."""
        if self._cache is None or not self._cache.has_sub_blocks:
            return
        num_full = sequence.num_published
        token_ids = sequence.tokens[num_full * self._pool.block_size : sequence.num_computed]
        if 0 < len(token_ids) < self._pool.block_size:
            parent = sequence.hashes[num_full - 1] if num_full else None
            block = sequence.table.block_ids[num_full]
            self._cache.publish_tail(block, parent, num_full, token_ids, sequence.request.namespace)

    def _hash(self, sequence: Sequence) -> list[bytes]:
        """Return the hashes of all its full blocks, computing those that are new."""
        if self._cache is not None and len(sequence.hashes) < sequence.num_tokens // self._pool.block_size:
            sequence.hashes = self._cache.block_hashes(sequence.tokens, sequence.request.namespace, sequence.hashes)
        return sequence.hashes


def _have_in_common(index: int, some: list[bytes], others: list[bytes]) -> bool:
    return index < len(some) and index < len(others) and some[index] == others[index]
