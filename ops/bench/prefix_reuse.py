"""How many prompt blocks each eviction policy finds again, on the Mooncake traces, through the real pool and prefix cache.

    python ops/bench/prefix_reuse.py                  # both traces, blocks of 512 tokens, every policy and pool size
    python ops/bench/prefix_reuse.py --block-size 16  # a pool of a tenth of the working set only: the ids cut into real blocks

Requests come in file order, one at a time: each is matched, computed, published and released before the next, so the figures are of
the policy and nothing else. Only full blocks count. Two bounds stand beside: an unbounded cache, and the offline optimum (Belady's
MIN with bypass: the block next used last goes first). The ids are chained, so MIN keeps prefixes whole and no policy can beat it.
"""

from __future__ import annotations

import argparse
import heapq
import json
import math
import sys
import time
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path

from machine import describe_machine, machine_facts

from allocator import POLICIES, BlockPool, BlockTable, PrefixCache
from service.simulate.trace import HASH_TOKENS, TraceRequest, block_hashes, read_trace

TRACES = Path(__file__).resolve().parents[2] / "tests" / "data" / "traces"
NAMES = ("mooncake_conversation", "mooncake_synthetic")
SHARES = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5)  # of the working set

Prompts = Sequence[Sequence[bytes]]  # the names of each prompt's full blocks


def unbounded_hits(prompts: Prompts) -> int:
    """Count the leading blocks of each prompt that came before."""
    seen: set[bytes] = set()
    hits = 0
    for prompt in prompts:
        hits += _leading(prompt, seen)
        seen.update(prompt)
    return hits


def lru_hits(prompts: Prompts, num_blocks: int) -> int:
    """Count hits of a plain LRU set, independent of the pool: all blocks are touched in order, evictions follow each prompt."""
    cached: OrderedDict[bytes, None] = OrderedDict()
    hits = 0
    for prompt in prompts:
        hits += _leading(prompt, cached)
        for name in prompt:
            cached[name] = None
            cached.move_to_end(name)
        while len(cached) > num_blocks:
            cached.popitem(last=False)
    return hits


def belady_hits(prompts: Prompts, num_blocks: int) -> int:
    """Count the hits of the offline optimum: an upper bound, since it may drop blocks that a running prompt would hold."""
    never = len(prompts)
    next_use: list[list[int]] = []  # for each prompt and block, the next prompt that has the block
    upcoming: dict[bytes, int] = {}
    for index in range(len(prompts) - 1, -1, -1):
        next_use.append([upcoming.get(name, never) for name in prompts[index]])
        upcoming.update(dict.fromkeys(prompts[index], index))
    next_use.reverse()
    cached: dict[bytes, int] = {}  # block → next use
    heap: list[tuple[int, int, bytes]] = []  # furthest next use first, of equals the deepest; outdated entries included
    hits = 0
    for prompt, uses in zip(prompts, next_use, strict=True):
        hits += _leading(prompt, cached)
        for depth, (name, use) in enumerate(zip(prompt, uses, strict=True)):
            cached.pop(name, None)
            if use < never:
                cached[name] = use
                heapq.heappush(heap, (-use, -depth, name))
        while len(cached) > num_blocks:
            use, _, name = heapq.heappop(heap)
            if cached.get(name) == -use:
                del cached[name]
    return hits


def pool_hits(prompts: Prompts, num_blocks: int, policy: str, block_size: int) -> int:
    """Count the hits of the real pool. Of a prompt larger than the pool only the beginning is cached."""
    pool = BlockPool(num_blocks + 1, block_size, policy=policy)
    cache = PrefixCache(pool)
    hits = 0
    for prompt in prompts:
        kept = prompt[:num_blocks]
        match = cache.match(kept, len(kept) * block_size)
        found = len(match.block_ids)
        table = BlockTable(pool)
        table.adopt(match, (len(kept) - found) * block_size)
        for index in range(found, len(kept)):
            parent = kept[index - 1] if index else None
            cache.publish(table.block_ids[index], kept[index], parent=parent, depth=index)
        table.release()
        hits += found
    pool.check([])
    return hits


def main() -> int:
    """Measure, print a table, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--block-size", type=int, default=HASH_TOKENS)
    parser.add_argument("--shares", type=float, nargs="+", help="pool sizes as shares of the working set")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    facts = machine_facts()
    print(describe_machine(facts))
    shares = options.shares or (SHARES if options.block_size == HASH_TOKENS else (0.1,))
    results = []
    for trace_name in NAMES:
        prompts = [
            _full_blocks(request, options.block_size) for request in read_trace(TRACES / f"{trace_name}.jsonl.gz")
        ]
        total = sum(map(len, prompts))
        unique = len({name for prompt in prompts for name in prompt})
        unbounded = unbounded_hits(prompts)
        print(
            f"\n{trace_name}: {total} full blocks of {options.block_size} tokens, {unique} different; unbounded {unbounded} hits"
        )
        for share in shares:
            size = math.ceil(share * unique)
            row = {"trace": trace_name, "block_size": options.block_size, "share": share, "num_blocks": size}
            row |= {"total": total, "unique": unique, "unbounded": unbounded, "belady": belady_hits(prompts, size)}
            row |= {"lru set": lru_hits(prompts, size)}
            for policy in sorted(POLICIES):
                started = time.process_time()
                row[policy] = pool_hits(prompts, size, policy, options.block_size)
                row[f"{policy}_cpu_s"] = round(time.process_time() - started, 2)
            results.append(row)
            cells = [f"{name} {row[name]} ({row[name] / row['belady']:.1%})" for name in ("lru set", *sorted(POLICIES))]
            print(f"  {share:>5.0%} {size:>7} blocks: optimum {row['belady']}; {'; '.join(cells)}", flush=True)
    if options.json:
        options.json.write_text(json.dumps({"machine": facts, "rows": results}, indent=1) + "\n")
    return 0


def _full_blocks(request: TraceRequest, block_size: int) -> list[bytes]:
    return block_hashes(request, block_size)


def _leading(prompt: Sequence[bytes], cached: dict[bytes, int] | OrderedDict[bytes, None] | set[bytes]) -> int:
    for position, name in enumerate(prompt):
        if name not in cached:
            return position
    return len(prompt)


if __name__ == "__main__":
    sys.exit(main())
