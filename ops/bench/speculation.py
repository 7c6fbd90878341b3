"""What speculation brings: the same requests with and without it, in turn in one process, over texts that repeat themselves and others.

    python ops/bench/speculation.py [--texts prose quotation] [--concurrency 1 4 16] [--rounds 5] [--temperature 0.8]

No server and no wire: engine core and model runner alone, so that a ratio says what a step does. The answers with and without must be
equal, or it ends with an error. Times are the best of the rounds; prefill is left out. CPU seconds are of all threads of the process and
say more than wall time while something else wants the cores.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from allocator import BlockPool
from service.assembly import Assembly, assemble
from service.config import BackendConfig, Config, ModelConfig, SchedulerConfig
from service.engine.core import EngineCore
from service.engine.request import ChoiceAdvanced
from service.messages import SamplingParams

BOOK = Path(__file__).parents[2] / "tests/data/text/alice.txt"

CODE = """\
class Order:
    def __init__(self, customer, items, discount):
        self.customer = customer
        self.items = items
        self.discount = discount

    def total(self):
        total = sum(item.price * item.quantity for item in self.items)
        return total - total * self.discount

    def describe(self):
        return f"{self.customer}: {len(self.items)} items, {self.total()} in total"
"""


@dataclass
class Measured:
    """One run: the tokens of each answer, and what they took."""

    answers: list[list[int]]
    num_decoded: int  # tokens behind the first of each answer
    seconds: float
    cpu_seconds: float
    drafted: int
    accepted: int

    @property
    def rate(self) -> float:
        """Decoded tokens a second."""
        return self.num_decoded / self.seconds


def main() -> None:
    """Print one line for each text and concurrency."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--texts", nargs="+", choices=list(TEXTS), default=list(TEXTS))
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--max-draft-tokens", type=int, default=8)
    parser.add_argument("--max-ngram", type=int, default=3)
    parser.add_argument("--min-ngram", type=int, default=1)
    options = parser.parse_args()
    config = Config(
        model=ModelConfig(path=options.model, dtype=options.dtype, max_model_len=2048),
        backend=BackendConfig(threads=options.threads),
    )
    parts = assemble(config, lambda _: None)
    schedulers = {
        "off": SchedulerConfig(),
        "ngram": SchedulerConfig(
            speculation="ngram",
            max_draft_tokens=options.max_draft_tokens,
            min_ngram=options.min_ngram,
            max_ngram=options.max_ngram,
        ),
    }
    sampling = SamplingParams(temperature=options.temperature, max_tokens=options.max_tokens, ignore_eos=True, seed=1)
    print("text         c |     off   ngram tok/s | ratio | CPU s, off / ngram | tokens a row | drafts accepted")
    for name, concurrency in product(options.texts, options.concurrency):
        make = TEXTS[name](parts)
        prompts = [next(make) for _ in range(concurrency)]
        best: dict[str, Measured] = {}
        for _ in range(options.rounds):
            for key, scheduler in schedulers.items():
                measured = run(parts, scheduler, prompts, sampling)
                if key not in best:
                    best[key] = measured
                best[key].seconds = min(best[key].seconds, measured.seconds)
                best[key].cpu_seconds = min(best[key].cpu_seconds, measured.cpu_seconds)
        off, on = best["off"], best["ngram"]
        if off.answers != on.answers:
            sys.exit(f"{name}: the answers with and without speculation differ")
        print(
            f"{name:<10} {concurrency:>3} | {off.rate:7.1f} {on.rate:7.1f}       | {on.rate / off.rate:5.2f} | {off.cpu_seconds / on.cpu_seconds:18.2f} | "
            f"{on.num_decoded / (on.num_decoded - on.accepted):13.2f} | {on.accepted} of {on.drafted}",
            flush=True,
        )


def run(
    parts: Assembly, scheduler: SchedulerConfig, prompts: list[tuple[int, ...]], sampling: SamplingParams
) -> Measured:
    """Answer all prompts at once; the time counts from when each has its first token."""
    num_blocks = parts.core.stats().pool.total + 1
    pool = BlockPool(num_blocks, parts.core.stats().pool.block_size)
    core = EngineCore(scheduler, pool, None, max_model_len=parts.core.capacity)
    keys = [core.add(prompt, sampling, seed=0) for prompt in prompts]
    answers: dict[int, list[int]] = {int(key): [] for key in keys}
    begin = cpu_begin = 0.0
    num_decoded = 0
    while (batch := core.schedule(0.0)) is not None:
        is_decoding = all(answers.values())
        if is_decoding and not begin:
            begin, cpu_begin = time.perf_counter(), time.process_time()
        for event in core.apply(parts.runner.execute(batch)):
            if isinstance(event, ChoiceAdvanced) and event.token is not None:
                answers[int(event.key)].append(event.token.token_id)
                num_decoded += is_decoding
    stats = core.stats()
    return Measured(
        list(answers.values()),
        num_decoded,
        time.perf_counter() - begin,
        time.process_time() - cpu_begin,
        stats.draft_tokens,
        stats.accepted_draft_tokens,
    )


def prose(parts: Assembly) -> Iterator[tuple[int, ...]]:
    """Begin with 200 tokens of a novel."""
    words = BOOK.read_text(encoding="utf-8").split()
    for start in range(1000, len(words), 500):
        yield tuple(parts.tokenizer.encode(" ".join(words[start : start + 300])))[:200]


def quotation(parts: Assembly) -> Iterator[tuple[int, ...]]:
    """Ask for a passage to be repeated word for word."""
    words = BOOK.read_text(encoding="utf-8").split()
    for start in range(1000, len(words), 500):
        passage = " ".join(words[start : start + 110])
        yield _chat(parts, f"Repeat the following text word for word.\n\n{passage}")


def edit(parts: Assembly) -> Iterator[tuple[int, ...]]:
    """Ask for a small change in a piece of code."""
    for number in range(1000):
        yield _chat(parts, f"Rename `discount` to `rebate{number or ''}` in this code. Answer with the code.\n\n{CODE}")


def _chat(parts: Assembly, content: str) -> tuple[int, ...]:
    return tuple(parts.template.encode([{"role": "user", "content": content}]))


TEXTS: dict[str, Callable[[Assembly], Iterator[tuple[int, ...]]]] = {
    "prose": prose,
    "quotation": quotation,
    "edit": edit,
}


if __name__ == "__main__":
    main()
