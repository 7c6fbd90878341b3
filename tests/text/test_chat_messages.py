"""Messages of every shape become text contents or an error with the path."""

from __future__ import annotations

import pytest

from service.errors import InvalidRequest
from service.text.chat_messages import normalise_messages

ROLES = ["system", "user", "assistant", "tool"]
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"city": "Bern", "n": 2}'}}


def content_of(role: str, content: object) -> object:
    return normalise_messages([{"role": role, "content": content}])[0]["content"]


@pytest.mark.parametrize("role", ROLES)
def test_text_parts_are_joined_alike_for_every_role(role: str) -> None:
    """TOK-07"""
    parts = [{"type": "text", "text": text} for text in ("one", "", "three")]
    assert content_of(role, parts) == "one\n\nthree"
    assert content_of(role, parts[:1]) == "one"
    assert content_of(role, "plain") == "plain"
    assert content_of(role, "") == ""


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize(
    ("content", "path"),
    [
        ([], "messages[0].content"),
        (5, "messages[0].content"),
        (True, "messages[0].content"),
        ({"type": "text", "text": "x"}, "messages[0].content"),
        (None, "messages[0].content"),
        ([{"type": "image_url", "image_url": {}}], "messages[0].content[0].type"),
        ([{"type": "text", "text": "a"}, {"type": "text", "text": None}], "messages[0].content[1].text"),
        ([{"type": "text"}], "messages[0].content[0].text"),
        (["bare"], "messages[0].content[0]"),
        ([{"text": "no type"}], "messages[0].content[0].type"),
    ],
)
def test_what_is_not_text_is_refused_with_its_path(role: str, content: object, path: str) -> None:
    """TOK-07"""
    with pytest.raises(InvalidRequest) as refused:
        content_of(role, content)
    assert refused.value.param == path
    assert path in refused.value.message


def test_null_content_is_allowed_where_an_assistant_calls_tools() -> None:
    """TOK-07"""
    for message in (
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "assistant", "tool_calls": [CALL]},
    ):
        normalised = normalise_messages([message])[0]
        assert normalised["content"] == ""
        assert normalised["tool_calls"] == [CALL | {"function": {"name": "f", "arguments": {"city": "Bern", "n": 2}}}]
    for message in ({"role": "assistant", "content": None, "tool_calls": []}, {"role": "user", "tool_calls": [CALL]}):
        with pytest.raises(InvalidRequest, match=r"messages\[0\]\.content is null"):
            normalise_messages([message])


@pytest.mark.parametrize(
    ("calls", "path"),
    [
        ("x", "messages[0].tool_calls"),
        ([1], "messages[0].tool_calls[0]"),
        ([{"function": {}}], "messages[0].tool_calls[0].function"),
        ([{"function": {"name": "f", "arguments": "{"}}], "messages[0].tool_calls[0].function.arguments"),
        ([{"function": {"name": "f", "arguments": "[1]"}}], "messages[0].tool_calls[0].function.arguments"),
        (
            [{"function": {"name": "f", "arguments": '{"a": [' + "[]," * 100_000 + "[]]}"}}],
            "messages[0].tool_calls[0].function.arguments",
        ),
    ],
)
def test_malformed_tool_calls_are_refused_with_their_path(calls: object, path: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        normalise_messages([{"role": "assistant", "content": "", "tool_calls": calls}])
    assert refused.value.param == path


@pytest.mark.parametrize("role", [None, 3, "", "user|>\n", "<|system|>", "a b", "x" * 65])
def test_a_role_is_a_plain_name(role: object) -> None:
    """TOK-04: templates build control texts from roles."""
    with pytest.raises(InvalidRequest) as refused:
        normalise_messages([{"role": role, "content": "x"}])
    assert refused.value.param == "messages[0].role"


def test_no_messages_are_refused() -> None:
    """SMP-12"""
    with pytest.raises(InvalidRequest) as refused:
        normalise_messages([])
    assert refused.value.param == "messages"


def test_the_second_message_is_named_by_its_index() -> None:
    with pytest.raises(InvalidRequest) as refused:
        normalise_messages([{"role": "user", "content": "x"}, "y"])  # type: ignore[list-item]
    assert refused.value.param == "messages[1]"


def test_other_fields_pass_through_and_the_input_stays_as_it_was() -> None:
    message = {"role": "tool", "content": "x", "name": "f", "tool_call_id": "1"}
    before = dict(message)
    assert normalise_messages([message]) == [message]
    assert message == before


def test_bottomless_nesting_is_refused() -> None:
    """TOK-07"""
    value: object = "x"
    for _ in range(5000):
        value = {"deeper": value}
    with pytest.raises(InvalidRequest, match="levels deep"):
        normalise_messages([{"role": "user", "content": "x", "extra": value}])
