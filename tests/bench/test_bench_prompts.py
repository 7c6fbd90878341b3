"""The prompts of a benchmark: exact lengths, nothing shared by accident, the same for every peer."""

import dataclasses
from pathlib import Path

import pytest
from prompts import WORKLOADS, PromptBook, PromptError, Tokenizer, Workload, cut_to_tokens
from tokenizers import Tokenizer as JsonTokenizer
from tokenizers import models, pre_tokenizers, processors

DATA = Path(__file__).resolve().parents[1] / "data"
ALICE = (DATA / "text/alice.txt").read_text()


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return JsonTokenizer.from_file(str(DATA / "golden/smollm2-135m/tokenizer.json"))


@pytest.mark.parametrize("name", sorted(WORKLOADS))
def test_prompts_have_exactly_the_tokens_that_the_workload_names(name: str, tokenizer: Tokenizer) -> None:
    workload = WORKLOADS[name]
    prompts = PromptBook(ALICE, seed=7, tokenizer=tokenizer).take(workload, 12)
    assert [len(tokenizer.encode(prompt.text).ids) for prompt in prompts] == [workload.prompt_tokens] * 12
    assert {prompt.num_tokens for prompt in prompts} == {workload.prompt_tokens}
    assert {prompt.max_tokens for prompt in prompts} == {workload.max_tokens}


def test_no_two_prompts_of_a_book_share_a_block_of_tokens_at_their_start(tokenizer: Tokenizer) -> None:
    book = PromptBook(ALICE, seed=3, tokenizer=tokenizer)
    short = dataclasses.replace(WORKLOADS["w1"], prompt_tokens=24)
    prompts = [*book.take(short, 150), *book.take(short, 150)]
    first_words = {prompt.text.split()[0].lower().strip("'\"`(),.;:!?-_*") for prompt in prompts}
    assert len(first_words) == 300
    starts = {tuple(tokenizer.encode(prompt.text).ids[:8]) for prompt in prompts}
    assert len(starts) == 300


def test_the_shared_prefix_is_shared_to_its_last_token_and_no_further(tokenizer: Tokenizer) -> None:
    prompts = PromptBook(ALICE, seed=5, tokenizer=tokenizer).take(WORKLOADS["w2"], 8)
    ids = [tokenizer.encode(prompt.text).ids for prompt in prompts]
    num_common = next(place for place, column in enumerate(zip(*ids, strict=True)) if len(set(column)) > 1)
    assert 512 <= num_common < 516  # two words may begin with the same piece
    assert len({tuple(row[512:528]) for row in ids}) == 8


def test_each_call_draws_another_shared_prefix_so_that_warming_up_caches_nothing(tokenizer: Tokenizer) -> None:
    book = PromptBook(ALICE, seed=5, tokenizer=tokenizer)
    (warm,), (measured,) = book.take(WORKLOADS["w2"], 1), book.take(WORKLOADS["w2"], 1)
    assert warm.text.split()[0] != measured.text.split()[0]


def test_a_seed_decides_the_prompts_and_their_order(tokenizer: Tokenizer) -> None:
    def texts(seed: str) -> list[str]:
        return [p.text for p in PromptBook(ALICE, seed=seed, tokenizer=tokenizer).take(WORKLOADS["w1"], 5)]

    assert texts("1/0") == texts("1/0")
    assert set(texts("1/0")).isdisjoint(texts("1/1"))


def test_without_a_tokenizer_the_length_is_about_right_and_said_to_be_unknown(tokenizer: Tokenizer) -> None:
    prompts = PromptBook(ALICE, seed=1).take(WORKLOADS["w1"], 30)
    assert {prompt.num_tokens for prompt in prompts} == {None}
    counted = [len(tokenizer.encode(prompt.text).ids) for prompt in prompts]
    assert sum(counted) / len(counted) == pytest.approx(200, rel=0.1)  # single ones vary: verse has more tokens a word


def test_special_tokens_that_the_tokenizer_adds_count_as_the_server_counts_them() -> None:
    with_start = JsonTokenizer(models.WordLevel({"[S]": 0, "[?]": 1, "the": 2, "cat": 3}, unk_token="[?]"))
    with_start.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    with_start.post_processor = processors.TemplateProcessing(single="[S] $A", special_tokens=[("[S]", 0)])
    text = cut_to_tokens(with_start, "cat " * 20 + "cat", 10)
    assert len(text.split()) == 9
    assert len(with_start.encode(text).ids) == 10


def test_a_book_without_enough_first_words_says_so_instead_of_repeating_one() -> None:
    book = PromptBook("The cat, the dog and THE -- bird.", seed=1)
    tiny = Workload("tiny", prompt_tokens=3, max_tokens=1)
    book.take(tiny, 5)  # the, cat, dog, and, bird
    with pytest.raises(PromptError, match="no word is left"):
        book.take(tiny, 1)


def test_a_tokenizer_that_cannot_cut_exactly_is_refused() -> None:
    one_token = JsonTokenizer(models.WordLevel({"[?]": 0}, unk_token="[?]"))  # no splitting: any text is one token
    with pytest.raises(PromptError, match="exactly 4 tokens"):
        cut_to_tokens(one_token, "some words here", 4)
