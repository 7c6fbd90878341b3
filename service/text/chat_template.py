"""Turn chat messages into the prompt that the model was trained on.

Renders the model's own template and encodes the result; the prompt gets exactly the bos that the template writes, never another.
Control tokens written in contents stay ordinary text (see `control_tokens`) unless `parse_special_in_content` is switched on.
Rendering and encoding of long chats take milliseconds to seconds: run them off the event loop.

Where the template comes from: a file named on the command line, else the model's own (see `model_directory` and
`gguf_vocabulary`). A model with several named ones uses `tool_use` when a request brings tools, else `default`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path

import jinja2

from service.errors import ConfigError, InvalidRequest, ModelLoadError
from service.text.chat_messages import clean_value, normalise_messages
from service.text.control_tokens import ControlTokenGuard
from service.text.template_sandbox import BudgetExceeded, TemplateRefusal, TemplateSandbox
from service.text.tokenizer import Tokenizer

NO_CHAT_TEMPLATE = "this model has no chat template; start the service with --chat-template FILE or use /v1/completions"


def _local_time() -> datetime:
    return datetime.now().astimezone()


class ChatTemplate:
    """A model's chat template with its tokenizer.

    `source`: the template's text, several by name, or None for a model without one (then every chat is refused, nothing else).
    `max_render_s` (processor time) and `max_render_chars` bound one rendering. Immutable, safe to share between threads.
    """

    def __init__(
        self,
        source: str | Mapping[str, str] | None,
        tokenizer: Tokenizer,
        *,
        parse_special_in_content: bool = False,
        max_render_s: float = 2.0,
        max_render_chars: int = 32_000_000,
        now: Callable[[], datetime] = _local_time,
    ) -> None:
        """Compile; raises ModelLoadError with line and reason if a template's syntax is wrong."""
        self._tokenizer = tokenizer
        self._parse_special_in_content = parse_special_in_content
        self._max_render_s, self._max_render_chars = max_render_s, max_render_chars
        self._sandbox = TemplateSandbox(now)
        sources = {} if source is None else {"default": source} if isinstance(source, str) else dict(source)
        self._templates = {name: self._compile(name, text) for name, text in sources.items()}
        if self._templates and "default" not in self._templates:
            raise ModelLoadError(f"the chat templates are named {sorted(self._templates)}; one must be named 'default'")
        self._guard = ControlTokenGuard(tokenizer)

    @classmethod
    def load(
        cls, tokenizer: Tokenizer, *, override: Path | None = None, parse_special_in_content: bool = False
    ) -> ChatTemplate:
        """Take the template from `override` if given, else from the model; raises ConfigError if the file cannot be read."""
        source: str | Mapping[str, str] | None = tokenizer.chat_templates or None
        if override is not None:
            try:
                source = override.read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as cause:
                raise ConfigError(f"the chat template {override} cannot be read: {cause}") from cause
        return cls(source, tokenizer, parse_special_in_content=parse_special_in_content)

    @property
    def is_available(self) -> bool:
        """Whether chats can be rendered at all."""
        return bool(self._templates)

    def render(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, object]] | None = None,
        variables: Mapping[str, object] | None = None,
    ) -> str:
        """Return the prompt as text, for display; `variables` are further names that the template may know.

        Raises InvalidRequest with a path for malformed messages, and with the template's own words where it refuses.
        """
        return self._render(normalise_messages(messages), add_generation_prompt, _clean_tools(tools), variables)

    def encode(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, object]] | None = None,
        variables: Mapping[str, object] | None = None,
    ) -> list[int]:
        """Return the prompt as token ids, at least one; raises as `render` does."""
        normalised, cleaned_tools = normalise_messages(messages), _clean_tools(tools)
        ids: list[int] | None = None
        if self._parse_special_in_content:
            text = self._render(normalised, add_generation_prompt, cleaned_tools, variables)
        else:
            marked = [self._mark(message) for message in normalised]
            marked_tools = None if cleaned_tools is None else [self._guard.mark_value(tool) for tool in cleaned_tools]
            marked_variables = self._guard.mark_value(clean_value(dict(variables or {}), "chat_template_kwargs"))
            assert isinstance(marked_variables, dict)
            text = self._render(marked, add_generation_prompt, marked_tools, marked_variables)
            ids = self._guard.encode(text)
        if ids is None:
            ids = self._tokenizer.encode(text, add_special_tokens=False)
        if not ids:
            raise InvalidRequest("the messages render to an empty prompt", param="messages")
        return ids

    def _mark(self, message: dict[str, object]) -> dict[str, object]:
        """Mark all that a user can write freely; a role is a checked name that templates build control texts from."""
        return {key: value if key == "role" else self._guard.mark_value(value) for key, value in message.items()}

    def _render(
        self,
        messages: list[dict[str, object]],
        add_generation_prompt: bool,
        tools: list[object] | None,
        variables: Mapping[str, object] | None,
    ) -> str:
        if not self._templates:
            raise InvalidRequest(NO_CHAT_TEMPLATE, param="messages")
        template = self._templates.get("tool_use") if tools else None
        names = {
            **(variables or {}),
            **self._tokenizer.named_tokens,
            "messages": messages,
            "tools": tools,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            return self._sandbox.render(
                template or self._templates["default"],
                names,
                max_s=self._max_render_s,
                max_chars=self._max_render_chars,
            )
        except TemplateRefusal as cause:
            raise InvalidRequest(f"the chat template refuses these messages: {cause}", param="messages") from cause
        except BudgetExceeded as cause:
            raise InvalidRequest(f"the chat template exceeds its limits: {cause}", param="messages") from cause
        except Exception as cause:  # a template is foreign code and may raise anything that Python can
            reason = f"{type(cause).__name__}: {cause}"
            raise InvalidRequest(
                f"the chat template cannot render these messages: {reason}", param="messages"
            ) from cause

    def _compile(self, name: str, source: str) -> jinja2.Template:
        try:
            return self._sandbox.from_string(source)
        except jinja2.TemplateSyntaxError as cause:
            raise ModelLoadError(
                f"the chat template {name!r} is broken at line {cause.lineno}: {cause.message}"
            ) from cause
        except Exception as cause:  # Jinja compiles to Python, which has limits of its own, as that of nesting
            raise ModelLoadError(f"the chat template {name!r} cannot be compiled: {type(cause).__name__}") from cause


def _clean_tools(tools: Sequence[Mapping[str, object]] | None) -> list[object] | None:
    return None if tools is None else [clean_value(tool, f"tools[{index}]") for index, tool in enumerate(tools)]
