"""Run a model's Jinja template without trusting it.

Templates come with model files, so they are someone else's code: they run in Jinja's immutable sandbox (no Python internals, no
changes to arguments) and under a budget. A thread cannot be stopped from outside, therefore the template itself is compiled with a
check in every loop body, loop filter, macro and call; the check ends the rendering once its processor time is used up.
Invariant: rendering ends within its budget, or shortly after (a single filter is not interrupted).
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any, ClassVar

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, LoopControlExtension
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

_BUDGET = "render budget"  # a key with a space: no template can name it
_MAX_REPEATED = 1_000_000
_MAX_POWER_BITS = 100_000


class TemplateRefusal(jinja2.TemplateError):
    """The template called `raise_exception`."""


class BudgetExceeded(jinja2.TemplateError):
    """The rendering took too long or produced too much."""


class _Budget:
    """Processor time and characters of one rendering.

    Processor time of the thread, not wall time: a busy machine must not refuse a harmless template.
    """

    def __init__(self, max_s: float, max_chars: int) -> None:
        self._max_s, self._max_chars = max_s, max_chars
        self._deadline = time.thread_time() + max_s
        self._num_chars = 0

    def check_time(self) -> None:
        if time.thread_time() > self._deadline:
            raise BudgetExceeded(f"rendering took more than {self._max_s:g} s")

    def count(self, chunk: str) -> None:
        self._num_chars += len(chunk)
        if self._num_chars > self._max_chars:
            raise BudgetExceeded(f"rendering produced more than {self._max_chars} characters")


class TemplateSandbox(ImmutableSandboxedEnvironment):
    """The environment that Hugging Face chat templates expect, with a budget.

    `trim_blocks` and `lstrip_blocks` on; `raise_exception`, `strftime_now`, `tojson` without HTML escapes, `{% break %}`,
    `{% continue %}` and `{% generation %}` known. `now` is the clock of `strftime_now`.
    """

    intercepted_binops: ClassVar[frozenset[str]] = frozenset(("*", "**"))  # type: ignore[misc]  # read, never assigned

    def __init__(self, now: Callable[[], datetime]) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[LoopControlExtension, _GenerationBlock], autoescape=False
        )
        del self.globals["lipsum"]
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = lambda form: now().strftime(form)
        self.filters["tojson"] = _tojson

    def render(
        self, template: jinja2.Template, variables: Mapping[str, object], *, max_s: float, max_chars: int
    ) -> str:
        """Render within the budget; raises BudgetExceeded, TemplateRefusal, or whatever the template's code raises."""
        budget = _Budget(max_s, max_chars)
        chunks: list[str] = []
        for chunk in template.generate({**variables, _BUDGET: budget}):
            budget.count(chunk)
            budget.check_time()
            chunks.append(chunk)
        return "".join(chunks)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805  # Jinja's signature
        """Call on behalf of the template, after a look at the clock."""
        budget = __context.parent.get(_BUDGET)
        if isinstance(budget, _Budget):
            budget.check_time()
        if __obj is _checked:
            return True
        return super().call(__context, __obj, *args, **kwargs)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Refuse the two operators that make huge values out of small ones."""
        if operator == "*":
            for sequence, times in ((left, right), (right, left)):
                is_repetition = isinstance(sequence, str | list | tuple) and isinstance(times, int)
                if is_repetition and len(sequence) * times > _MAX_REPEATED:
                    raise BudgetExceeded(f"a value repeated to more than {_MAX_REPEATED} elements")
        is_power = operator == "**" and isinstance(left, int) and isinstance(right, int)
        if is_power and left.bit_length() * right > _MAX_POWER_BITS:
            raise BudgetExceeded(f"a power of more than {_MAX_POWER_BITS} bits")
        return super().call_binop(context, operator, left, right)

    def _generate(self, source: nodes.Template, *args: Any, **kwargs: Any) -> str:
        # Jinja's documented hook between parsing and compiling.
        for loop in source.find_all(nodes.For):
            loop.body.insert(0, nodes.ExprStmt(_check_call(loop.lineno), lineno=loop.lineno))
            if loop.test is not None:  # a filter that rejects everything never reaches the body
                loop.test = nodes.And(_check_call(loop.lineno), loop.test, lineno=loop.lineno)
        for macro in source.find_all(nodes.Macro):
            macro.body.insert(0, nodes.ExprStmt(_check_call(macro.lineno), lineno=macro.lineno))
        return super()._generate(source, *args, **kwargs)

    @staticmethod
    def within_budget() -> bool:
        """Stand as the callee of the checks that `_generate` inserts; `call` does the checking."""
        return True


_checked = TemplateSandbox.within_budget


def _check_call(lineno: int) -> nodes.Call:
    callee = nodes.EnvironmentAttribute("within_budget", lineno=lineno)
    return nodes.Call(callee, [], [], None, None, lineno=lineno)


class _GenerationBlock(Extension):
    """`{% generation %}…{% endgeneration %}`: marks an assistant's words for training; here it is its content."""

    tags: ClassVar[set[str]] = {"generation"}  # type: ignore[misc]

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: object) -> None:
    raise TemplateRefusal(str(message))


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
