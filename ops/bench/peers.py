"""Starts the programs that are compared (recipes.py says how) and sends them their loads."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import select
import shlex
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from conversation import Turn
from environments import PeerUnavailable
from load import Answer, Target, closed_loop, open_session, timed_loop
from process_group import ProcessGroup
from prompts import Prompt
from recipes import RECIPES, Place, Recipe

START_TIMEOUT_S = 900.0
REQUEST_TIMEOUT_S = 900.0
POLL_S = 0.02


class RunningPeer(Protocol):
    """A started peer that answers."""

    group: ProcessGroup

    def run(self, prompts: Sequence[Prompt], concurrency: int, limit_s: float | None = None) -> list[Answer]:
        """Send the prompts, at most `concurrency` at a time, and return their answers in order; cut them after `limit_s`."""
        ...

    def replay(self, turns: Sequence[Turn], limit_s: float) -> list[Answer]:
        """Send each prompt at its time, whatever became of the ones before; cut what is left after `limit_s`.

        Not for STATIC_PEERS, which take whole batches.
        """
        ...


def start(name: str, place: Place, extra: str, log: Path) -> RunningPeer:
    """Start a peer and wait until it says that it is ready.

    Raises PeerUnavailable, with the end of its log, when it ends or stays silent instead.
    """
    recipe = RECIPES[name](place, shlex.split(extra))
    env = {**os.environ, **recipe.env}
    try:
        group = ProcessGroup(recipe.command, env=env, log=log, pipes=recipe.port is None)
    except OSError as error:
        raise PeerUnavailable(f"{name}: cannot start {recipe.command[0]}: {error}") from error
    try:
        if recipe.port is None:
            return StaticBatchPeer(group)
        return ServerPeer(group, recipe)
    except PeerUnavailable as error:
        group.stop()
        raise PeerUnavailable(f"{name}: {error}; the end of {log}:\n{log_tail(log)}") from error
    except BaseException:  # an interrupt, too, must not leave a server behind
        group.stop()
        raise


class ServerPeer:
    """A peer behind the OpenAI API."""

    def __init__(self, group: ProcessGroup, recipe: Recipe) -> None:
        self.group = group
        url = f"http://127.0.0.1:{recipe.port}"
        _wait_for(group, url + recipe.ready_path)
        self._target = Target(url, recipe.model or _first_model(url))

    def run(self, prompts: Sequence[Prompt], concurrency: int, limit_s: float | None = None) -> list[Answer]:
        """Send the prompts closed loop."""

        async def send() -> list[Answer]:
            async with open_session(REQUEST_TIMEOUT_S) as session:
                return await closed_loop(session, self._target, prompts, concurrency, limit_s)

        return asyncio.run(send())

    def replay(self, turns: Sequence[Turn], limit_s: float) -> list[Answer]:
        """Send each prompt at its time."""

        async def send() -> list[Answer]:
            prompts, arrivals_s = [turn.prompt for turn in turns], [turn.arrival_s for turn in turns]
            async with open_session(REQUEST_TIMEOUT_S) as session:
                return await timed_loop(session, self._target, prompts, arrivals_s, limit_s)

        return asyncio.run(send())


class StaticBatchPeer:
    """A peer that takes whole batches: the next one starts when the last row of the one before is done."""

    def __init__(self, group: ProcessGroup) -> None:
        self.group = group
        if not self._read_line(START_TIMEOUT_S):
            raise PeerUnavailable("ended, or said nothing for too long, before it was ready")

    def run(self, prompts: Sequence[Prompt], concurrency: int, limit_s: float | None = None) -> list[Answer]:
        """Send the prompts in batches of `concurrency`; a row's times are those of its batch's steps.

        A batch cannot be cut: after `limit_s` no further one starts.
        """
        answers: list[Answer] = []
        start = time.perf_counter()
        for begin in range(0, len(prompts), concurrency):
            if limit_s is not None and time.perf_counter() - start >= limit_s:
                break
            answers += self._run_batch(prompts[begin : begin + concurrency])
        return answers

    def replay(self, turns: Sequence[Turn], limit_s: float) -> list[Answer]:
        """Never called: a request that comes while a batch runs could only wait for its end."""
        raise NotImplementedError

    def _run_batch(self, batch: Sequence[Prompt]) -> list[Answer]:
        (max_tokens,) = {prompt.max_tokens for prompt in batch}
        message = {"prompts": [prompt.text for prompt in batch], "max_tokens": max_tokens}
        due = time.perf_counter()
        try:
            self.group.stdin.write(json.dumps(message).encode() + b"\n")
            self.group.stdin.flush()
            line = self._read_line(REQUEST_TIMEOUT_S)
        except BrokenPipeError:
            line = b""
        done = time.perf_counter()
        if not line:
            return [Answer(due=due, done=done, error="the program ended, or took too long") for _ in batch]
        reply = json.loads(line)
        steps = [due + step for step in reply["step_s"]]
        answers = []
        for prompt, num_in, num_out in zip(batch, reply["prompt_tokens"], reply["output_tokens"], strict=True):
            answer = Answer(due=due, first=steps[0], last=steps[-1], done=done, num_chunks=len(steps))
            answer.prompt_tokens, answer.output_tokens = num_in, num_out
            answer.gaps = [after - before for before, after in itertools.pairwise(steps)]
            if num_out != prompt.max_tokens or prompt.num_tokens not in (None, num_in):
                answer.error = f"asked for {prompt.num_tokens} + {prompt.max_tokens} tokens, got {num_in} + {num_out}"
            answers.append(answer)
        return answers

    def _read_line(self, timeout_s: float) -> bytes:
        """Return the next line, empty when the program ended or `timeout_s` passed without one.

        The program answers one line at a time, so nothing can wait in the reader's buffer unseen by `select`.
        """
        ready, _, _ = select.select([self.group.stdout], [], [], timeout_s)
        return self.group.stdout.readline() if ready else b""


def log_tail(log: Path, num_lines: int = 20) -> str:
    """Return the last lines of a log, whatever bytes it holds."""
    return "\n".join(log.read_bytes().decode(errors="replace").splitlines()[-num_lines:])


def _wait_for(group: ProcessGroup, url: str) -> None:
    while time.perf_counter() - group.started < START_TIMEOUT_S:
        if (status := group.exit_status()) is not None:
            raise PeerUnavailable(f"ended with status {status} before it was ready")
        try:
            with urllib.request.urlopen(url, timeout=5) as response:
                if response.status == 200:
                    return
        except (urllib.error.URLError, OSError):
            pass  # not there yet, or there and not ready
        time.sleep(POLL_S)
    raise PeerUnavailable(f"not ready after {START_TIMEOUT_S:.0f} s")


def _first_model(url: str) -> str:
    with urllib.request.urlopen(url + "/v1/models", timeout=30) as response:
        return str(json.load(response)["data"][0]["id"])
