"""The prefix cache: name full blocks by their content and find them again.

A block's hash covers its tokens, all tokens before it and the namespace, so equal hashes mean equal
prefixes. This file computes hashes and looks them up; which block has which hash, and when a hash is
forgotten, is the pool's business.

Invariant: a hash leads to a block only after the block's KV has been computed, and never after the
block was handed out again.
"""

import hashlib
import hmac
import os
import sys
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import islice

from allocator.errors import AllocatorError, OutOfRange, WeakHash
from allocator.pool import BlockPool
from allocator.quota import PUBLIC
from allocator.subblock import PartialHit, Place, SubBlockIndex

HashBlock = Callable[[bytes, bytes], bytes]  # (parent digest, token bytes) → digest

DIGEST_BYTES = 32  # 256 bits: nobody finds two prefixes with one hash, so tokens need not be compared
TOKEN_BYTES = 4  # fixed width, so that [1, 23] and [12, 3] are different bytes


def sha256_block(parent: bytes, tokens: bytes) -> bytes:
    """Hash one block: `parent` is the digest of the block before it (or the namespace's root)."""
    return hashlib.sha256(parent + tokens).digest()


def namespace_key(secret: bytes, identity: bytes) -> bytes:
    """Derive the namespace of a tenant: a keyed hash, so that it neither shows the identity nor can be guessed.

    `identity` is what the service knows about its caller (an authenticated tenant), never a field of the prompt.
    """
    return hmac.digest(secret, b"looseleaf namespace 1\0" + identity, "sha256")


@dataclass(frozen=True, slots=True)
class Match:
    """The cached blocks of a prompt's beginning, as found at one moment; nothing is held yet.

    `BlockTable.adopt` turns it into held blocks and notices if any of them was reused meanwhile.
    """

    block_ids: tuple[int, ...]
    num_tokens: int  # len(block_ids) × block size, and those of the partial hit
    num_free_hits: int  # hits that nobody holds: adopting them uses up that many free blocks
    hashes: tuple[bytes, ...] = ()  # what each block was found under
    num_lookup_tokens: int = 0  # how many tokens could have been found, for the hit rate
    is_partial_free: bool = False  # whether the partial hit is one of the free ones
    partial: PartialHit | None = None  # the block after them, of which only the beginning fits: it will be copied

    def whole_blocks(self) -> "Match":
        """Return the same match without its partial hit, which needs a block more while it is copied."""
        if self.partial is None:
            return self
        return replace(
            self,
            num_tokens=self.num_tokens - self.partial.num_tokens,
            num_free_hits=self.num_free_hits - self.is_partial_free,
            partial=None,
            is_partial_free=False,
        )


