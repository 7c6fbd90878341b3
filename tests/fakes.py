"""Stand-ins for the parts of the service that are slow, random or tied to hardware.

`FakeRunner` is the model runner's double: it has a KV store of its own, and what it "samples" depends on every token of a sequence as read
back through the block table. So a wrong table, a missed copy, a block published too early or reused too soon changes the answer.
"""

from __future__ import annotations

import asyncio
import threading
import zlib
from array import array
from collections.abc import Callable, Iterable, Sequence

from service.engine.batch import (
    EntryOutput,
    PromptLogprob,
    SampledToken,
    StepBatch,
    StepEntry,
    StepOutput,
)

FIRST_ORDINARY_ID = 5  # the tiny tokenizers' ids below are special
VOCAB_SIZE = 320  # of the tiny tokenizers

Choose = Callable[[Sequence[int], int], int]  # (all tokens so far, seed or 0 if greedy) → the next one


def choose_by_hash(context: Sequence[int], seed: int) -> int:
    """Choose an ordinary token as a function of every token of the context, their order, and the seed."""
    digest = zlib.crc32(array("Q", [seed, *context]).tobytes())
    return FIRST_ORDINARY_ID + digest % (VOCAB_SIZE - FIRST_ORDINARY_ID)


def continuation(
    prompt: Iterable[int], num_tokens: int, *, seed: int = 0, choose: Choose = choose_by_hash
) -> list[int]:
    """Return what a perfect engine answers to `prompt`, computed without one; seed 0 means greedy."""
    tokens = list(prompt)
    start = len(tokens)
    for _ in range(num_tokens):
        tokens.append(choose(tokens, seed))
    return tokens[start:]


