"""Every option of the service, as one frozen tree. Defaults < TOML file < environment < flags.

An unknown key or a bad value fails with its path (`at $.cache.block_size`), before anything is loaded. Sizes in bytes accept "512MiB" or
"2GiB". The environment name of `cache.block_size` is `LOOSELEAF_CACHE__BLOCK_SIZE`, its flag `--cache.block-size`; common ones have a
short flag too (see `FLAG_ALIASES`). Invariant: nothing outside this file reads the environment for an option.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta, Struct

from service.errors import ConfigError

ENVIRONMENT_PREFIX = "LOOSELEAF_"

Positive = Annotated[int, Meta(ge=1)]
Seconds = Annotated[float, Meta(gt=0.0)]


class Section(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A group of options. Unknown keys are refused, since a misspelt option that is silently ignored is the worst kind."""


class ModelConfig(Section, frozen=True, kw_only=True):
    """Which model and how it is loaded."""

    path: str = "smollm2-135m"  # directory, .gguf file, Hugging Face repository id, or the built-in name
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    quantize: Literal["none", "stored", "int8", "int4"] = "none"  # how a CPU holds the matrices, see ops/README.md
    max_model_len: Positive | None = None  # None: what the model declares, as far as the pool allows
    served_name: str | None = None  # None: the last part of `path`
    chat_template: str | None = None  # a Jinja file that replaces the model's own


class CacheConfig(Section, frozen=True, kw_only=True):
    """The block pool."""

    block_size: Literal[8, 16, 32, 64, 128] = 16  # tokens a block
    num_blocks: Annotated[int, Meta(ge=2)] | None = None  # takes precedence over `size`
    size: str = (
        "auto"  # bytes, say "2GiB"; "auto": on a CPU 384 tokens for each of `max_num_seqs`, one full context at least, a fifth of the free
        # memory and 4 GiB at most: more only keeps more prefixes; on a GPU see the next option
    )
    gpu_memory_utilization: Annotated[float, Meta(gt=0.0, le=1.0)] = (
        0.9  # of the GPU's free memory, for weights, the largest step (measured) and the pool, which takes the rest
    )
    kv_dtype: Literal["auto", "int8", "fp8"] = "auto"  # elements of the pool; "auto": the model's dtype
    prefix_caching: bool = True
    policy: Literal["lru", "cost"] = "lru"  # which cached block is forgotten first
    sub_blocks: bool = False  # also reuse the part of a cached block that fits, by copying it
    tenant_share: Annotated[float, Meta(gt=0.0, le=1.0)] | None = None  # of the pool, for one namespace; None: no limit


class SchedulerConfig(Section, frozen=True, kw_only=True):
    """How steps are filled."""

    max_num_seqs: Positive = 64  # sequences that run at once
    token_budget: Positive = 256  # tokens a step: bounds the time between two tokens of a stream (GPU: 2048)
    prefill_budget: Positive | None = (
        None  # tokens of a step in which no stream waits for a token; None: 1024, on a GPU 2048, at least `token_budget`
    )
    saturating_tokens: Positive | None = (
        None  # of prompts: a step with so many takes no further one; None: 64 on a CPU, with matrix tiles 256, on a GPU as many as fit
    )
    max_waiting: Positive = 1024  # requests in the queue before new ones get 429
    long_prefill_share: Annotated[float, Meta(gt=0.0, le=1.0)] = 0.5  # of the budget, for one prompt, while others wait
    # Guess tokens from a sequence's own past; verify them together. "auto": on a CPU in bfloat16, where a row's bits depend on no other.
    speculation: Literal["auto", "off", "ngram"] = "auto"
    max_draft_tokens: Annotated[int, Meta(ge=1, le=64)] = 8  # guesses a sequence and step
    min_ngram: Annotated[int, Meta(ge=1, le=16)] = 1  # tokens that must have stood together before
    max_ngram: Annotated[int, Meta(ge=1, le=16)] = 3  # the longest match counts
    overlap: bool | None = (
        None  # plan the next step while one is computed; None: where the model leaves the loop a core
    )


class BackendConfig(Section, frozen=True, kw_only=True):
    """Where attention is computed."""

    name: str = "auto"  # reference, numba-cpu, cupy, numba-cuda
    device: Literal["auto", "cpu", "cuda"] = "auto"
    threads: Positive | None = None  # compute threads; None: the physical cores this process may use
    pin: bool = False  # bind each compute thread to a core, on Linux: for a machine that serves nothing else


class ServerConfig(Section, frozen=True, kw_only=True):
    """The listening sockets and their limits."""

    host: str = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65535)] = 8000
    rpc: str | None = None  # "unix:/run/looseleaf.sock" or "tcp:127.0.0.1:9000"; None: no RPC
    max_body_bytes: Positive = 4 * 2**20
    max_message_bytes: Positive = 4 * 2**20  # WebSocket message and RPC frame
    heartbeat_s: Seconds = 20.0  # WebSocket ping; a peer silent for two of them is dead
    slow_consumer_s: Seconds = 30.0  # a stream not read for so long is ended
    drain_s: Seconds = 30.0  # running requests may finish for so long after SIGTERM
    allowed_origins: tuple[str, ...] = ()  # further browser origins for WebSocket; the page's own is always allowed
    api_key: str | None = None  # when set, every /v1, /ws and RPC call must carry it


