"""How each program of the comparison is started.

To add one: a function that returns a `Recipe`, and a line in `RECIPES`. Every peer gets the same prompts, the same weights (in the
format that its row names), and the settings that were fastest for it where a choice had to be made (README.md lists them).
"""

from __future__ import annotations

import ctypes.util
import os
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from environments import ensure_environment
from llama_cpp import ensure_llama_cpp, quantised

MODEL_NAME = "bench"
MAX_CONTEXT_TOKENS = 2048
LLAMA_SLOTS = 32


@dataclass(frozen=True, slots=True)
class Place:
    """Where the peers find things: the same weights twice, a tokenizer, and a directory for environments, models and logs."""

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


def looseleaf(place: Place, extra: Sequence[str]) -> Recipe:
    """Looseleaf from this environment, reading the GGUF file itself; weights in bfloat16."""
    port = free_port()
    command: list[str | Path] = [Path(sys.executable).with_name("looseleaf"), "serve", "--model", place.gguf]
    command += ["--port", str(port), "--dtype", "bfloat16", *extra]
    return Recipe(command, port=port, ready_path="/readyz", model="")


def looseleaf_int8(place: Place, extra: Sequence[str]) -> Recipe:
    """Looseleaf with everything in 8 bits: weights, keys and values."""
    return looseleaf(place, ["--quantize", "int8", "--kv-dtype", "int8", *extra])


def looseleaf_int4(place: Place, extra: Sequence[str]) -> Recipe:
    """Looseleaf with weights in 4 bits, keys and values in 8."""
    return looseleaf(place, ["--quantize", "int4", "--kv-dtype", "int8", *extra])


def plain(recipe: Callable[[Place, Sequence[str]], Recipe]) -> Callable[[Place, Sequence[str]], Recipe]:
    """Return a recipe without guesses: every step brings one token of a sequence, as with the other peers."""
    return lambda place, extra: recipe(place, ["--speculation", "off", *extra])


def vllm(place: Place, extra: Sequence[str]) -> Recipe:
    """vLLM's CPU build, with compiled graphs; `vllm-eager` does without."""
    home = ensure_environment("vllm", place.work_dir)
    port = free_port()
    env = {
        "VLLM_CPU_KVCACHE_SPACE": "2",  # GiB
        # The default leaves one core free, which on two cores halves the threads that compute.
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, sorted(os.sched_getaffinity(0)))),
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
    command: list[str | Path] = [home / "bin/vllm", "serve", place.hf_dir, "--served-model-name", MODEL_NAME]
    command += ["--dtype", "bfloat16", "--max-model-len", str(MAX_CONTEXT_TOKENS)]
    command += ["--host", "127.0.0.1", "--port", str(port), *extra]
    return Recipe(command, env, port=port, ready_path="/health")


def vllm_eager(place: Place, extra: Sequence[str]) -> Recipe:
    """vLLM's CPU build without compiled graphs: starts sooner."""
    return vllm(place, ["--enforce-eager", *extra])


def llama_q4_1(place: Place, extra: Sequence[str]) -> Recipe:
    """llama.cpp's server on the checkpoint as it is shipped."""
    return _llama(place, place.gguf, extra)


def llama_q8_0(place: Place, extra: Sequence[str]) -> Recipe:
    """llama.cpp's server on the checkpoint requantised to Q8_0."""
    return _llama(place, quantised(place.gguf, "Q8_0", place.work_dir), extra)


def _llama(place: Place, gguf: Path, extra: Sequence[str]) -> Recipe:
    binaries = ensure_llama_cpp(place.work_dir)
    port = free_port()
    command: list[str | Path] = [binaries / "llama-server", "--model", gguf, "--alias", MODEL_NAME]
    command += ["--host", "127.0.0.1", "--port", str(port), "--threads", str(len(os.sched_getaffinity(0)))]
    # A slot has the context to itself, so as many slots as requests run at once, each of the whole length.
    command += ["--parallel", str(LLAMA_SLOTS), "--ctx-size", str(LLAMA_SLOTS * MAX_CONTEXT_TOKENS)]
    return Recipe([*command, "--cont-batching", "--no-webui", *extra], port=port, ready_path="/health")


def openvino_bf16(place: Place, extra: Sequence[str]) -> Recipe:
    """OpenVINO GenAI computing in bfloat16. It reads no BF16 GGUF; from F16 it makes its own bfloat16 weights."""
    return _openvino(place, quantised(place.gguf, "F16", place.work_dir), extra)


def openvino_int8(place: Place, extra: Sequence[str]) -> Recipe:
    """OpenVINO GenAI on int8 weights, which it takes from Q8_0."""
    return _openvino(place, quantised(place.gguf, "Q8_0", place.work_dir), extra)


def _openvino(place: Place, gguf: Path, extra: Sequence[str]) -> Recipe:
    home = ensure_environment("openvino", place.work_dir)
    return _front(home, "openvino_front.py", ["--model", gguf, "--precision", "bf16"], place, extra)


def transformers(place: Place, extra: Sequence[str]) -> Recipe:
    """transformers' `generate`, one static batch after the other, without a server around it."""
    home = ensure_environment("transformers", place.work_dir)
    worker = Path(__file__).with_name("static_generate.py")
    return Recipe([home / "bin/python", worker, place.hf_dir, *extra], {"HF_HUB_OFFLINE": "1"})


def transformers_cb(place: Place, extra: Sequence[str]) -> Recipe:
    """transformers' continuous batching."""
    home = ensure_environment("transformers", place.work_dir)
    return _front(home, "transformers_front.py", ["--model", place.hf_dir], place, extra)


def _front(home: Path, program: str, told: Sequence[str | Path], place: Place, extra: Sequence[str]) -> Recipe:
    """Start an engine that has no server behind ours (front.py)."""
    port = free_port()
    command: list[str | Path] = [home / "bin/python", Path(__file__).with_name(program), *told]
    command += ["--tokenizer", place.hf_dir / "tokenizer.json", "--port", str(port), *extra]
    return Recipe(command, {"HF_HUB_OFFLINE": "1"}, port=port, ready_path="/health")


RECIPES: dict[str, Callable[[Place, Sequence[str]], Recipe]] = {
    "looseleaf": looseleaf,
    "looseleaf-int8": looseleaf_int8,
    "looseleaf-int4": looseleaf_int4,
    "looseleaf-plain": plain(looseleaf),
    "looseleaf-int8-plain": plain(looseleaf_int8),
    "looseleaf-int4-plain": plain(looseleaf_int4),
    "vllm": vllm,
    "vllm-eager": vllm_eager,
    "llama-q4_1": llama_q4_1,
    "llama-q8_0": llama_q8_0,
    "openvino-bf16": openvino_bf16,
    "openvino-int8": openvino_int8,
    "transformers": transformers,
    "transformers-cb": transformers_cb,
}

# These take minutes for the full number of requests at 16 and more; one request for each place is enough to time them.
SLOW_PEERS = frozenset({"llama-q4_1", "llama-q8_0", "transformers", "transformers-cb"})

# These take whole batches: no open loop.
STATIC_PEERS = frozenset({"transformers"})


def free_port() -> int:
    """Return a TCP port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