class PrefixCache:
    """Hash blocks, match prompts and publish computed blocks of one pool.

    `secret` seeds every hash; by default it is random, so hashes of one process mean nothing to
    another and cannot be predicted by a user. `hash_block` must be collision resistant: a digest
    below 256 bits, or a function that fails a self-test of `_NUM_PROBES` inputs, raises `WeakHash`.
    """

    def __init__(
        self,
        pool: BlockPool,
        hash_block: HashBlock = sha256_block,
        secret: bytes | None = None,
        *,
        sub_blocks: bool = False,
    ) -> None:
        """`sub_blocks`: also find blocks of which only the first tokens fit (`subblock.py`)."""
        _require_strong(hash_block, pool.block_size)
        self._sub_blocks = SubBlockIndex() if sub_blocks else None
        if self._sub_blocks is not None:
            pool.observe(self._sub_blocks)
        self._pool = pool
        self._hash_block = hash_block
        self._secret = os.urandom(DIGEST_BYTES) if secret is None else secret
        self._public: set[bytes] = set()  # hashes of the blocks of declared public segments

    @property
    def has_sub_blocks(self) -> bool:
        """Whether it looks for blocks of which only the first tokens fit, and so wants the tokens of each."""
        return self._sub_blocks is not None

    @property
    def num_cached(self) -> int:
        """Count the blocks that can be found, held or free."""
        return self._pool.num_findable

    def namespace_of(self, identity: bytes) -> bytes:
        """Derive a tenant's namespace with this cache's secret (`namespace_key`)."""
        return namespace_key(self._secret, identity)

    def declare_public(self, token_ids: Sequence[int], scope: bytes = b"") -> int:
        """Let the full blocks of a segment that begins prompts (a system prompt) be shared by all namespaces.

        Only declare what no tenant could mind others to know: a fast first token tells that it was cached.
        Blocks after the segment are private again. Returns how many blocks the segment fills.
        """
        block_size = self._pool.block_size
        num_full = len(token_ids) // block_size
        tokens = _token_bytes(token_ids[: num_full * block_size])
        parent = self._root(PUBLIC, scope)
        for start in range(0, len(tokens), block_size * TOKEN_BYTES):
            parent = self._hash_block(parent, tokens[start : start + block_size * TOKEN_BYTES])
            self._public.add(parent)
        return num_full

    def is_public(self, block_hash: bytes) -> bool:
        """Say whether a hash belongs to a declared public segment."""
        return block_hash in self._public

    def block_hashes(
        self,
        token_ids: Sequence[int],
        namespace: bytes = b"",
        previous: Sequence[bytes] = (),
        scope: bytes = b"",
    ) -> list[bytes]:
        """Return the chained hashes of all full blocks of `token_ids`, one per block, in order.

        `namespace` keeps tenants apart, `scope` everything else that changes the KV: model revision, KV dtype,
        adapter; a public segment is shared within its scope. `previous`: the hashes already known for the first
        blocks of these tokens with these arguments; only the rest is computed and the result starts with them.
        Token ids are unsigned 32-bit. Raises `OutOfRange`.
        """
        block_size = self._pool.block_size
        num_full = len(token_ids) // block_size
        num_known = len(previous)
        if num_known > num_full:
            raise OutOfRange("len(previous)", num_known, 0, num_full)
        hashes = list(previous)
        if num_known == num_full:
            return hashes
        tokens = _token_bytes(token_ids[num_known * block_size : num_full * block_size])
        hash_block, stride = self._hash_block, block_size * TOKEN_BYTES
        private = 0  # where the bytes of the first private block begin
        if self._public and (not hashes or hashes[-1] in self._public):
            parent = hashes[-1] if hashes else self._root(PUBLIC, scope)
            while private < len(tokens):
                parent = hash_block(parent, tokens[private : private + stride])
                if parent not in self._public:
                    break
                hashes.append(parent)
                private += stride
        if not hashes:
            parent = self._root(namespace, scope)
        elif hashes[-1] in self._public:
            parent = hashlib.sha256(b"looseleaf after public\0" + self._root(namespace, scope) + hashes[-1]).digest()
        else:
            parent = hashes[-1]
        for start in range(private, len(tokens), stride):
            parent = hash_block(parent, tokens[start : start + stride])
            hashes.append(parent)
        return hashes

    def match(
        self,
        hashes: Sequence[bytes],
        max_tokens: int,
        token_ids: Sequence[int] = (),
        namespace: bytes = b"",
        scope: bytes = b"",
    ) -> Match:
        """Find the longest cached run of blocks from the start, of at most `max_tokens` tokens.

        Changes nothing, so it may be repeated while a sequence waits. Give `len(prompt) - 1`: the
        last token must be computed to get its logits. With sub-blocks, `token_ids` (of the whole prompt) and
        what `hashes` were computed with also find a partly fitting block after the run. Raises `OutOfRange`.
        """
        if max_tokens < 0:
            raise OutOfRange("max_tokens", max_tokens, 0)
        block_size = self._pool.block_size
        find = self._pool.find
        block_ids = []
        for key in islice(hashes, max_tokens // block_size):
            block = find(key)
            if block is None:
                break
            block_ids.append(block)
        num_tokens, partial = len(block_ids) * block_size, None
        if self._sub_blocks is not None:
            ahead = token_ids[num_tokens : min(num_tokens + block_size, max_tokens)]
            partial = self._partial_hit(hashes[len(block_ids) - 1] if block_ids else b"", ahead, namespace, scope)
        sources = block_ids if partial is None else [*block_ids, partial.block_id]
        return Match(
            block_ids=tuple(block_ids),
            num_tokens=num_tokens + (0 if partial is None else partial.num_tokens),
            num_free_hits=self._pool.count_free(sources),
            hashes=tuple(hashes[: len(block_ids)]),
            num_lookup_tokens=max_tokens,
            is_partial_free=partial is not None and self._pool.count_free([partial.block_id]) > 0,
            partial=partial,
        )

    def publish(
        self,
        block_id: int,
        block_hash: bytes,
        parent: bytes | None = None,
        depth: int = 0,
        token_ids: Sequence[int] = (),
        namespace: bytes = b"",
        scope: bytes = b"",
    ) -> bool:
        """Make a full block findable, once the KV of its last slot has really been computed.

        `parent` is the hash of the block before it and `depth` how many precede it: for observers, eviction
        policies and sub-blocks, which also need the block's `token_ids` and what the hashes were computed with.
        Returns whether this block is the one now found: the first publisher wins and a duplicate stays private
        to its table. Raises `StaleBlock` when nobody holds the block.
        """
        is_found = self._pool.publish(block_id, block_hash, parent, depth, block_hash in self._public)
        if is_found and self._sub_blocks is not None and token_ids:
            self._sub_blocks.add(block_hash, Place(parent or b"", namespace, scope, token_ids[0]), token_ids)
        return is_found

    def publish_tail(
        self,
        block_id: int,
        parent: bytes | None,
        depth: int,
        token_ids: Sequence[int],
        namespace: bytes = b"",
        scope: bytes = b"",
    ) -> bool:
        """Let the computed beginning of a partly filled block be found as a sub-block, as its sequence ends.

        `token_ids`: the tokens in it, fewer than a block has. A table that goes on after this copies the block
        first. Returns whether it can be found now; False also where sub-blocks are off. Raises `OutOfRange`.
        """
        if not 0 < len(token_ids) < self._pool.block_size:
            raise OutOfRange("len(token_ids)", len(token_ids), 1, self._pool.block_size - 1)
        if self._sub_blocks is None:
            return False
        tail = hashlib.sha256(b"looseleaf tail 1\0" + self._root(namespace, scope) + (parent or b""))
        tail.update(b"\0" + _token_bytes(token_ids))
        key = tail.digest()
        if not self._pool.publish(block_id, key, parent, depth, num_tokens=len(token_ids)):
            return False
        self._sub_blocks.add(key, Place(parent or b"", namespace, scope, token_ids[0]), token_ids)
        return True

    def clear(self) -> None:
        """Forget every published block; tables keep what they hold."""
        self._pool.forget_all()

    def _partial_hit(self, parent: bytes, ahead: Sequence[int], namespace: bytes, scope: bytes) -> PartialHit | None:
        if self._sub_blocks is None or not ahead:
            return None
        longest = self._sub_blocks.longest(Place(parent, namespace, scope, ahead[0]), ahead)
        if longest is None:
            return None
        key, num_tokens = longest
        block = self._pool.find(key)
        return None if block is None else PartialHit(block, key, num_tokens)

    def _root(self, namespace: bytes, scope: bytes) -> bytes:
        """Derive the parent of a first block; lengths go in front so that no two inputs read alike."""
        root = hashlib.sha256(b"looseleaf prefix root 1\0")
        for part in (self._secret, namespace, scope):
            root.update(len(part).to_bytes(8, "little"))
            root.update(part)
        return root.digest()


_NUM_PROBES = 300  # more than 8 bits can keep apart, so a constant or an 8-bit hash always fails


def _require_strong(hash_block: HashBlock, block_size: int) -> None:
    """Refuse a hash that is too short, ignores an input, or has few values. Never a proof of strength."""
    zero, one = bytes(DIGEST_BYTES), bytes(DIGEST_BYTES - 1) + b"\1"
    first = bytes(block_size * TOKEN_BYTES)
    width = block_size * TOKEN_BYTES
    probes = {hash_block(zero, i.to_bytes(TOKEN_BYTES, "little").ljust(width, b"\0")) for i in range(_NUM_PROBES)}
    if any(len(digest) < DIGEST_BYTES for digest in probes):
        raise WeakHash(f"hash_block must return at least {DIGEST_BYTES} bytes")
    if len(probes) < _NUM_PROBES:
        raise WeakHash(
            f"hash_block gave {_NUM_PROBES} different blocks only {len(probes)} digests: users would read each other's KV"
        )
    if hash_block(one, first) == hash_block(zero, first):
        raise WeakHash("hash_block ignores the parent: equal blocks after different prefixes would be mixed up")


def _token_bytes(token_ids: Sequence[int]) -> bytes:
    """Encode token ids as little-endian unsigned 32-bit integers."""
    try:
        tokens = array("I", token_ids)
    except OverflowError as cause:
        worst = next(token for token in token_ids if not 0 <= token < 2 ** (8 * TOKEN_BYTES))
        raise OutOfRange("token id", worst, 0, 2 ** (8 * TOKEN_BYTES) - 1) from cause
    if tokens.itemsize != TOKEN_BYTES:
        raise AllocatorError(f"this platform's unsigned int has {tokens.itemsize} bytes, {TOKEN_BYTES} are needed")
    if sys.byteorder == "big":
        tokens.byteswap()
    return tokens.tobytes()
