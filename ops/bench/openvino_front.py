"""OpenVINO GenAI's continuous batching as a peer: its pipeline on a thread of its own, behind `front.py`.

Runs inside the environment of the peer `openvino` and imports nothing of ours but front.py.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import sys
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import openvino as ov  # type: ignore[import-not-found, unused-ignore]  # lives in the peer's environment only
import openvino_genai as genai  # type: ignore[import-not-found, unused-ignore]
from front import Deliver, EngineFailed, parser, serve
from openvino_genai import py_openvino_genai  # type: ignore[import-not-found, unused-ignore]

CACHE_GIB = 2
MAX_BATCHED_TOKENS = 2048
MAX_SEQUENCES = 64
LOOP_TURNS = 8  # accepting a connection, reading it and starting its request take about five


class OpenVinoEngine:
    """Steps the pipeline while there is work. The pipeline is touched by the stepping thread alone."""

    def __init__(self, model: str, precision: str, loop: asyncio.AbstractEventLoop) -> None:
        """Load `model` (a .gguf file); `precision` is what OpenVINO computes in: bf16 or f32."""
        scheduler = genai.SchedulerConfig()
        scheduler.cache_size = CACHE_GIB
        scheduler.max_num_batched_tokens = MAX_BATCHED_TOKENS
        scheduler.max_num_seqs = MAX_SEQUENCES
        scheduler.enable_prefix_caching = True
        properties = {"INFERENCE_PRECISION_HINT": precision, "INFERENCE_NUM_THREADS": len(os.sched_getaffinity(0))}
        self._pipeline = genai.ContinuousBatchingPipeline(model, scheduler, "CPU", properties)
        self._loop = loop
        self._ids = itertools.count()
        self._asked: deque[tuple[int, list[int], int, Deliver]] = deque()
        self._cancelled: deque[int] = deque()
        self._running: dict[int, tuple[Any, Deliver]] = {}
        self._wake = threading.Event()
        self._turned = threading.Event()
        threading.Thread(target=self._work, daemon=True).start()

    def submit(self, prompt_ids: list[int], max_tokens: int, deliver: Deliver) -> Callable[[], None]:
        """Start a request."""
        number = next(self._ids)
        self._asked.append((number, prompt_ids, max_tokens, deliver))
        self._wake.set()

        def cancel() -> None:
            self._cancelled.append(number)
            self._wake.set()

        return cancel

    def _work(self) -> None:
        try:
            while True:
                self._wake.wait()
                self._wake.clear()
                self._admit()
                while self._pipeline.has_non_finished_requests():
                    self._pipeline.step()
                    self._hand_out()
                    self._admit()
        except Exception as error:
            # Nothing could ever answer again: end the program, so that the comparison sees it.
            print(f"the pipeline failed: {error}", file=sys.stderr, flush=True)
            os._exit(1)

    def _admit(self) -> None:
        """Add what was asked for since the last step, and drop what nobody waits for any more."""
        while self._asked:
            number, prompt_ids, max_tokens, deliver = self._asked.popleft()
            config = genai.GenerationConfig()
            config.max_new_tokens = max_tokens
            config.ignore_eos = True
            config.do_sample = False
            ids = ov.Tensor(np.array([prompt_ids], np.int64))
            self._running[number] = (self._pipeline.add_request(number, ids, config), deliver)
        while self._cancelled:
            number = self._cancelled.popleft()
            if number in self._running:
                self._running.pop(number)[0].cancel()

    def _hand_out(self) -> None:
        """Pass the tokens of a step to the event loop, and wait until it has sent them and read what came meanwhile.

        A step holds the interpreter lock from its beginning to its end (measured: a thread that sleeps for half a millisecond at a
        time ran once in a step of 1.9 s). Without this pause tokens would leave, and requests be read, one step late.
        """
        batch: list[tuple[Deliver, list[int] | EngineFailed]] = []
        for number, (handle, deliver) in list(self._running.items()):
            if handle.can_read():
                ids = [id_ for output in handle.read().values() for id_ in output.generated_ids]
                batch.append((deliver, ids))
            status = handle.get_status()
            if status == py_openvino_genai.GenerationStatus.RUNNING:
                continue
            del self._running[number]
            if status != py_openvino_genai.GenerationStatus.FINISHED:
                batch.append((deliver, EngineFailed(f"the pipeline ended a request with {status}")))
        self._turned.clear()
        self._loop.call_soon_threadsafe(self._deliver, batch)
        self._turned.wait()

    def _deliver(self, batch: list[tuple[Deliver, list[int] | EngineFailed]]) -> None:
        for deliver, ids in batch:
            deliver(ids)
        self._turn(LOOP_TURNS)

    def _turn(self, left: int) -> None:
        """Let the loop go round: each turn sends and reads what is ready."""
        if left:
            self._loop.call_soon(self._turn, left - 1)
        else:
            self._turned.set()


def main() -> None:
    """Load the model named on the command line and serve it."""
    options = parser(__doc__ or "")
    options.add_argument("--precision", default="bf16")
    told = options.parse_args()
    loop = asyncio.new_event_loop()
    serve(OpenVinoEngine(told.model, told.precision, loop), told, loop)


if __name__ == "__main__":
    main()
