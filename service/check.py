"""`looseleaf check`: the effective configuration, where each value came from, and why each backend can or cannot run.

Reads no weights: the model's shape is taken as typical where it is not at hand.
"""

from __future__ import annotations

import platform
from importlib.metadata import version
from typing import Any

import torch

from backends.kv_cache import KVCacheSpec
from backends.registry import open_backend, probe
from service.assembly import available_device
from service.config import Config, LoadedConfig, SchedulerConfig, option_paths
from service.model.pool_size import QUANTISED_DTYPES


def check(loaded: LoadedConfig) -> int:
    """Print the report on standard output; returns 0 if at least one backend can run."""
    lines = ["options"]
    for path, _ in option_paths():
        source = loaded.sources[path]
        shown = (
            "(set)" if path == "server.api_key" and loaded.config.server.api_key else repr(_value(loaded.config, path))
        )
        lines.append(f"  {path:<32} {shown:<24} {source}")
    lines += ["", f"speculation  {_speculation(loaded.config.scheduler)}"]
    device = available_device(loaded.config)
    dtype = torch.bfloat16 if loaded.config.model.dtype == "auto" else getattr(torch, loaded.config.model.dtype)
    spec = KVCacheSpec(
        num_layers=1,
        num_heads=8,
        num_kv_heads=2,
        head_size=64,
        block_size=loaded.config.cache.block_size,
        dtype=dtype,
        quantised=QUANTISED_DTYPES[loaded.config.cache.kv_dtype],
    )
    lines += ["", f"machine  {platform.machine()}, Python {platform.python_version()}, torch {torch.__version__}"]
    lines += [f"         numba {version('numba')}, aiohttp {version('aiohttp')}, device {device.kind}"]
    lines += ["", f"backends (for {loaded.config.model.dtype} on {device.kind}, blocks of {spec.block_size})"]
    can_run = False
    for name, reasons in probe(spec, device).items():
        lines.append(f"  {name:<14} {'cannot run: ' + '; '.join(reasons) if reasons else 'can run'}")
        if not reasons:
            can_run = True
            facts = open_backend(name, spec, device).describe()
            lines += [f"                 {fact}: {text}" for fact, text in facts.items()]
    print("\n".join(lines))
    return 0 if can_run else 1


def _speculation(scheduler: SchedulerConfig) -> str:
    if scheduler.speculation == "off":
        return "off: every step brings one token of a sequence"
    where = "on a CPU in bfloat16 " if scheduler.speculation == "auto" else ""
    return (
        f"{where}up to {scheduler.max_draft_tokens} tokens a sequence and step, guessed from its last {scheduler.max_ngram} to "
        f"{scheduler.min_ngram} tokens; within the budget of {scheduler.token_budget}, less where guesses fail or the batch is large"
    )


def _value(config: Config, path: str) -> Any:
    value: Any = config
    for name in path.split("."):
        value = getattr(value, name)
    return value
