"""What an operation of the allocator costs, beside a textbook allocator, contiguous arenas and Hugging Face transformers' allocator.

    python ops/bench/allocator_cost.py                      # 1 k, 100 k and 1 M blocks; about two minutes
    PYTHONPATH=DIR python ops/bench/allocator_cost.py       # with transformers, if `pip install --target DIR` put it there

All of them do the same work in the same process, in turn; each figure is the median over the rounds. Every call is timed through the
public API that an engine uses, in CPU time, so that a busy machine stretches nothing but the caches. (Named `allocator_cost.py` because a script `allocator.py` would hide the package.)
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import itertools
import json
import statistics
import sys
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from machine import describe_machine, machine_facts
from textbook import TextbookAllocator

from allocator import BlockPool, BlockTable, PrefixCache
from allocator.contiguous import Arena, BestFitArena, BuddyArena, Reservation

BLOCK = 16  # tokens
PROMPT = 1024  # tokens of an admitted prompt
LONG_PROMPT = 32 * 1024
SIZES = (1_000, 100_000, 1_000_000)
NUM_TOKENS = 64_000  # decode tokens of a round


class Subject(Protocol):
    """One allocator behind the calls that are measured. A sequence is known by the caller's number for it."""

    def append(self, sequence: int, num_tokens: int) -> object:
        """Give a sequence, new or not, slots for more tokens."""

    def release(self, sequence: int) -> object:
        """End a sequence."""


class Paged:
    """`allocator/` as the engine uses it; tables are kept in a dict because the others find them by name too."""

    def __init__(self, num_blocks: int) -> None:
        self.pool = BlockPool(num_blocks + 1, BLOCK)
        self.cache = PrefixCache(self.pool)
        self.tables: dict[int, BlockTable] = {}

    def append(self, sequence: int, num_tokens: int) -> object:
        table = self.tables.get(sequence)
        if table is None:
            table = self.tables[sequence] = BlockTable(self.pool)
        return table.append(num_tokens)

    def release(self, sequence: int) -> object:
        return self.tables.pop(sequence).release()

    def fork(self, parent: int, child: int) -> None:
        self.tables[child] = self.tables[parent].fork()

    def publish(self, sequence: int, tokens: list[int]) -> None:
        hashes = self.cache.block_hashes(tokens, b"")
        for block, key in zip(self.tables[sequence].block_ids, hashes, strict=False):
            self.cache.publish(block, key)

    def match(self, tokens: list[int]) -> int:
        return len(self.cache.match(self.cache.block_hashes(tokens, b""), len(tokens)).block_ids)


class Textbook:
    """The textbook allocator."""

    def __init__(self, num_blocks: int) -> None:
        self.inner = TextbookAllocator(num_blocks, BLOCK)
        self.append, self.release, self.fork = self.inner.append, self.inner.release, self.inner.fork

    def publish(self, sequence: int, tokens: list[int]) -> None:
        for block, key in zip(self.inner.tables[sequence], self.inner.hashes(tokens), strict=False):
            self.inner.publish(block, key)

    def match(self, tokens: list[int]) -> int:
        return len(self.inner.match(self.inner.hashes(tokens)))


class Contiguous:
    """Reservations in an arena of as many slots; each sequence reserves `max_tokens`."""

    def __init__(self, make: Callable[[int], Arena], num_blocks: int, max_tokens: int) -> None:
        self.arena = make(num_blocks * BLOCK)
        self.max_tokens = max_tokens
        self.sequences: dict[int, Reservation] = {}

    def append(self, sequence: int, num_tokens: int) -> object:
        held = self.sequences.get(sequence)
        if held is None:
            held = self.sequences[sequence] = Reservation(self.arena, self.max_tokens)
        return held.append(num_tokens)

    def release(self, sequence: int) -> object:
        return self.sequences.pop(sequence).release()


