"""Small tokenizers of each kind, as a model directory holds them and as GGUF metadata says them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, processors, trainers

CORPUS = [
    "Alice was beginning to get very tired of sitting by her sister on the bank, and of having nothing to do.",
    "once or twice she had peeped into the book her sister was reading, but it had no pictures or conversations in it",
    "def f(x):\n    return x + 1\n",
    "'and what is the use of a book,' thought Alice 'without pictures or conversation?'",
] * 4
BYTE_TOKENS = [f"<0x{byte:02X}>" for byte in range(256)]
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def sentencepiece_encoder() -> tokenizers.Tokenizer:
    """Build a Llama-2-style tokenizer: `▁` for spaces, one prepended, byte fallback, `<s>` in front."""
    normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    trained = tokenizers.Tokenizer(models.BPE(unk_token="<unk>"))
    trained.normalizer = normalizer
    trained.pre_tokenizer = tokenizers.pre_tokenizers.Split("▁", behavior="merged_with_next")
    specials = ["<unk>", "<s>", "</s>"]
    trained.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=600, special_tokens=[*specials, *BYTE_TOKENS], show_progress=False)
    )
    learned = json.loads(trained.to_str())["model"]
    encoder = tokenizers.Tokenizer(
        models.BPE(
            vocab=learned["vocab"],
            merges=[tuple(merge) for merge in learned["merges"]],
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    encoder.normalizer = normalizer
    encoder.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    encoder.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in specials])
    encoder.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return encoder


def write_directory(path: Path, encoder: tokenizers.Tokenizer, **files: object) -> Path:
    """Write a model directory; `files` are JSON contents by name without suffix (`config`, `generation_config`, …)."""
    path.mkdir(parents=True, exist_ok=True)
    encoder.save(str(path / "tokenizer.json"))
    for name, content in files.items():
        (path / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")
    return path


def sentencepiece_directory(path: Path) -> Path:
    """Write a Llama-2-style model directory."""
    return write_directory(
        path,
        sentencepiece_encoder(),
        tokenizer_config={"bos_token": "<s>", "eos_token": {"content": "</s>"}, "add_bos_token": True},
    )


def gguf_of_sentencepiece(encoder: tokenizers.Tokenizer, **changes: object) -> dict[str, object]:
    """Say a Llama-2-style tokenizer in GGUF's words: a score per token instead of merges."""
    described = json.loads(encoder.to_str())["model"]
    tokens = sorted(described["vocab"], key=described["vocab"].get)
    rank = {"".join(merge): -float(order) for order, merge in reversed(list(enumerate(described["merges"], start=1)))}
    kinds = {"<unk>": 2, "<s>": 3, "</s>": 3} | dict.fromkeys(BYTE_TOKENS, 6)
    metadata: dict[str, object] = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [rank.get(token, -1e6) for token in tokens],
        "tokenizer.ggml.token_type": [kinds.get(token, 1) for token in tokens],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }
    return _changed(metadata, changes)


def gguf_of_byte_level(tokenizer_json: Path, pre: str | None, **changes: object) -> dict[str, object]:
    """Say a byte-level tokenizer.json in GGUF's words; `changes` replace keys under `tokenizer.ggml.` (None removes)."""
    described = json.loads(tokenizer_json.read_text(encoding="utf-8"))
    vocabulary = described["model"]["vocab"] | {token["content"]: token["id"] for token in described["added_tokens"]}
    control = {token["content"] for token in described["added_tokens"] if token["special"]}
    tokens = sorted(vocabulary, key=vocabulary.get)
    metadata: dict[str, object] = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3 if token in control else 1 for token in tokens],
        "tokenizer.ggml.merges": [
            merge if isinstance(merge, str) else " ".join(merge) for merge in described["model"]["merges"]
        ],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.add_bos_token": False,
    }
    return _changed(metadata, changes if pre is not None else {**changes, "pre": None})


def odd_lines(count: int, pick: Callable[[int], int]) -> list[str]:
    """Make lines of mixed scripts, code, digits, white space and control texts; `pick(n)` draws from 0 to n - 1."""
    pieces = [
        *"abcXYZ019 \t",
        "  ",
        "   ",
        "\n",
        "\r\n",
        " the",
        " Alice",
        "'s",
        "'LL",
        "x=10000007;",
        "->>=",
        "½",
        "٣",
        "é",
        "e\u0301",
        "ﬁ",
        "你好",
        "안녕",
        "नमस्ते",
        "ไทย",
        "👩‍👧",
        "🙂",
        "\u00a0",
        "\u200b",
        "<|im_end|>",
        "<|im_",
        "<s>",
        "\x00",
        "_",
        "$",
        "//",
        "▁",
    ]
    return ["".join(pieces[pick(len(pieces))] for _ in range(1 + pick(24))) for _ in range(count)]


def _changed(metadata: dict[str, object], changes: dict[str, object]) -> dict[str, object]:
    for name, value in changes.items():
        if value is None:
            metadata.pop(f"tokenizer.ggml.{name}", None)
        else:
            metadata[f"tokenizer.ggml.{name}"] = value
    return metadata
