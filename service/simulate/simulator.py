"""The simulation: arrivals, steps and their durations, and what came out of it.

Invariant: with and without fast-forwarding every request starts and ends at the same instant.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable
from dataclasses import dataclass

from msgspec import Struct

from allocator import BlockPool, PrefixCache
from service.config import SchedulerConfig
from service.engine.request import RequestKey
from service.errors import ContextTooLong, InvalidRequest, QueueFull
from service.simulate.core import CountingCore, Settled
from service.simulate.cost import StepCost, Work
from service.simulate.trace import TraceRequest, block_hashes

SAMPLE_EVERY = 16  # steps, or runs of quiet ones, of which one is looked at for how full the blocks are
FILL_LIMIT = 2**32


class Engine(Struct, frozen=True, kw_only=True):
    """What is simulated: one engine and the device under it. `num_blocks` counts the null block."""

    cost: StepCost
    num_blocks: int
    block_size: int = 16
    scheduler: SchedulerConfig = SchedulerConfig()
    max_model_len: int = 2**20
    prefix_caching: bool = True
    policy: str = "lru"  # of eviction, a name of `allocator.POLICIES`


class Quantiles(Struct, frozen=True, kw_only=True):
    """Nearest-rank quantiles; NaN of nothing."""

    p50: float
    p90: float
    p99: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Quantiles:
        """Sort and pick."""
        ordered = sorted(values)
        picks = [ordered[math.ceil(q * len(ordered)) - 1] if ordered else math.nan for q in (0.5, 0.9, 0.99)]
        return cls(p50=picks[0], p90=picks[1], p99=picks[2])


class Report(Struct, frozen=True, kw_only=True):
    """What a simulation found. Times are simulated seconds; means are over that time."""

    finished: int
    refused_full: int  # the queue was full
    refused_long: int  # could never fit
    duration_s: float  # from the first arrival to the last end
    steps: int
    fast_forwarded_steps: int
    preemptions: int
    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int
    ttft_s: Quantiles  # from arrival to the first token
    token_s: Quantiles  # between two tokens of a request, its mean
    latency_s: Quantiles  # from arrival to the end
    mean_running: float
    peak_running: int
    mean_used_share: float  # of the pool's blocks, held
    mean_waste_share: (
        float  # of the slots in held blocks, those without a token; blocks that are shared count for each holder
    )

    @property
    def requests_per_s(self) -> float:
        """Finished requests for each simulated second."""
        return self.finished / self.duration_s if self.duration_s else math.nan

    @property
    def hit_rate(self) -> float:
        """The share of the prompt tokens that were cached."""
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else math.nan


def simulate(trace: Iterable[TraceRequest], engine: Engine, *, is_stepwise: bool = False) -> Report:
    """Replay a trace, ordered by arrival, until its last request has ended.

    `is_stepwise` schedules every single step: the same result, slowly. Raises `ConfigError` for hash ids that cannot be cut into the
    engine's blocks.
    """
    pool = BlockPool(engine.num_blocks, engine.block_size, policy=engine.policy)
    prefix_cache = PrefixCache(pool, secret=b"simulation") if engine.prefix_caching else None
    core = CountingCore(engine.scheduler, pool, prefix_cache, max_model_len=engine.max_model_len)
    book = _Book(core, pool)
    requests = iter(trace)
    coming = next(requests, None)
    now = coming.arrival_s if coming is not None else 0.0
    start_s = now
    seconds = engine.cost.seconds
    while True:
        while coming is not None and coming.arrival_s <= now:
            book.submit(coming, engine.block_size)
            following = next(requests, None)
            if following is not None and following.arrival_s < coming.arrival_s:
                raise ValueError("the requests of a trace must come in the order of their arrivals")
            coming = following
        if core.is_idle:
            if coming is None:
                break
            now = coming.arrival_s
            continue
        before = now
        num_quiet = 0 if is_stepwise else core.num_quiet_steps()
        if num_quiet:
            next_s = math.inf if coming is None else coming.arrival_s
            num_sequences, num_context, _ = core.decode_work()
            num_steps = 0
            while num_steps < num_quiet and now < next_s:
                now += seconds(Work(num_sequences, num_context, num_context))
                num_context += num_sequences
                num_steps += 1
            book.spend(now - before, num_steps)
            settled = core.fast_forward(num_steps)
            book.num_fast_forwarded += num_steps
        else:
            work = core.step(now)
            assert work is not None
            now += seconds(work)
            book.spend(now - before, 1)
            settled = core.settle()
        book.settle(settled, now)
    core.check()
    return book.report(now - start_s)


@dataclass(slots=True)
class _Life:
    arrival_s: float
    num_output: int
    first_token_s: float = math.nan


class _Book:
    """Who came when, who was told what when, and the integrals over time."""

    def __init__(self, core: CountingCore, pool: BlockPool) -> None:
        self._core = core
        self._pool = pool
        self._lives: dict[RequestKey, _Life] = {}
        self._ttft_s, self._token_s, self._latency_s = array("d"), array("d"), array("d")
        self._num_submitted = 0
        self._num_full = 0
        self._num_long = 0
        self._num_spent = 0
        self._running_s = 0.0  # running sequences × seconds
        self._used_s = 0.0  # held blocks × seconds
        self._busy_s = 0.0
        self._peak_running = 0
        self._held_s = 0.0  # slots with a token × seconds, sampled
        self._empty_s = 0.0  # slots without one in the last blocks × seconds, sampled
        self.num_fast_forwarded = 0

    def submit(self, request: TraceRequest, block_size: int) -> None:
        """Hand a request to the core, or note why that was refused."""
        self._num_submitted += 1
        try:
            key = self._core.add_counted(
                request.num_prompt,
                request.num_output,
                fill=self._num_submitted % FILL_LIMIT,
                hashes=block_hashes(request, block_size),
                namespace=request.tenant,
            )
        except QueueFull:
            self._num_full += 1
        except (ContextTooLong, InvalidRequest):
            self._num_long += 1
        else:
            self._lives[key] = _Life(request.arrival_s, request.num_output)

    def spend(self, elapsed_s: float, num_steps: int) -> None:
        """Add up what is held during the coming quiet steps, or the scheduled one; now and then, how full it is."""
        num_running = self._core.num_running
        # Quiet steps fill slots at an even pace, so on average half of them are filled, and as many blocks taken as they need.
        filled = num_running * (num_steps - 1) / 2
        self._busy_s += elapsed_s
        self._running_s += elapsed_s * num_running
        self._used_s += elapsed_s * (self._pool.num_used + filled / self._pool.block_size)
        self._peak_running = max(self._peak_running, num_running)
        self._num_spent += 1
        if self._num_spent % SAMPLE_EVERY == 1:
            tables = self._core.running_tables()
            self._held_s += elapsed_s * (sum(table.num_tokens for table in tables) + filled)
            self._empty_s += elapsed_s * sum(table.num_tail_slots for table in tables)

    def settle(self, settled: Settled, now_s: float) -> None:
        """Note what a step, or a run of quiet ones, brought at its end."""
        for key in settled.first_tokens:
            life = self._lives[key]
            life.first_token_s = now_s
            self._ttft_s.append(now_s - life.arrival_s)
        for finished in settled.finished:
            life = self._lives.pop(finished.key)
            self._latency_s.append(now_s - life.arrival_s)
            if finished.num_output_tokens > 1:
                self._token_s.append((now_s - life.first_token_s) / (finished.num_output_tokens - 1))

    def report(self, duration_s: float) -> Report:
        """Sum up."""
        stats = self._core.stats()
        busy_s = self._busy_s or math.nan
        return Report(
            finished=len(self._latency_s),
            refused_full=self._num_full,
            refused_long=self._num_long,
            duration_s=duration_s,
            steps=stats.steps,
            fast_forwarded_steps=self.num_fast_forwarded,
            preemptions=stats.preemptions,
            prompt_tokens=stats.prompt_tokens,
            cached_tokens=stats.cached_prompt_tokens,
            generated_tokens=stats.generated_tokens,
            ttft_s=Quantiles.of(self._ttft_s),
            token_s=Quantiles.of(self._token_s),
            latency_s=Quantiles.of(self._latency_s),
            mean_running=self._running_s / busy_s,
            peak_running=self._peak_running,
            mean_used_share=self._used_s / busy_s / self._pool.num_usable,
            mean_waste_share=self._empty_s / (self._held_s + self._empty_s) if self._held_s else math.nan,
        )
