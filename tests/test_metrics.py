"""The numbers on the dashboard: what they count, that their series are few, and that nothing is kept of a request that has ended."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Sequence

import pytest
from prometheus_client.parser import text_string_to_metric_families

from service.errors import LooseleafError
from service.messages import EngineStats, PoolUsage
from service.metrics import ServiceMetrics
from tests.factories import TestEngine, collect, make_request, running_engine
from tests.fakes import Choose, choose_by_hash

PROMPT = "The cat sat"
EOS = 2

Series = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def end_now_and_then(context: Sequence[int], seed: int) -> int:
    token = choose_by_hash(context, seed)
    return EOS if token % 20 == 0 else token


def an_empty_engine() -> EngineStats:
    return EngineStats(
        model="tiny", backend="fake", dtype="float32", device="cpu", max_model_len=0, running=0, waiting=0,
        pool=PoolUsage(total=0, used=0, cached=0, free=0, shared=0, block_size=4),
        steps=0, preemptions=0, prompt_tokens=0, cached_prompt_tokens=0, generated_tokens=0,
    )  # fmt: skip


class Scraped:
    """Metrics of an engine that is made after them, as in the service."""

    def __init__(self) -> None:
        self.engine: TestEngine | None = None
        self.metrics = ServiceMetrics(lambda: self.engine.engine.stats() if self.engine else an_empty_engine())

    def series(self) -> Series:
        """Scrape; every sample by name and labels, less those of the process."""
        families = text_string_to_metric_families(self.metrics.render().decode())
        return {
            (sample.name, tuple(sorted(sample.labels.items()))): sample.value
            for family in families
            for sample in family.samples
            if not family.name.startswith(("process_", "python_")) and not sample.name.endswith("_created")
        }

    def value(self, name: str, **labels: str) -> float:
        """One sample, 0 where there is none yet."""
        return self.series().get((name, tuple(sorted(labels.items()))), 0.0)


async def end_in_every_way(it: TestEngine, number: int) -> None:
    """Finish two requests, abort two and have one refused."""
    prompt = f"{number % 7} cats sat"
    await asyncio.gather(
        collect(it.engine, make_request(prompt, request_id=f"secret-{number}", temperature=1.0, n=2, max_tokens=12)),
        collect(it.engine, make_request(prompt, stop=("e",), max_tokens=12)),
    )
    stream = it.engine.generate(make_request(prompt, request_id=f"left-{number}", max_tokens=100))
    await anext(stream)
    await stream.aclose()  # type: ignore[attr-defined]
    task = asyncio.create_task(collect(it.engine, make_request(prompt)))
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait([task])
    with pytest.raises(LooseleafError):
        await collect(it.engine, make_request(prompt, logit_bias={999: 1.0}))


async def test_requests_are_counted_by_how_they_ended_and_a_client_that_left_is_no_error() -> None:
    """API-03: aborted, not failed."""
    scraped = Scraped()
    async with running_engine(metrics=scraped.metrics) as it:
        scraped.engine = it
        await collect(it.engine, make_request(PROMPT, max_tokens=8))
        for _ in range(3):
            stream = it.engine.generate(make_request(PROMPT, max_tokens=500))
            await anext(stream)
            await stream.aclose()  # type: ignore[attr-defined]
        with pytest.raises(LooseleafError):
            await collect(it.engine, make_request(()))
        for outcome, count in (("length", 1), ("aborted", 3), ("invalid_request", 1)):
            assert scraped.value("looseleaf_requests_total", outcome=outcome) == count
        assert {name for (name, labels) in scraped.series() if dict(labels).get("outcome")} == {
            "looseleaf_requests_total"
        }
        assert scraped.value("looseleaf_time_to_first_token_seconds_count") >= 1
        assert scraped.value("looseleaf_step_seconds_count") == it.engine.stats().steps
        assert scraped.value("looseleaf_generated_tokens_total") == it.engine.stats().generated_tokens


async def test_drafts_and_how_many_of_them_were_right_can_be_seen() -> None:
    scraped = Scraped()
    repeat: Choose = lambda context, seed: context[-3]  # noqa: E731
    async with running_engine(metrics=scraped.metrics, choose=repeat, speculation="ngram") as it:
        scraped.engine = it
        assert scraped.value("looseleaf_draft_acceptance_ratio") == 0.0
        await collect(it.engine, make_request((10, 11, 12, 10, 11, 12), max_tokens=30))
        drafted, accepted = (
            scraped.value(f"looseleaf_{kind}_total") for kind in ("draft_tokens", "accepted_draft_tokens")
        )
        assert drafted == it.engine.stats().draft_tokens >= accepted == it.engine.stats().accepted_draft_tokens > 20
        assert scraped.value("looseleaf_draft_acceptance_ratio") == accepted / drafted


async def test_preemptions_the_queue_and_the_pool_can_be_seen() -> None:
    """SCH-05: a pool for one and a half of two equal requests."""
    scraped = Scraped()
    async with running_engine(metrics=scraped.metrics, num_blocks=1 + 30, max_num_seqs=2) as it:
        scraped.engine = it
        requests = [make_request((10 + i, 11, 12, 13), max_tokens=76) for i in range(2)]
        await asyncio.gather(*(collect(it.engine, request) for request in requests))
        assert scraped.value("looseleaf_preemptions_total") == it.engine.stats().preemptions > 0
        it.runner.gate.close()
        tasks = [asyncio.create_task(collect(it.engine, request)) for request in requests * 2]
        await it.runner.gate.wait_until_held()
        stats = it.engine.stats()
        assert scraped.value("looseleaf_requests_running") == stats.running == 2
        assert scraped.value("looseleaf_requests_waiting") == stats.waiting == 2
        assert scraped.value("looseleaf_blocks_used") == stats.pool.used > 0
        assert scraped.value("looseleaf_blocks_total") == 30
        it.runner.gate.open()
        await asyncio.gather(*tasks)


async def test_series_are_few_and_name_no_request_prompt_or_user() -> None:
    """OPS-05: their number does not grow with the requests."""
    scraped = Scraped()
    async with running_engine(metrics=scraped.metrics, choose=end_now_and_then) as it:
        scraped.engine = it
        for number in range(20):
            await end_in_every_way(it, number)
        names = set(scraped.series())
        for number in range(20, 120):
            await end_in_every_way(it, number)
        assert set(scraped.series()) == names
        assert "secret" not in scraped.metrics.render().decode()
        assert "cats" not in scraped.metrics.render().decode()
        labels = {label for _, pairs in names for label, _ in pairs}
        assert labels == {"outcome", "le", "model", "backend", "dtype", "block_size"}


async def test_nothing_is_kept_of_requests_that_have_ended() -> None:
    """OPS-05: after a warm-up, hundreds of requests that end in every way leave as many objects as there were."""
    scraped = Scraped()
    async with running_engine(metrics=scraped.metrics, choose=end_now_and_then) as it:
        scraped.engine = it
        counts = []
        for _ in range(3):
            for number in range(80):
                await end_in_every_way(it, number)
            await collect(it.engine, make_request((10,), max_tokens=1))  # what was in flight has been applied
            it.runner.batches.clear()
            scraped.series()
            gc.collect()
            counts.append(len(gc.get_objects()))
        assert abs(counts[2] - counts[1]) < 80  # of 400 requests: not one object for every fifth
