"""Builds what serves a model from a configuration: files, weights, pool, backend, runner, text layer, engine core.

Slow and blocking; runs on the step thread, which from then on owns every object that touches the device. Invariant: whatever cannot work
raises `StartupError` here, and what is returned has already computed a step of every kind.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from msgspec.structs import replace

from allocator import PUBLIC, BlockPool, PrefixCache, Quota, Quotas
from backends.errors import BackendError
from backends.interface import DeviceInfo
from backends.kv_cache import KVCache
from backends.processors import pin_compute_threads
from backends.registry import Selection, select_backend
from service.config import CacheConfig, Config, SchedulerConfig
from service.engine.async_engine import EngineInfo
from service.engine.core import EngineCore
from service.errors import BackendUnavailable
from service.model.fetch import BUILTIN_MODELS, resolve_model
from service.model.loading import LoadedModel, load_model
from service.model.pool_size import QUANTISED_DTYPES, DeviceShare, free_memory, size_pool
from service.model.profiling import cuda_free_bytes, measure
from service.model.runner import ModelRunner
from service.text import ChatTemplate, Tokenizer

Report = Callable[[str], None]

# Tokens of a step that no stream waits for, by default. On a CPU more gain nothing, since reading the weights is then a few hundredths of
# the step, and whoever arrives meanwhile waits for its end (ops/bench/README.md, "Prompts alone").
PREFILL_BUDGETS = {"cpu": 1024, "cuda": 2048}
# Tokens of prompts from which on more in one step are computed no faster: products wait for the processor, not for the weights. On a GPU
# that is more than prompts usually have.
SATURATING_TOKENS = 64
SATURATING_TOKENS_ON_TILES = 256


@dataclass(frozen=True, slots=True)
class Assembly:
    """A model ready to be served. `runner` belongs to the thread that built it, the rest to the event loop."""

    runner: ModelRunner[Any]
    core: EngineCore
    tokenizer: Tokenizer
    template: ChatTemplate
    eos_ids: frozenset[int]
    info: EngineInfo
    refusals: dict[str, list[str]]  # backends that were preferred and could not run, with their reasons


def assemble(config: Config, report: Report) -> Assembly:
    """Build everything; `report` gets one line a phase. Raises `StartupError`."""
    device = available_device(config)
    if config.backend.threads is not None:
        torch.set_num_threads(config.backend.threads)  # by default torch takes the physical cores it may use
    free_at_start = _free_bytes(device)
    path = resolve_model(config.model.path, report=report)
    report(f"loading {path.name}")
    model = load_model(
        path,
        dtype=config.model.dtype,
        device=device.torch_device,
        max_model_len=config.model.max_model_len,
        quantise=config.model.quantize,
    )
    scheduler = scheduling(config.scheduler, device, model.dtype)
    tokenizer, template = _text_layer(model, config)
    spec = model.decoder.kv_cache_spec(config.cache.block_size, quantised=QUANTISED_DTYPES[config.cache.kv_dtype])
    try:
        selection: Selection = select_backend(config.backend.name, spec, device)
    except BackendError as error:
        raise BackendUnavailable(str(error)) from error
    selection.backend.prepare(spec, report)
    num_valid_ids = min(tokenizer.vocab_size, model.config.vocab_size)
    share: DeviceShare | None = None
    if device.kind == "cuda" and config.cache.num_blocks is None and config.cache.size == "auto":
        report("measuring the largest step")
        share = measure(
            model.decoder,
            selection.backend,
            spec,
            scheduler,
            device=device.torch_device,
            num_valid_ids=num_valid_ids,
            max_model_len=model.max_model_len,
            free_at_start=free_at_start,
            free_bytes=lambda: _free_bytes(device),
        )
    size = size_pool(
        config.cache,
        spec,
        free_memory_bytes=_free_bytes(device),
        declared_len=model.max_model_len,
        requested_len=config.model.max_model_len,
        max_num_seqs=scheduler.max_num_seqs,
        device=share,
    )
    runner: ModelRunner[Any] = ModelRunner(
        model.decoder,
        selection.backend,
        KVCache(spec, size.num_blocks, device.torch_device),
        num_valid_ids=num_valid_ids,
        max_model_len=size.max_model_len,
        max_captured_tokens=max(scheduler.token_budget, scheduler.prefill_budget or 0),
    )
    runner.warm_up(report)
    if config.backend.pin and device.kind == "cpu":
        # After the warm-up: threads that torch starts inherit the binding of the thread that starts them.
        report(f"compute threads bound to processors {pin_compute_threads()}")
    pool, prefix_cache = open_pool(config.cache, size.num_blocks)
    core = EngineCore(scheduler, pool, prefix_cache, max_model_len=size.max_model_len)
    info = EngineInfo(
        model=served_name(config),
        backend=selection.backend.name,
        dtype=str(model.dtype).removeprefix("torch."),
        device=device.kind,
    )
    return Assembly(
        runner=runner,
        core=core,
        tokenizer=tokenizer,
        template=template,
        eos_ids=model.eos_ids | tokenizer.eos_ids,
        info=info,
        refusals=selection.refusals,
    )


def scheduling(scheduler: SchedulerConfig, device: DeviceInfo, dtype: torch.dtype) -> SchedulerConfig:
    """Decide what the options leave to the device and the model's dtype; call it when torch knows its number of threads."""
    if scheduler.prefill_budget is None:
        default = PREFILL_BUDGETS[device.kind]
        scheduler = replace(scheduler, prefill_budget=max(default, scheduler.token_budget))
    if scheduler.saturating_tokens is None and device.kind == "cpu":
        from backends.numba_kernels.matrix_tiles import has_matrix_tiles

        most = SATURATING_TOKENS_ON_TILES if has_matrix_tiles() else SATURATING_TOKENS
        scheduler = replace(scheduler, saturating_tokens=most)
    if scheduler.overlap is None:
        # Where every core computes, the loop's work slows the step that it overlaps by as much as it saves between steps.
        has_core_left = torch.get_num_threads() < _num_processors()
        scheduler = replace(scheduler, overlap=device.kind == "cuda" or has_core_left)
    if scheduler.speculation == "auto":
        # Other products may round a token among guesses otherwise than alone; a GPU's steps are better made ahead.
        is_exact = device.kind == "cpu" and dtype == torch.bfloat16
        scheduler = replace(scheduler, speculation="ngram" if is_exact else "off")
    return scheduler


