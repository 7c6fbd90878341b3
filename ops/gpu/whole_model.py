"""A model of 8B shape through the whole engine: steps launched and replayed, against its roofline and against transformers on the same card."""

from __future__ import annotations

import gc
import statistics
from collections.abc import Sequence
from typing import Any

import torch
from bench import BF16, Bench, Skipped, copy_bandwidth

# layers, hidden, width, heads, kv heads, vocabulary, longest context
LLAMA_8B = (32, 4096, 14336, 32, 8, 128256, 2048)
TINY = (2, 256, 320, 4, 2, 500, 512)
PROMPT, NEW = 512, 24
BATCHES = (1, 32, 256)


def end_to_end(bench: Bench) -> None:
    """Tokens a second through the engine, replayed and launched, against the roofline: weights and keys read once a step."""
    try:
        from random_model import random_llama

        from service.messages import SamplingParams
        from tests.golden.engine import GoldenEngine
    except ImportError as error:
        raise Skipped(f"{error}; give the folder of wheels") from error
    sizes = LLAMA_8B if not bench.is_dry else TINY
    prompt_len, new_tokens = (PROMPT, NEW) if not bench.is_dry else (40, 4)
    model = random_llama(*sizes, bench.torch_device)
    copied = copy_bandwidth(bench)
    spec = model.decoder.kv_cache_spec(16)
    vocab = sizes[5]
    for name in bench.backends:
        if bench.open(name, spec) is None:
            continue
        runs = [(batch, True) for batch in BATCHES] + [(batch, False) for batch in BATCHES]
        if name == "numba-cuda":
            runs = [(32, False)]
        if bench.is_dry:
            runs = [(1, True), (2, False)]
        for batch, is_captured in runs:
            engine = GoldenEngine(
                model,
                name,
                num_blocks=1 + batch * -(-(prompt_len + new_tokens) // 16),
                token_budget=4096,
                has_prefix_cache=False,
                max_num_seqs=batch,
                device=bench.device,
                max_captured_tokens=2048 if is_captured else 0,
                checks_slots=False,
            )
            prompts = torch.randint(vocab, (batch, prompt_len)).tolist()
            engine.run(prompts, SamplingParams(temperature=0.0, max_tokens=new_tokens, ignore_eos=True))
            decodes = [
                seconds
                for taken, seconds in zip(engine.batches, engine.seconds, strict=True)
                if taken.num_tokens == len(taken.entries) == batch
            ]
            step_s = statistics.median(decodes)
            moved = _matrix_bytes(sizes) + batch * (prompt_len + new_tokens / 2) * spec.bytes_per_token
            how = "replayed" if is_captured else "launched"
            bench.say(
                f"{name} batch {batch:>3} {how}: {batch / step_s:8.0f} tokens/s, {step_s * 1e3:.2f} ms a step, "
                f"{moved / step_s / copied:.1%} of the roofline",
                **{f"tokens/s at {batch}, {name} {how}": batch / step_s},
            )
            del engine
            gc.collect()


def graphs(bench: Bench) -> None:
    """Capture and replay through the runner's own graphs: the hidden states of launches, the time of a replay, and how much of it is gaps."""
    from random_model import random_llama

    from backends.kv_cache import KVCache
    from service.model.graphs import StepGraphs
    from service.model.packing import pack
    from tests.model.steps import make_entry

    sizes = LLAMA_8B if not bench.is_dry else TINY
    model = random_llama(*sizes, bench.torch_device)
    spec = model.decoder.kv_cache_spec(16)
    backend = bench.open(bench.backends[0], spec)
    if backend is None:
        return
    contexts = [900, 40, 300, 1500, 17] if not bench.is_dry else [40, 3, 300]
    width = -(-sizes[6] // 16)
    pool = KVCache(spec, 1 + len(contexts) * width, bench.torch_device)
    for index in range(spec.num_layers):  # whatever earlier tokens left
        pool.layer(index).normal_()
    model.decoder.bind_cache(pool)
    options: dict[str, Any] = {"device": bench.torch_device, "table_width": width}
    launched = StepGraphs(model.decoder, backend, max_tokens=0, **options)
    replayed = StepGraphs(model.decoder, backend, max_tokens=64, **options)
    for chosen in ([0, 1, 2], [2], [0, 1, 2], [1, 2]):
        packed = pack([_decode(make_entry, contexts, width, s) for s in chosen], 16)
        with torch.inference_mode():
            wanted = launched.forward(packed).clone()
            found = replayed.forward(packed)
        error = float((found.float() - wanted.float()).norm() / wanted.float().norm())
        if not error < 0.02:  # matrix products of another number of rows round differently
            bench.fault(f"a replay of sequences {chosen} differs by {error:.2%}")
    if bench.is_dry:
        bench.say("the same hidden states; times and gaps need a GPU")
        return
    packed = pack([_decode(make_entry, contexts, width, s) for s in range(len(contexts))], 16)
    with torch.inference_mode():
        for label, way in (("launched", launched), ("replayed", replayed)):
            seconds = bench.seconds(lambda: way.forward(packed))  # noqa: B023  # called in this round only
            bench.say(
                f"a forward pass of {len(contexts)} decodes {label}: {seconds * 1e3:.2f} ms",
                **{f"forward {label}": seconds},
            )
        busy, span, count = _device_time(lambda: replayed.forward(packed))
    bench.say(
        f"replayed: {count} kernels, busy {busy * 1e3:.2f} of {span * 1e3:.2f} ms: {1 - busy / span:.1%} of the step between kernels (goal < 5 %)",
        gaps=1 - busy / span,
    )


def transformers_batching(bench: Bench) -> None:
    """transformers' continuous batching with a model of the same shape: two lengths of answer, so that what is not decoding cancels."""
    try:
        import transformers
    except ImportError as error:
        raise Skipped(str(error)) from error
    import time

    layers, hidden, width, heads, kv_heads, vocab, longest = LLAMA_8B if not bench.is_dry else TINY
    config = transformers.LlamaConfig(
        num_hidden_layers=layers,
        hidden_size=hidden,
        intermediate_size=width,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        vocab_size=vocab,
        max_position_embeddings=longest,
        rope_theta=500000.0,
        tie_word_embeddings=False,
        bos_token_id=0,
        eos_token_id=None,
        pad_token_id=0,
    )
    before = torch.get_default_dtype()
    torch.set_default_dtype(BF16)
    try:
        with torch.device(bench.torch_device):
            model = transformers.LlamaForCausalLM(config).eval()
    finally:
        torch.set_default_dtype(before)
    if not hasattr(model, "generate_batch"):
        raise Skipped(f"transformers {transformers.__version__} has no generate_batch")
    prompt_len, few, many = (PROMPT, 4, 4 + NEW) if not bench.is_dry else (40, 2, 5)
    options: dict[str, Any] = {}
    if bench.is_dry:  # on a CPU it would size its cache by the memory of the whole machine
        small = transformers.ContinuousBatchingConfig(num_blocks=16, page_size=32, max_batch_tokens=128)
        options = {"continuous_batching_config": small}
    bench.say(f"transformers {transformers.__version__}")
    for batch in (32, 1, 256) if not bench.is_dry else (2,):
        prompts = torch.randint(1, vocab, (batch, prompt_len)).tolist()
        times = []
        for new_tokens in (few, few, many):  # the first warms up
            greedy = transformers.GenerationConfig(
                max_new_tokens=new_tokens, do_sample=False, eos_token_id=-1, pad_token_id=0
            )
            begin = time.perf_counter()
            answers = model.generate_batch(inputs=prompts, generation_config=greedy, **options)
            times.append(time.perf_counter() - begin)
            lengths = {len(answer.generated_tokens) for answer in answers.values()}
            if len(answers) != batch or lengths != {new_tokens}:
                bench.fault(f"batch {batch}: {len(answers)} answers of {lengths} tokens, not {new_tokens}")
        step_s = (times[2] - times[1]) / (many - few)
        bench.say(
            f"transformers batch {batch:>3}: {batch / step_s:8.0f} tokens/s, {step_s * 1e3:.2f} ms a step",
            **{f"transformers tokens/s at {batch}": batch / step_s},
        )


def _decode(make_entry: Any, contexts: Sequence[int], width: int, sequence: int) -> Any:
    """Return the next token of a sequence whose blocks are its own."""
    blocks = range(1 + sequence * width, 1 + (sequence + 1) * width)
    return make_entry([7 + sequence], start=contexts[sequence] - 1, block_ids=blocks)


def _device_time(work: Any) -> tuple[float, float, int]:
    """Return the seconds that kernels ran, from the first's begin to the last's end, and how many there were, of one call."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        work()
        torch.cuda.synchronize()
    kernels = [event for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    spans = [(event.time_range.start, event.time_range.end) for event in kernels]
    if not spans:
        raise Skipped("the profiler saw no kernel")
    busy = sum(end - begin for begin, end in spans)
    return busy / 1e6, (max(end for _, end in spans) - min(begin for begin, _ in spans)) / 1e6, len(spans)


def _matrix_bytes(sizes: Sequence[int]) -> int:
    """Return the bytes of all matrices of a step, in bfloat16."""
    layers, hidden, width, heads, kv_heads, vocab, _ = sizes
    of_a_layer = hidden * (2 * hidden + 2 * kv_heads * (hidden // heads)) + 3 * hidden * width
    return 2 * (layers * of_a_layer + vocab * hidden)
