"""The programs that are compared: how to start each, and how to send it a case.

To add one: a function that returns a `Recipe`, and a line in `RECIPES`. Every peer gets the same prompts, the same
weights, and the settings that were fastest for it where a choice had to be made (README.md lists them).
"""

from __future__ import annotations

import asyncio
import ctypes.util
import itertools
import json
import os
import select
import shlex
import socket
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from environments import PeerUnavailable, ensure_environment
from load import Answer, Target, closed_loop, open_session
from process_group import ProcessGroup
from prompts import Prompt

START_TIMEOUT_S = 900.0
REQUEST_TIMEOUT_S = 900.0
POLL_S = 0.02
MODEL_NAME = "bench"
MAX_CONTEXT_TOKENS = 2048


@dataclass(frozen=True, slots=True)
class Place:
    """Where the peers find things: the same weights twice, and a directory for environments, caches and logs."""

    gguf: Path
    hf_dir: Path
    work_dir: Path


@dataclass(frozen=True, slots=True)
class Recipe:
    """How to start a peer. With `ready_path` it is a server on `port`, else it reads batches from its input."""

    command: Sequence[str | Path]
    env: Mapping[str, str] = field(default_factory=dict)
    port: int | None = None
    ready_path: str = ""
    model: str = MODEL_NAME


class RunningPeer(Protocol):
    """A started peer that answers."""

    group: ProcessGroup

    def run(self, prompts: Sequence[Prompt], concurrency: int) -> list[Answer]:
        """Send the prompts, at most `concurrency` at a time, and return their answers in order."""
        ...


def looseleaf(place: Place, extra: Sequence[str]) -> Recipe:
    """Looseleaf from this environment, reading the GGUF file itself."""
    port = free_port()
    program = Path(sys.executable).with_name("looseleaf")
    command: list[str | Path] = [
        program,
        "serve",
        "--model",
        place.gguf,
        "--port",
        str(port),
        "--dtype",
        "bfloat16",
        *extra,
    ]
    return Recipe(command, port=port, ready_path="/readyz", model="")


def vllm(place: Place, extra: Sequence[str]) -> Recipe:
    """vLLM's CPU build, with compiled graphs; `vllm-eager` does without."""
    home = ensure_environment("vllm", place.work_dir)
    port = free_port()
    cores = sorted(os.sched_getaffinity(0))
    env = {
        "VLLM_CPU_KVCACHE_SPACE": "2",  # GiB
        # The default leaves one core free, which on two cores halves the threads that compute.
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
        "VLLM_CACHE_ROOT": str(place.work_dir / "cache/vllm"),
        "TORCHINDUCTOR_CACHE_DIR": str(place.work_dir / "cache/inductor"),
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    # vLLM's documents ask for both; they are used where they are.
    preload = [str(home / "lib/libiomp5.so")] if (home / "lib/libiomp5.so").exists() else []
    if allocator := ctypes.util.find_library("tcmalloc_minimal"):
        preload.append(allocator)
    if preload:
        env["LD_PRELOAD"] = ":".join(preload)
    command: list[str | Path] = [
        home / "bin/vllm",
        "serve",
        place.hf_dir,
        "--served-model-name",
        MODEL_NAME,
        "--dtype",
        "bfloat16",
    ]
    command += ["--max-model-len", str(MAX_CONTEXT_TOKENS), "--host", "127.0.0.1", "--port", str(port), *extra]
    return Recipe(command, env, port=port, ready_path="/health")


def vllm_eager(place: Place, extra: Sequence[str]) -> Recipe:
    """vLLM's CPU build without compiled graphs: starts sooner."""
    return vllm(place, ["--enforce-eager", *extra])


def transformers(place: Place, extra: Sequence[str]) -> Recipe:
    """transformers' `generate`, one static batch after the other, without a server around it."""
    home = ensure_environment("transformers", place.work_dir)
    worker = Path(__file__).with_name("static_generate.py")
    return Recipe([home / "bin/python", worker, place.hf_dir, *extra], {"HF_HUB_OFFLINE": "1"})


RECIPES: dict[str, Callable[[Place, Sequence[str]], Recipe]] = {
    "looseleaf": looseleaf,
    "vllm": vllm,
    "vllm-eager": vllm_eager,
    "transformers": transformers,
}


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

    def run(self, prompts: Sequence[Prompt], concurrency: int) -> list[Answer]:
        """Send the prompts closed loop."""

        async def send() -> list[Answer]:
            async with open_session(REQUEST_TIMEOUT_S) as session:
                return await closed_loop(session, self._target, prompts, concurrency)

        return asyncio.run(send())


class StaticBatchPeer:
    """A peer that takes whole batches: the next one starts when the last row of the one before is done."""

    def __init__(self, group: ProcessGroup) -> None:
        self.group = group
        if not self._read_line(START_TIMEOUT_S):
            raise PeerUnavailable("ended, or said nothing for too long, before it was ready")

    def run(self, prompts: Sequence[Prompt], concurrency: int) -> list[Answer]:
        """Send the prompts in batches of `concurrency`; a row's times are those of its batch's steps."""
        answers: list[Answer] = []
        for begin in range(0, len(prompts), concurrency):
            answers += self._run_batch(prompts[begin : begin + concurrency])
        return answers

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


def free_port() -> int:
    """Return a TCP port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


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