class ManualClock:
    """A clock that moves only when told to."""

    def __init__(self, now: float = 1000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        """Let time pass."""
        self.now += seconds


class Gate:
    """Lets a test decide when a step may go on. Open unless `close` is called."""

    def __init__(self) -> None:
        self._entered = threading.Semaphore(0)
        self._permits = threading.Semaphore(0)
        self._is_open = threading.Event()
        self._is_open.set()

    def close(self) -> None:
        """Hold every step that starts from now on."""
        self._is_open.clear()

    def open(self) -> None:
        """Let all steps through, those held included."""
        self._is_open.set()
        self._permits.release()

    def let_through(self, num_steps: int = 1) -> None:
        """Let some held steps, or the next ones, through."""
        self._permits.release(num_steps)

    async def wait_until_held(self) -> None:
        """Return when one more step has arrived at the closed gate."""
        assert await asyncio.to_thread(self._entered.acquire, timeout=10.0), "no step came to the gate"

    def enter(self) -> None:
        """Pass; called by the runner on the step thread."""
        if self._is_open.is_set():
            return
        self._entered.release()
        self._permits.acquire()
        if self._is_open.is_set():
            self._permits.release()  # for the next one held


class FakeRunner:
    """A `StepRunner` whose answers prove that the engine's bookkeeping is right; compare with `continuation`.

    `choose` replaces the hash. `fault` may return an exception to raise instead of computing a batch, and `poison` an error for
    one entry. What was run stays in `batches`.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        choose: Choose = choose_by_hash,
        fault: Callable[[StepBatch], BaseException | None] = lambda batch: None,
        poison: Callable[[StepEntry], str | None] = lambda entry: None,
    ) -> None:
        self.block_size = block_size
        self.batches: list[StepBatch] = []
        self.gate = Gate()
        self.is_closed = False
        self.fault = fault
        self.poison = poison
        self._choose = choose
        self._tokens: list[int | None] = [None] * (num_blocks * block_size)  # slot → token
        self._positions: list[int | None] = [None] * (num_blocks * block_size)  # slot → its position when written

    def execute(self, batch: StepBatch) -> StepOutput:
        """Copy, write every entry's tokens, then read every entry's whole context and choose."""
        self.gate.enter()
        self.batches.append(batch)
        if (error := self.fault(batch)) is not None:
            raise error
        for src, dst in batch.copies:
            self._copy_block(src, dst)
        written: set[int] = set()
        for entry in batch.entries:
            self._write(entry, written)
        outputs = tuple(self._output(entry) for entry in batch.entries)
        return StepOutput(step_id=batch.step_id, outputs=outputs, compute_s=0.001)

    def close(self) -> None:
        """Note that the engine has let go."""
        self.is_closed = True

    def _copy_block(self, src: int, dst: int) -> None:
        size = self.block_size
        for store in (self._tokens, self._positions):
            store[dst * size : (dst + 1) * size] = store[src * size : (src + 1) * size]

    def _write(self, entry: StepEntry, written: set[int]) -> None:
        size = self.block_size
        assert entry.token_ids, "an entry without tokens"
        assert len(entry.block_ids) == -(-entry.seq_len // size), "blocks do not cover the tokens exactly"
        for position, token in enumerate(entry.token_ids, entry.start):
            block = entry.block_ids[position // size]
            assert block != 0, "a write to the null block"
            slot = block * size + position % size
            assert slot not in written, "two tokens of a step share a slot"
            written.add(slot)
            self._tokens[slot] = token
            self._positions[slot] = position

    def _output(self, entry: StepEntry) -> EntryOutput:
        if (error := self.poison(entry)) is not None:
            return EntryOutput(sequence_id=entry.sequence_id, error=error)
        context = self._read(entry)
        if context is None:  # behind a step that failed; for anybody else this fails the request, and the test
            return EntryOutput(sequence_id=entry.sequence_id, error="the cache holds tokens of other positions")
        samples = tuple(self._sample(entry, context, seed, entry.num_output_tokens) for seed in entry.seeds)
        if entry.num_drafts:
            samples = self._verified(entry, context)
        targets = entry.prompt_logprob_targets or ()
        prompt_logprobs = tuple(
            PromptLogprob(token_id=token, logprob=-float(position))
            for position, token in enumerate(targets, entry.start + 1)
        )
        return EntryOutput(sequence_id=entry.sequence_id, samples=samples, prompt_logprobs=prompt_logprobs)

    def _read(self, entry: StepEntry) -> list[int] | None:
        size = self.block_size
        tokens: list[int | None] = []
        positions: list[int | None] = []
        for block in entry.block_ids:
            tokens += self._tokens[block * size : (block + 1) * size]
            positions += self._positions[block * size : (block + 1) * size]
        length = entry.seq_len
        if positions[:length] != list(range(length)):
            return None
        return [token for token in tokens[:length] if token is not None]

    def _verified(self, entry: StepEntry, context: list[int]) -> tuple[SampledToken, ...]:
        """Sample behind the known token and behind each draft that the sample before it confirmed."""
        assert len(entry.token_ids) == 1 + entry.num_drafts, "drafts behind anything but one known token"
        (seed,) = entry.seeds
        known = len(context) - entry.num_drafts
        samples: list[SampledToken] = []
        for num_confirmed in range(1 + entry.num_drafts):
            if num_confirmed and samples[-1].token_id != context[known + num_confirmed - 1]:
                break
            prefix = context[: known + num_confirmed]
            samples.append(self._sample(entry, prefix, seed, entry.num_output_tokens + num_confirmed))
        return tuple(samples)

    def _sample(self, entry: StepEntry, context: list[int], seed: int, num_output_tokens: int) -> SampledToken:
        sampling = entry.sampling
        forced = [token for token, bias in sampling.logit_bias.items() if bias >= 100.0]
        token = forced[0] if forced else self._choose(context, 0 if sampling.is_greedy else seed)
        if num_output_tokens < sampling.min_tokens and token in entry.eos_ids:
            token = choose_by_hash(context, 0)
        if sampling.logprobs is None:
            return SampledToken(token_id=token)
        top = tuple((token + rank, -0.25 - rank) for rank in range(sampling.logprobs))
        return SampledToken(token_id=token, logprob=-0.25, top=top)
