"""How text is split before merging, by the name that a GGUF file gives in `tokenizer.ggml.pre`.

The expressions are facts about published models (each stands in the `tokenizer.json` of the models that use it). A wrong split
gives valid ids and quietly worse answers, so an unknown name has no fallback here.
"""

from __future__ import annotations

from dataclasses import dataclass

from tokenizers import Regex, normalizers, pre_tokenizers

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_CL100K_TAIL = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_O200K_TAIL = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_LEAD = r"[^\r\n\p{L}\p{N}]?"

_LLAMA3 = rf"{_CONTRACTIONS}|{_LEAD}\p{{L}}+|\p{{N}}{{1,3}}|{_CL100K_TAIL}"
_QWEN2 = rf"{_CONTRACTIONS}|{_LEAD}\p{{L}}+|\p{{N}}|{_CL100K_TAIL}"
_TEKKEN = rf"{_LEAD}{_UPPER}*{_LOWER}+|{_LEAD}{_UPPER}+{_LOWER}*|\p{{N}}|{_O200K_TAIL}"
_O200K = (
    rf"{_LEAD}{_UPPER}*{_LOWER}+{_CONTRACTIONS}?|{_LEAD}{_UPPER}+{_LOWER}*{_CONTRACTIONS}?|\p{{N}}{{1,3}}|{_O200K_TAIL}"
)


@dataclass(frozen=True, slots=True)
class Split:
    """One way to split. `pattern` None means GPT-2's own; `digits_alone` splits every numeric character off first.

    `prefers_whole_words`: a piece that is itself a token is not merged from its parts (`ignore_merges`).
    `adds_bos`: what holds when the file does not say.
    """

    pattern: str | None = None
    digits_alone: bool = False
    composes_nfc: bool = False
    prefers_whole_words: bool = False
    adds_bos: bool = False

    def pre_tokenizer(self) -> pre_tokenizers.PreTokenizer:
        """Build the byte-level pre-tokenizer."""
        steps: list[pre_tokenizers.PreTokenizer] = []
        if self.digits_alone:
            steps.append(pre_tokenizers.Digits(individual_digits=True))
        if self.pattern is not None:
            steps.append(pre_tokenizers.Split(Regex(self.pattern), behavior="isolated"))
        steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=self.pattern is None))
        return pre_tokenizers.Sequence(steps)

    def normalizer(self) -> normalizers.Normalizer | None:
        """Build the normaliser, if the family has one."""
        return normalizers.NFC() if self.composes_nfc else None


_GPT2 = Split()
_DIGITS = Split(digits_alone=True)
_LLAMA3_SPLIT = Split(_LLAMA3, prefers_whole_words=True, adds_bos=True)
_QWEN2_SPLIT = Split(_QWEN2, composes_nfc=True)

SPLITS: dict[str, Split] = {
    "gpt-2": _GPT2,
    "phi-2": _GPT2,
    "smollm": _DIGITS,
    "starcoder": _DIGITS,
    "refact": _DIGITS,
    "codeshell": _DIGITS,
    "command-r": Split(digits_alone=True, composes_nfc=True, adds_bos=True),
    "llama-bpe": _LLAMA3_SPLIT,
    "llama3": _LLAMA3_SPLIT,
    "llama-v3": _LLAMA3_SPLIT,
    "smaug-bpe": _LLAMA3_SPLIT,
    "dbrx": Split(_LLAMA3),
    "qwen2": _QWEN2_SPLIT,
    "deepseek-r1-qwen": _QWEN2_SPLIT,
    "tekken": Split(_TEKKEN, prefers_whole_words=True, adds_bos=True),
    "gpt-4o": Split(_O200K),
}
