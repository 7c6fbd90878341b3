"""What a dashboard shows, in Prometheus' form. Labels are few and bounded: never a request id, a prompt or a user.

Counters and histograms are updated by the engine's hooks; the gauges are read from `EngineStats` when a scrape asks, so that an idle
service does nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector

from service.messages import EngineStats

LATENCY_BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
TOKEN_BUCKETS = (1, 8, 32, 128, 512, 2048, 8192, 32768)


class ServiceMetrics:
    """The service's series. One instance a process, passed to whoever reports."""

    def __init__(self, stats: Callable[[], EngineStats]) -> None:
        """`stats` is called once per scrape."""
        self.registry = CollectorRegistry()
        self._requests = Counter(
            "looseleaf_requests",
            "Requests by how they ended: a finish reason, aborted, or an error code.",
            ["outcome"],
            registry=self.registry,
        )
        self._ttft = Histogram(
            "looseleaf_time_to_first_token_seconds",
            "From arrival to the first token.",
            buckets=LATENCY_BUCKETS_S,
            registry=self.registry,
        )
        self._duration = Histogram(
            "looseleaf_request_duration_seconds",
            "From arrival to the end.",
            buckets=LATENCY_BUCKETS_S,
            registry=self.registry,
        )
        self._output_tokens = Histogram(
            "looseleaf_request_output_tokens",
            "Tokens generated for one request.",
            buckets=TOKEN_BUCKETS,
            registry=self.registry,
        )
        self._step = Histogram(
            "looseleaf_step_seconds",
            "Time of a model step on the step thread.",
            buckets=LATENCY_BUCKETS_S,
            registry=self.registry,
        )
        self._step_tokens = Histogram(
            "looseleaf_step_tokens", "Tokens computed in a step.", buckets=TOKEN_BUCKETS, registry=self.registry
        )
        self.registry.register(_EngineCollector(stats))
        ProcessCollector(registry=self.registry)

    def on_request_ended(self, outcome: str, *, ttft_s: float | None, duration_s: float, output_tokens: int) -> None:
        """Count one request; `outcome` is "stop", "length", "aborted" or an error's code."""
        self._requests.labels(outcome).inc()
        self._duration.observe(duration_s)
        self._output_tokens.observe(output_tokens)
        if ttft_s is not None:
            self._ttft.observe(ttft_s)

    def on_step(self, *, compute_s: float, num_tokens: int) -> None:
        """Count one step."""
        self._step.observe(compute_s)
        self._step_tokens.observe(num_tokens)

    def render(self) -> bytes:
        """Return the exposition text."""
        return generate_latest(self.registry)


class _EngineCollector(Collector):
    """Turns one `EngineStats` into gauges and counters at scrape time."""

    def __init__(self, stats: Callable[[], EngineStats]) -> None:
        self._stats = stats

    def describe(self) -> Iterator[Metric]:
        return iter(())  # the engine may not be there yet when the registry asks

    def collect(self) -> Iterator[Metric]:
        stats = self._stats()
        gauges = {
            "looseleaf_requests_running": ("Sequences in the running batch.", stats.running),
            "looseleaf_requests_waiting": ("Requests in the waiting queue.", stats.waiting),
            "looseleaf_blocks_total": ("Blocks of the pool that can be allocated.", stats.pool.total),
            "looseleaf_blocks_used": ("Blocks held by sequences.", stats.pool.used),
            "looseleaf_blocks_cached": ("Free blocks that the prefix cache can still find.", stats.pool.cached),
            "looseleaf_blocks_shared": ("Blocks held by more than one sequence.", stats.pool.shared),
            "looseleaf_blocks_quarantined": ("Blocks out of service; see the log.", stats.pool.quarantined),
            "looseleaf_block_utilization_ratio": (
                "Used blocks over all blocks.",
                stats.pool.used / stats.pool.total if stats.pool.total else 0.0,
            ),
            "looseleaf_draft_acceptance_ratio": (
                "Accepted drafts over all drafts since the start; 0 without any.",
                stats.accepted_draft_tokens / stats.draft_tokens if stats.draft_tokens else 0.0,
            ),
        }
        for name, (text, value) in gauges.items():
            yield GaugeMetricFamily(name, text, value=value)
        counters = {
            "looseleaf_steps": ("Model steps.", stats.steps),
            "looseleaf_preemptions": ("Sequences preempted for want of blocks.", stats.preemptions),
            "looseleaf_prompt_tokens": ("Prompt tokens of admitted requests.", stats.prompt_tokens),
            "looseleaf_cached_prompt_tokens": ("Of those, found in the prefix cache.", stats.cached_prompt_tokens),
            "looseleaf_generated_tokens": ("Tokens generated.", stats.generated_tokens),
            "looseleaf_draft_tokens": ("Tokens guessed by speculation and verified.", stats.draft_tokens),
            "looseleaf_accepted_draft_tokens": ("Of those, the right ones.", stats.accepted_draft_tokens),
        }
        for name, (text, value) in counters.items():
            yield CounterMetricFamily(name, text, value=value)
        info = GaugeMetricFamily(
            "looseleaf_info", "What is served, as labels.", labels=["model", "backend", "dtype", "block_size"]
        )
        info.add_metric([stats.model, stats.backend, stats.dtype, str(stats.pool.block_size)], 1.0)
        yield info