class Transformers:
    """The allocator of transformers' continuous batching, over a cache tensor of one byte for each number."""

    def __init__(self, num_blocks: int) -> None:
        import torch
        from transformers import LlamaConfig
        from transformers.generation.continuous_batching.cache_allocators.cache_pool import CachePool
        from transformers.generation.continuous_batching.cache_allocators.full_attention import (
            FullAttentionCacheAllocator,
        )

        config = LlamaConfig(
            hidden_size=8, num_attention_heads=1, num_key_value_heads=1, num_hidden_layers=1, head_dim=1
        )
        self.inner = FullAttentionCacheAllocator(0, config, 1, torch.uint8, BLOCK, [0], True)
        size = self.inner.bytes_per_block  # one block a sector, as for a model with one kind of attention
        self.pool = CachePool(num_blocks, 1)
        tensor = torch.zeros((num_blocks + 2) * size, dtype=torch.uint8)
        self.inner.register_cache_tensor(size, num_blocks * size, tensor, self.pool)
        self.lengths: dict[int, int] = {}

    def append(self, sequence: int, num_tokens: int) -> object:
        length = self.lengths.get(sequence, 0)
        name = str(sequence)
        for _ in range(self.inner.needs_new_sectors(name, length, num_tokens)):
            self.pool.allocate_sector(0)
        self.lengths[sequence] = length + num_tokens
        return self.inner.allocate_cache_to_request(name, length, num_tokens)

    def release(self, sequence: int) -> object:
        del self.lengths[sequence]
        return self.inner.free_blocks(str(sequence))

    def fork(self, parent: int, child: int) -> None:
        needed = self.inner.count_non_shareable_blocks(str(parent), self.lengths[parent])
        for _ in range(needed - self.pool.count_free_blocks(0)):
            self.pool.allocate_sector(0)
        self.inner.fork_blocks(str(parent), str(child), self.lengths[parent])
        self.lengths[child] = self.lengths[parent]

    def publish(self, sequence: int, tokens: list[int]) -> None:
        self.inner.mark_complete_blocks(str(sequence), tokens, len(tokens) // BLOCK)

    def match(self, tokens: list[int]) -> int:
        return len(self.inner.match_prefix_blocks(tokens))


def main() -> int:
    """Measure, print the tables, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="blocks of a pool")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    facts = machine_facts()
    print(describe_machine(facts))
    results = []
    for num_blocks in options.sizes:
        makers = _makers(num_blocks)
        rows: dict[str, list[dict[str, float]]] = {name: [] for name in makers}
        for _ in range(options.rounds):
            for name, make in makers.items():
                rows[name].append(measure(make, num_blocks))
        for name, make in makers.items():
            if not isinstance(make(), Contiguous):
                rows[name].append(metadata(make, num_blocks))
        print(f"\n{num_blocks:,} blocks of {BLOCK} tokens; median of {options.rounds} rounds")
        operations = list(dict.fromkeys(itertools.chain(*(row for measured in rows.values() for row in measured))))
        print(f"| operation | {' | '.join(makers)} |\n|---|{'---:|' * len(makers)}")
        for operation in operations:
            cells = []
            for name in makers:
                values = [row[operation] for row in rows[name] if operation in row]
                cells.append(f"{statistics.median(values):,.3g}" if values else "–")
                if not values:
                    continue
                entry = {"blocks": num_blocks, "allocator": name, "operation": operation}
                results.append(entry | {"median": statistics.median(values), "min": min(values), "max": max(values)})
            print(f"| {operation} | {' | '.join(cells)} |", flush=True)
    if options.json:
        options.json.write_text(json.dumps({"machine": facts, "rows": results}, indent=1) + "\n")
    return 0


def measure(make: Callable[[], Any], num_blocks: int) -> dict[str, float]:
    """Measure every operation once on a new allocator."""
    subject = make()
    gc.collect()
    gc.disable()
    try:
        result = _decode(subject, num_blocks) | _admit(subject, num_blocks)
        if hasattr(subject, "fork"):
            result |= _fork(subject, num_blocks) | _match(subject, num_blocks)
    finally:
        gc.enable()
    return result


def metadata(make: Callable[[], Any], num_blocks: int) -> dict[str, float]:
    """Count the bytes of Python objects: of a new pool, and with every block free, full and findable, as after an hour of traffic."""
    gc.collect()
    tracemalloc.start()
    subject = make()
    empty = tracemalloc.get_traced_memory()[0]
    tokens = [position % 50_000 for position in range(PROMPT)]
    for sequence in range(num_blocks * BLOCK // PROMPT):
        tokens[0] = 50_000 + sequence  # so that no prompt is like another
        subject.append(sequence, PROMPT)
        subject.publish(sequence, tokens)
        subject.release(sequence)
    gc.collect()
    full = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    return {"metadata, new, B/block": empty / num_blocks, "metadata, all cached, B/block": full / num_blocks}


def _decode(subject: Subject, num_blocks: int) -> dict[str, float]:
    """Sequences take turns to get one token: the decode steps of a batch. Half of the pool is used at the end."""
    num_sequences = min(64, num_blocks // 64)
    num_rounds = min(NUM_TOKENS, num_blocks * BLOCK // 2) // num_sequences
    for sequence in range(num_sequences):
        subject.append(sequence, 1)
    append = subject.append
    started = time.process_time_ns()
    for _ in range(num_rounds):
        for sequence in range(num_sequences):
            append(sequence, 1)
    elapsed = time.process_time_ns() - started
    for sequence in range(num_sequences):
        subject.release(sequence)
    return {"append a token, ns": elapsed / (num_rounds * num_sequences)}


def _admit(subject: Subject, num_blocks: int) -> dict[str, float]:
    """Prompts are admitted until nine tenths of the pool are held, then leave in the order in which they came."""
    per_prompt = PROMPT // BLOCK
    num_prompts = min(num_blocks * 9 // 10 // per_prompt, 2000)
    started = time.process_time_ns()
    for sequence in range(num_prompts):
        subject.append(sequence, PROMPT)
    middle = time.process_time_ns()
    for sequence in range(num_prompts):
        subject.release(sequence)
    end = time.process_time_ns()
    return {
        f"take {PROMPT // BLOCK} blocks, ns": (middle - started) / num_prompts,
        f"release {PROMPT // BLOCK} blocks, ns": (end - middle) / num_prompts,
    }


def _fork(subject: Any, num_blocks: int) -> dict[str, float]:
    """A sequence of 1016 tokens is forked and each branch gets a token, which copies the shared last block."""
    num_forks = min(200, num_blocks // 4)
    subject.append(0, PROMPT - 8)
    started = time.process_time_ns()
    for child in range(1, num_forks + 1):
        subject.fork(0, child)
    middle = time.process_time_ns()
    grown = [subject.append(child, 1) for child in range(1, num_forks + 1)]
    end = time.process_time_ns()
    if isinstance(subject, Paged):
        subject.pool.finish_copies(copy for growth in grown for copy in growth.copies)
    for sequence in range(num_forks + 1):
        subject.release(sequence)
    return {
        f"fork a table of {PROMPT // BLOCK} blocks, ns": (middle - started) / num_forks,
        "first append after a fork, ns": (end - middle) / num_forks,
    }


def _match(subject: Any, num_blocks: int) -> dict[str, float]:
    """A long prompt is computed, published, released, and looked up again, hashing included."""
    length = min(LONG_PROMPT, num_blocks // 2 * BLOCK)
    tokens = [(position * 2654435761) % 50_000 for position in range(length)]
    subject.append(0, length)
    subject.publish(0, tokens)
    subject.release(0)
    times = []
    for _ in range(3):
        started = time.process_time_ns()
        found = subject.match(tokens)
        times.append(time.process_time_ns() - started)
    assert found >= length // BLOCK - 1, "the prompt was not found"
    milliseconds = min(times) / 1e6
    return {f"match a prompt of {length}, ms": milliseconds}


def _makers(num_blocks: int) -> dict[str, Callable[[], Any]]:
    makers: dict[str, Callable[[], Any]] = {
        "allocator/": lambda: Paged(num_blocks),
        "textbook": lambda: Textbook(num_blocks),
        # No sequence here ever has more tokens than PROMPT: the best case of a reservation.
        "best fit": lambda: Contiguous(BestFitArena, num_blocks, PROMPT),
        "buddy": lambda: Contiguous(BuddyArena, num_blocks, PROMPT),
    }
    if importlib.util.find_spec("transformers") is not None:
        import transformers

        makers[f"transformers {transformers.__version__}"] = lambda: Transformers(num_blocks)
    return makers


if __name__ == "__main__":
    sys.exit(main())
