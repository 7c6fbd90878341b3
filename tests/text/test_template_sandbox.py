"""A template can neither reach Python nor hold a thread."""

from __future__ import annotations

import pytest

from service.errors import InvalidRequest
from service.text import ChatTemplate, Tokenizer

HI = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize(
    "source",
    [
        "{% for a in range(3000) %}{% for b in range(3000) %}{% endfor %}{% endfor %}",
        "{% for a in range(3000) %}{% for b in range(3000) if false %}{% endfor %}{% endfor %}",
        "{% set r = range(3000) | list %}{% for a in r %}{% for b in r %}{% endfor %}{% endfor %}",
        "{% set big = range(3000) | list %}{% for a in range(3000) if (big | sort | length) < 0 %}{% endfor %}",
        "{% for a in range(3000) %}{% for b in range(3000) %}{% if a < 0 %}x{% endif %}{% endfor %}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(18) }}",
        "{% for a in range(3000) %}{% set x = range(3000) | map('abs') | list %}{% endfor %}",
    ],
)
def test_a_template_that_burns_time_is_ended(tiny: Tokenizer, source: str) -> None:
    """TOK-09"""
    template = ChatTemplate(source, tiny, max_render_s=0.05)
    with pytest.raises(InvalidRequest, match=r"rendering took more than 0\.05 s") as refused:
        template.render(HI)
    assert refused.value.http_status == 400


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("{% for a in range(99999) %}{{ 'x' * 1000 }}{% endfor %}", "more than 100000 characters"),
        ("{{ 'x' * 10 ** 9 }}", "repeated"),
        ("{{ 10 ** 9 * [1] }}", "repeated"),
        ("{{ 10 ** 100 ** 1000 }}", "power"),
        ("{{ 2 ** 1000000000 }}", "power"),
        ("{{ range(10 ** 9) | length }}", "Range too big"),
        ("{{ lipsum(n=100000) }}", "undefined"),
    ],
)
def test_a_template_that_produces_too_much_is_ended(tiny: Tokenizer, source: str, reason: str) -> None:
    """TOK-09"""
    with pytest.raises(InvalidRequest, match=reason):
        ChatTemplate(source, tiny, max_render_chars=100_000, max_render_s=20).render(HI)


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ raise_exception.__globals__.keys() }}",
        "{{ (''|attr('__class__')|attr('__mro__')).x }}",
        "{{ '{0.__class__.__mro__}'.format('') }}",
        "{% set x = messages.append(1) %}",
        "{% set x = messages[0].update({'a': 1}) %}",
        "{{ self.__init__.__globals__ }}",
    ],
)
def test_python_s_internals_and_the_arguments_are_out_of_reach(tiny: Tokenizer, source: str) -> None:
    """TOK-09"""
    messages = [dict(HI[0])]
    with pytest.raises(InvalidRequest, match=r"SecurityError|undefined|no attribute"):
        ChatTemplate(source, tiny).render(messages)
    assert messages == HI


def test_a_spent_budget_does_not_follow_into_the_next_rendering(tiny: Tokenizer) -> None:
    """TOK-09"""
    source = "{% if messages[0].content == 'burn' %}{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}{% endif %}ok"
    template = ChatTemplate(source, tiny, max_render_s=0.05)
    with pytest.raises(InvalidRequest):
        template.render([{"role": "user", "content": "burn"}])
    assert template.render(HI) == "ok"