class LogConfig(Section, frozen=True, kw_only=True):
    """Structured logs on stderr."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    format: Literal["auto", "console", "json"] = "auto"  # auto: console on a terminal


class Config(Section, frozen=True, kw_only=True):
    """The whole tree."""

    model: ModelConfig = ModelConfig()
    cache: CacheConfig = CacheConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    backend: BackendConfig = BackendConfig()
    server: ServerConfig = ServerConfig()
    log: LogConfig = LogConfig()


FLAG_ALIASES = {
    "--model": "model.path",
    "--dtype": "model.dtype",
    "--quantize": "model.quantize",
    "--max-model-len": "model.max_model_len",
    "--served-name": "model.served_name",
    "--chat-template": "model.chat_template",
    "--block-size": "cache.block_size",
    "--num-blocks": "cache.num_blocks",
    "--cache-size": "cache.size",
    "--gpu-memory-utilization": "cache.gpu_memory_utilization",
    "--kv-dtype": "cache.kv_dtype",
    "--max-num-seqs": "scheduler.max_num_seqs",
    "--token-budget": "scheduler.token_budget",
    "--prefill-budget": "scheduler.prefill_budget",
    "--speculation": "scheduler.speculation",
    "--backend": "backend.name",
    "--device": "backend.device",
    "--threads": "backend.threads",
    "--host": "server.host",
    "--port": "server.port",
    "--rpc": "server.rpc",
    "--api-key": "server.api_key",
    "--log-level": "log.level",
    "--log-format": "log.format",
}


class LoadedConfig(Struct, frozen=True, kw_only=True):
    """A configuration and where each value came from: "default", "file", "environment" or "flag", by dotted path."""

    config: Config
    sources: dict[str, str]


def option_paths(section: type[Section] = Config, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every option as (dotted path, type)."""
    for name, kind in get_type_hints(section, include_extras=True).items():
        if isinstance(kind, type) and issubclass(kind, Section):
            yield from option_paths(kind, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", kind


def load_config(
    *,
    file: Path | None = None,
    environment: Mapping[str, str] | None = None,
    flags: Mapping[str, str] | None = None,
) -> LoadedConfig:
    """Merge the layers. `flags` maps dotted paths to strings. Raises `ConfigError` naming the path, the source and the bound."""
    options = dict(option_paths())
    merged: dict[str, Any] = {}
    sources = dict.fromkeys(options, "default")
    if file is not None:
        for path, value in _flatten(_read_toml(file)):
            _put(merged, path, value)
            sources[path] = "file"
    for name, text in (environment or {}).items():
        if not name.startswith(ENVIRONMENT_PREFIX) or "__" not in name:
            continue
        path = name.removeprefix(ENVIRONMENT_PREFIX).lower().replace("__", ".")
        if path not in options:
            raise ConfigError(f"{name}: there is no option {path!r}", param=path)
        _put(merged, path, _parse_text(path, text, options[path]))
        sources[path] = "environment"
    for path, text in (flags or {}).items():
        if path not in options:
            raise ConfigError(f"there is no option {path!r}", param=path)
        _put(merged, path, _parse_text(path, text, options[path]))
        sources[path] = "flag"
    try:
        config = msgspec.convert(merged, Config)
    except msgspec.ValidationError as error:
        raise ConfigError(f"bad configuration: {error}") from error
    if config.cache.size != "auto":
        parse_bytes(config.cache.size)
    check_scheduler(config.scheduler)
    return LoadedConfig(config=config, sources=sources)


def check_scheduler(scheduler: SchedulerConfig) -> None:
    """Raise `ConfigError` for options that are good each and contradict one another."""
    if scheduler.min_ngram > scheduler.max_ngram:
        raise ConfigError(
            f"min_ngram is {scheduler.min_ngram} and must be at most max_ngram, {scheduler.max_ngram} "
            "(at $.scheduler.min_ngram)",
            param="scheduler.min_ngram",
        )
    if scheduler.prefill_budget is not None and scheduler.prefill_budget < scheduler.token_budget:
        raise ConfigError(
            f"prefill_budget is {scheduler.prefill_budget} and must be at least token_budget, {scheduler.token_budget}: a step that nobody "
            "waits for may not be smaller than one that streams wait for (at $.scheduler.prefill_budget)",
            param="scheduler.prefill_budget",
        )


def parse_bytes(text: str) -> int:
    """Turn "512MiB", "2GB" or "1048576" into bytes; raises `ConfigError`."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(?:([KMGT])(i?)B?|B)?\s*", text, re.IGNORECASE)
    if match is None:
        raise ConfigError(f"{text!r} is not a size; write bytes or a number with KiB, MiB, GiB (at $.cache.size)")
    number, unit, binary = match.groups()
    power = " KMGT".index(unit.upper()) if unit else 0
    return int(float(number) * (1024 if binary else 1000) ** power)


def _read_toml(file: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {file}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} is not valid TOML: {error}") from error


def _flatten(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from _flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _put(tree: dict[str, Any], path: str, value: Any) -> None:
    *sections, name = path.split(".")
    for section in sections:
        tree = tree.setdefault(section, {})
    tree[name] = value


def _parse_text(path: str, text: str, kind: Any) -> Any:
    """Read a flag's or variable's text as the option's type: JSON first where the type is not text."""
    if get_origin(kind) is tuple:
        return [part for part in text.split(",") if part]
    accepts_text = kind is str or str in get_args(kind)
    if accepts_text or (get_origin(kind) is Literal and isinstance(get_args(kind)[0], str)):
        return text
    try:
        return msgspec.convert(text, kind, strict=False)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{text!r}: {error} (at $.{path})", param=path) from error