def open_pool(cache: CacheConfig, num_blocks: int) -> tuple[BlockPool, PrefixCache | None]:
    """Make the block pool the service runs on: its references are booked, and no tenant has more than its share."""
    quotas = None
    if cache.tenant_share is not None:
        cap = max(1, int(cache.tenant_share * (num_blocks - 1)))
        quotas = Quotas({PUBLIC: Quota()}, default=Quota(cap=cap))
    pool = BlockPool(num_blocks, cache.block_size, ledger=True, policy=cache.policy, quotas=quotas)
    return pool, PrefixCache(pool, sub_blocks=cache.sub_blocks) if cache.prefix_caching else None


def _num_processors() -> int:
    """Count the processors that the process may use; the calling thread may be bound to fewer."""
    return len(os.sched_getaffinity(os.getpid())) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def available_device(config: Config) -> DeviceInfo:
    """Return the device that `backend.device` names, the best one there is for "auto"; raises `BackendUnavailable`."""
    wanted = config.backend.device
    if wanted == "cpu" or (wanted == "auto" and not torch.cuda.is_available()):
        return DeviceInfo(kind="cpu")
    if not torch.cuda.is_available():
        raise BackendUnavailable("backend.device is cuda and torch sees no CUDA device here")
    return DeviceInfo(kind="cuda", index=0, capability=torch.cuda.get_device_capability(0))


def served_name(config: Config) -> str:
    """Return the name under which clients ask for the model: the one given, else the last part of its path."""
    path = config.model.path
    return config.model.served_name or (path if path in BUILTIN_MODELS else Path(path).name.removesuffix(".gguf"))


def _text_layer(model: LoadedModel, config: Config) -> tuple[Tokenizer, ChatTemplate]:
    source = model.tokenizer_source
    tokenizer = Tokenizer.from_directory(source) if isinstance(source, Path) else Tokenizer.from_gguf_metadata(source)
    override = Path(config.model.chat_template) if config.model.chat_template else None
    return tokenizer, ChatTemplate.load(tokenizer, override=override)


def _free_bytes(device: DeviceInfo) -> int:
    return cuda_free_bytes(device.index) if device.kind == "cuda" else free_memory()
