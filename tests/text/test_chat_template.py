"""Chat prompts equal the golden ones; what a template refuses comes back as its own words."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from service.errors import InvalidRequest, ModelLoadError
from service.text import ChatTemplate, Tokenizer
from tests.text.builders import CHATML

HI = [{"role": "user", "content": "hi"}]
ALTERNATING = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate user/assistant') }}{% endif %}{{ m.content }}{% endfor %}"
)


@pytest.fixture
def smollm_chat(smollm: Tokenizer) -> ChatTemplate:
    return ChatTemplate.load(smollm)


def test_every_golden_chat_renders_and_encodes_to_the_golden_prompt(
    smollm_chat: ChatTemplate, golden: dict[str, Any]
) -> None:
    chats = [prompt for prompt in golden["prompts"] if prompt["kind"] == "chat"]
    assert len(chats) >= 9
    for prompt in chats:
        assert smollm_chat.render(prompt["messages"]) == prompt["rendered"], prompt["name"]
        assert smollm_chat.encode(prompt["messages"]) == prompt["ids"], prompt["name"]


def test_the_generation_prompt_can_be_left_out(smollm_chat: ChatTemplate) -> None:
    assert smollm_chat.render(HI, add_generation_prompt=False).endswith("hi<|im_end|>\n")
    assert smollm_chat.render(HI).endswith("<|im_start|>assistant\n")


@pytest.mark.parametrize(("source", "expected"), [("{{ bos_token }}{{ messages[0].content }}", 1), (CHATML, 0)])
def test_a_chat_has_exactly_the_bos_of_its_template(llama2: Tokenizer, source: str, expected: int) -> None:
    """TOK-03: although this tokenizer adds bos to plain prompts."""
    assert llama2.adds_bos
    ids = ChatTemplate(source, llama2).encode(HI)
    assert ids.count(1) == expected
    assert (ids[0] == 1) == bool(expected)


@pytest.mark.parametrize(
    "messages",
    [
        [*HI, *HI],
        [{"role": "assistant", "content": "I start"}],
        [{"role": "system", "content": "only"}],
        [{"role": "narrator", "content": "unknown"}],
    ],
)
def test_a_refusing_template_gives_a_request_error_with_its_words(
    tiny: Tokenizer, messages: list[dict[str, object]]
) -> None:
    """TOK-05"""
    template = ChatTemplate(ALTERNATING, tiny)
    with pytest.raises(InvalidRequest, match="roles must alternate user/assistant") as refused:
        template.encode(messages)
    assert (refused.value.http_status, refused.value.param) == (400, "messages")
    assert template.encode(HI)


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("{{ nobody.name }}", "'nobody' is undefined"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{{ 'a' + 1 }}", "TypeError"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
    ],
)
def test_a_failing_template_gives_a_request_error_with_the_reason(tiny: Tokenizer, source: str, reason: str) -> None:
    """TOK-05"""
    with pytest.raises(InvalidRequest, match=reason):
        ChatTemplate(source, tiny).render(HI)


@pytest.mark.parametrize("source", ["{% for %}", "{{ x | no_such_filter }}", "{% endif %}", "{% include 'x' "])
def test_a_broken_template_is_reported_at_start(tiny: Tokenizer, source: str) -> None:
    """TOK-05"""
    with pytest.raises(ModelLoadError, match="line 1"):
        ChatTemplate(source, tiny)


def test_templates_by_name_need_a_default(tiny: Tokenizer) -> None:
    with pytest.raises(ModelLoadError, match="default"):
        ChatTemplate({"tool_use": "x"}, tiny)


def test_messages_that_render_to_nothing_are_refused(tiny: Tokenizer) -> None:
    """SMP-12"""
    with pytest.raises(InvalidRequest, match="empty prompt"):
        ChatTemplate("{{ messages[0].content }}", tiny).encode([{"role": "user", "content": ""}])


def test_an_empty_content_is_a_turn_of_its_own(smollm_chat: ChatTemplate) -> None:
    """SMP-12, TOK-07"""
    assert smollm_chat.render([{"role": "user", "content": ""}]).count("<|im_end|>") == 2


def test_the_names_that_published_templates_use_are_there(tiny: Tokenizer) -> None:
    source = (
        "{{ strftime_now('%d %b %Y') }} {{ {'b': 'é<', 'a': 1} | tojson }} {{ eos_token }} {{ tools | length }}"
        "{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}"
        "{% generation %} said{% endgeneration %}{{ documents is none }} {{ thinking }}"
    )
    template = ChatTemplate(source, tiny, now=lambda: datetime(2024, 7, 26, tzinfo=UTC))
    rendered = template.render(HI, tools=[{"type": "function"}], variables={"thinking": "on"})
    assert rendered == '26 Jul 2024 {"b": "é<", "a": 1} <|eos|> 101 saidTrue on'


def test_blocks_leave_no_white_space_behind(tiny: Tokenizer) -> None:
    assert ChatTemplate("  {% if true %}\nx\n  {% endif %}\ny", tiny).render(HI) == "x\ny"
